"""Run the lessons again without a browser and store their outputs.

    python tools/lessons.py        every notebook of notebooks/
    python tools/lessons.py 01     those whose name starts with 01

A lesson that raises where it should not is left as it was, its cell is named, and the exit status
is 1. What is stored is what a reader needs: outputs, execution counts 1..n and cell ids; the times,
versions, widget states and folders of the machine that ran it are taken out.
"""

import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
CHECK = re.compile(r"\bassert\b|\bassert_\w+\(|\bcheck\.\w+\(")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# IPython writes the home folder as ~.
PLACES = [f"{place}/" for place in (ROOT, sys.prefix, sys.base_prefix)]
PLACES += [place.replace(str(Path.home()), "~", 1) for place in PLACES]
FOLDERS = re.compile("|".join(map(re.escape, sorted(PLACES, key=len, reverse=True))))
CELL_SECONDS = 600


def chosen(start: str, folder: Path = NOTEBOOKS) -> list[Path]:
    """The notebooks whose name starts so, in reading order; ValueError when there is none."""
    lessons = sorted(folder.glob("*.ipynb"))
    matches = [path for path in lessons if path.stem.startswith(Path(start).stem)]
    if start and not matches:
        names = ", ".join(path.stem for path in lessons)
        raise ValueError(f"no lesson starts with {start!r}; there are: {names}")
    return matches


def checks(notebook) -> int:
    return sum(len(CHECK.findall(cell.source)) for cell in code_cells(notebook))


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def run(notebook, folder: Path) -> str | None:
    """Execute in place, as JupyterLab would from this folder; what went wrong, or None."""
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_SECONDS,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
        extra_arguments=["--log-level=ERROR"],
    )
    reached = []
    client.on_cell_start = lambda cell, cell_index: reached.append((cell_index, cell))
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        index, cell = reached[-1]
        return f"cell {index} ({cell.id}): {COLOURS.sub('', str(error))}"
    return None


def clean(notebook) -> None:
    """Take out what differs from one machine or one run to the next."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [portable(output) for output in joined(cell.outputs)]


def joined(outputs: list) -> list:
    """Neighbouring pieces of one stream as one: where they were cut is chance."""
    kept = []
    for output in outputs:
        name = output.get("name")
        if kept and name and kept[-1].get("name") == name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def portable(output):
    """No widget id, which only the live kernel knows; no folder of this machine in a traceback."""
    output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    if output.output_type == "error":
        output.traceback = [FOLDERS.sub("", line) for line in output.traceback]
    return output


def refresh(path: Path) -> bool:
    notebook = nbformat.read(path, as_version=4)
    print(f"{path.stem:28}", end="", flush=True)
    start = time.perf_counter()
    problem = run(notebook, path.parent)
    took = f"{time.perf_counter() - start:6.1f} s {checks(notebook):4} checks"
    print(f"{took}  FAILED in {problem}" if problem else f"{took}  ok", flush=True)
    if not problem:
        clean(notebook)
        nbformat.write(notebook, path)
    return not problem


def main() -> int:
    try:
        lessons = chosen(sys.argv[1] if len(sys.argv) > 1 else "")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if all([refresh(path) for path in lessons]) else 1


if __name__ == "__main__":
    sys.exit(main())
