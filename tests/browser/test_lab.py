"""The lessons run from top to bottom in a real browser: `make browser`.

nbval and nbclient talk to the kernel alone. Here JupyterLab itself opens each notebook, as a reader
would, and runs all of its cells; pictures of each are left in the folder that SCREENSHOTS names.
"""

import os
from pathlib import Path

import lab
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

NOTEBOOKS = Path(__file__).resolve().parent.parent.parent / "notebooks"
LESSONS = sorted(NOTEBOOKS.glob("*.ipynb"))
LESSON_SECONDS = 600

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(LESSON_SECONDS + 120),
    pytest.mark.skipif(not lab.CHROMIUM, reason="NO BROWSER CHECK: chromium is not installed"),
]


@pytest.fixture(scope="module")
def page():
    with lab.browser() as page:
        yield page


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with lab.serve(NOTEBOOKS.parent, tmp_path_factory.mktemp("jupyter")) as server:
        yield server


def complaints(cells: list[dict]) -> list[str]:
    """What a reader would stumble over: an error nobody announced, a cell that did not run."""
    found = []
    for index, cell in enumerate(cells):
        if cell["cell_type"] != "code" or not "".join(cell["source"]).strip():
            continue
        if cell["execution_count"] is None:
            found.append(f"cell {index} did not run")
        if "raises-exception" not in cell["metadata"].get("tags", []):
            errors = [output for output in cell["outputs"] if output["output_type"] == "error"]
            found += [f"cell {index}: {error['ename']}: {error['evalue']}" for error in errors]
    return found


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_runs_to_its_end_in_jupyterlab(path, page, server):
    cells = lab.run(page, server, f"notebooks/{path.name}", LESSON_SECONDS)
    folder = Path(os.environ.get("SCREENSHOTS", "screenshots"))
    lab.picture(page, folder, path.stem, len(cells))
    assert complaints(cells) == []
    assert page.asked_outside == []


def test_the_check_sees_an_error_and_the_cells_that_it_kept_from_running(page, tmp_path):
    expected = new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]})
    cells = [expected, new_code_cell("print('on')"), new_code_cell("int('x')"), new_code_cell("1")]
    (tmp_path / "home").mkdir()
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), tmp_path / "broken.ipynb")
    with lab.serve(tmp_path, tmp_path / "home") as server:
        after = lab.run(page, server, "broken.ipynb", seconds=60)
    error = "cell 2: ValueError: invalid literal for int() with base 10: 'x'"
    assert complaints(after) == [error, "cell 3 did not run"]
