"""Every lesson has the anatomy, and every notebook is stored clean.

What nbval cannot see: a section that is missing, an exercise without its check, a solution that is
folded in one viewer and open in another, library code repeated in a cell, outputs that were never
stored, the times and versions of the machine that stored them.
"""

from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LESSONS = [path for path in NOTEBOOKS if path.stem[0].isdigit()]

PROMISES = ["you will", "minutes", "processes"]
SECTIONS = [
    "predict",
    "break it",
    "the bill",
    "in the wild",
    "what we learned",
    "exercises",
    "further",
]
REPEATED = 6

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def cells(path: Path, kind: str | None = None) -> list:
    found = nbformat.read(path, as_version=4).cells
    return [cell for cell in found if kind in (None, cell.cell_type)]


def headings(cell) -> list[str]:
    lines = cell.source.splitlines() if cell.cell_type == "markdown" else []
    return [line.lower() for line in lines if line.startswith("## ")]


def is_solution(cell) -> bool:
    return cell.cell_type == "code" and cell.source.startswith("# solution\n")


@each_notebook
def test_a_notebook_keeps_no_trace_of_the_run_that_stored_it(path):
    notebook = nbformat.read(path, as_version=4)
    assert "widgets" not in notebook.metadata
    assert "version" not in notebook.metadata.get("language_info", {})
    assert not [cell.id for cell in notebook.cells if "execution" in cell.metadata]


@each_notebook
def test_every_cell_has_run_in_order(path):
    counts = [cell.execution_count for cell in cells(path, "code")]
    assert counts == list(range(1, len(counts) + 1)), "run `make lessons`"


@each_notebook
def test_pieces_of_one_stream_are_stored_as_one(path):
    for cell in cells(path, "code"):
        names = [output.get("name") for output in cell.outputs]
        assert not [a for a, b in zip(names, names[1:], strict=False) if a and a == b], cell.id


@each_notebook
def test_a_folded_cell_is_folded_in_every_viewer_and_says_that_it_is_a_solution(path):
    for cell in cells(path, "code"):
        hidden = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        tagged = "hide-input" in cell.metadata.get("tags", [])
        assert hidden == tagged == is_solution(cell), f"{cell.id} is folded by half"


@each_lesson
def test_a_lesson_opens_with_its_promise_and_one_cell_of_set_up(path):
    title, *others = cells(path)
    assert title.source.startswith("# ")
    missing = [word for word in PROMISES if word not in title.source.lower()]
    assert not missing, f"the title cell does not say {missing}"
    set_up = next(index for index, cell in enumerate(others) if cell.cell_type == "code")
    assert set_up <= 1 and "s2s_lib" in others[set_up].source


@each_lesson
def test_the_sections_of_every_lesson_are_there_in_their_order(path):
    remaining = iter([heading for cell in cells(path) for heading in headings(cell)])
    missing = [name for name in SECTIONS if not any(name in heading for heading in remaining)]
    assert not missing, f"missing, or out of order: {missing[0]}"


@each_lesson
def test_three_exercises_each_with_a_check_before_the_folded_answer(path):
    lesson = cells(path)
    starts = [any("exercises" in line for line in headings(cell)) for cell in lesson]
    checked, answers = False, 0
    for cell in lesson[starts.index(True) :]:
        if is_solution(cell):
            assert checked, f"no check between {cell.id} and the answer before it"
            checked, answers = False, answers + 1
        elif cell.cell_type == "code":
            checked = checked or "check." in cell.source
    assert answers >= 3 and not checked


@each_lesson
def test_a_lesson_does_not_repeat_library_code(path):
    library = {run for file in ROOT.glob("s2s_lib/**/*.py") for run in runs(file.read_text())}
    for cell in cells(path, "code"):
        repeated = library & set(runs(cell.source))
        assert not repeated, f"{cell.id}: use show() instead of\n" + "\n".join(min(repeated))


def runs(source: str) -> list[tuple[str, ...]]:
    """Every stretch of consecutive lines that is long enough to be a copy."""
    lines = [line.strip() for line in source.splitlines()]
    lines = [line for line in lines if len(line) > 3 and not line.startswith("#")]
    return [tuple(lines[start : start + REPEATED]) for start in range(len(lines) - REPEATED + 1)]
