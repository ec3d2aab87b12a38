"""The set-up notices what is wrong with .venv and nothing else; lessons are stored without noise.

pip is never called here: what it leaves behind is made by hand, in a real virtual environment of a
project in a temporary folder. A check that is dropped from `fault` or `contents` fails one test.
"""

import importlib.util
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project with pins and a .venv that holds pip alone."""
    root = tmp_path_factory.mktemp("project")
    (root / "tools").mkdir()
    shutil.copy(TOOLS / "setup.py", root / "tools")
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "constraints.txt").write_text("torch==2.13.0\n")
    setup = load(root / "tools" / "setup.py")
    with (root / "lock").open("w") as lock:
        setup.make(lock, "a test")
    return root


@pytest.fixture
def setup(project, tmp_path, monkeypatch):
    """The set-up script of that project, with pip replaced by a list of its calls."""
    setup = load(project / "tools" / "setup.py")
    monkeypatch.setattr("sys.argv", ["setup.py"])
    setup.calls = []

    def install(lock):
        setup.calls.append("pip")
        setup.STAMP.write_text(setup.contents())

    monkeypatch.setattr(setup, "install", install)
    monkeypatch.setattr(setup, "make", lambda lock, reason: setup.calls.append(reason))
    setup.main()
    setup.calls.clear()
    return setup


def damaged(setup, path: Path, damage) -> list[str]:
    """What the set-up does when this file is damaged; the file is put back."""
    kept = path.with_name("kept")
    shutil.copy2(path, kept, follow_symlinks=False)
    damage(path)
    setup.main()
    path.unlink(missing_ok=True)
    kept.rename(path)
    return setup.calls


def packages(setup) -> Path:
    return next(setup.VENV.glob("lib/python3*/site-packages"))


def test_a_set_up_that_is_right_does_nothing(setup):
    setup.main()
    assert setup.calls == []


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_a_changed_pin_calls_pip_once(setup, file):
    (setup.ROOT / file).write_text((setup.ROOT / file).read_text() + "# changed\n")
    setup.main()
    setup.main()
    assert setup.calls == ["pip"]


def test_a_set_up_that_was_stopped_goes_on(setup):
    setup.STAMP.unlink()
    setup.main()
    assert setup.calls == ["pip"]


def test_a_package_that_came_or_went_calls_pip(setup):
    folder = packages(setup) / "six-1.17.0.dist-info"
    folder.mkdir()
    for name in ("INSTALLER", "RECORD"):
        (folder / name).touch()
    setup.main()
    shutil.rmtree(folder)
    setup.main()
    assert setup.calls == ["pip", "pip"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("")])
def test_a_file_that_is_lost_or_cut_short_makes_it_anew(setup, damage):
    reason, pip = damaged(setup, packages(setup) / "pip" / "__init__.py", damage)
    assert "pip/__init__.py is" in reason and pip == "pip"


def test_a_package_that_is_there_by_half_makes_it_anew(setup):
    (record,) = packages(setup).glob("pip-*.dist-info/RECORD")
    assert "RECORD is missing" in damaged(setup, record, Path.unlink)[0]


def test_an_interpreter_that_is_gone_makes_it_anew(setup):
    assert "python is missing" in damaged(setup, setup.VENV / "bin" / "python", Path.unlink)[0]


def test_a_folder_that_was_moved_makes_it_anew(setup, monkeypatch, tmp_path):
    shutil.copytree(setup.VENV, tmp_path / ".venv", symlinks=True)
    monkeypatch.setattr(setup, "VENV", tmp_path / ".venv")
    assert setup.fault() == "it was made in another folder"


def test_another_interpreter_makes_it_anew_only_when_it_was_chosen(setup, monkeypatch):
    monkeypatch.setattr(setup, "BASE", "/opt/python3.99")
    assert setup.fault() is None
    assert setup.fault(mine=True).startswith("the present one belongs to ")


lessons = load(TOOLS / "lessons.py")


def test_pieces_of_one_stream_are_joined_and_others_keep_their_place():
    streams = [("stdout", "a"), ("stdout", "b"), ("stderr", "c"), ("stdout", "d")]
    outputs = [new_output("stream", name=name, text=text) for name, text in streams]
    assert [output.text for output in lessons.joined(outputs)] == ["ab", "c", "d"]


def test_checks_are_counted_and_their_imports_are_not():
    source = "from torch.testing import assert_close\nassert 1\nassert_close(a, b)\ncheck.ring(f)"
    assert lessons.checks(new_notebook(cells=[new_code_cell(source)])) == 3


def test_a_lesson_that_raises_is_named_by_its_cell_and_left_as_it_was(tmp_path, capfd):
    cells = [new_code_cell("1"), new_code_cell("1 / 0", id="the-culprit")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "00_x.ipynb")
    before = (tmp_path / "00_x.ipynb").read_bytes()
    assert not lessons.refresh(tmp_path / "00_x.ipynb")
    assert "FAILED in cell 1 (the-culprit)" in capfd.readouterr().out
    assert (tmp_path / "00_x.ipynb").read_bytes() == before


def test_what_is_stored_is_the_same_after_every_run_and_names_no_folder(tmp_path):
    raises = new_code_cell("import json\njson.loads('{')", metadata={"tags": ["raises-exception"]})
    widget = new_code_cell("from ipywidgets import IntSlider\nIntSlider(3)")
    noisy = new_code_cell("for i in range(3):\n    print(i, flush=True)")
    noisy.metadata["execution"] = {"iopub.execute_input": "now"}
    path = tmp_path / "00_x.ipynb"
    nbformat.write(new_notebook(cells=[noisy, raises, widget]), path)
    assert lessons.refresh(path)
    first = path.read_text()
    assert lessons.refresh(path) and path.read_text() == first
    assert 'execution":' not in first and "json/decoder.py" in first
    assert lessons.sys.base_prefix not in first and "~/" not in first
    assert "model_id" not in first and first.count('"output_type": "stream"') == 1


def test_a_lesson_that_does_not_exist_is_answered_with_those_that_do(tmp_path):
    (tmp_path / "00_ranks.ipynb").touch()
    with pytest.raises(ValueError, match="no lesson starts with '07'; there are: 00_ranks"):
        lessons.chosen("07", tmp_path)
