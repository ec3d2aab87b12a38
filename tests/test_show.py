"""Source and table of the lessons: both are compared as text when a lesson runs as a test."""

import inspect
import subprocess
import sys

import pytest

from s2s_lib.course.show import Row, Table, row_ddp, row_one_process, show, who_holds_what
from s2s_lib.meters.units import human_bytes


def displayed(capsys, *objects):
    """What show() gives to a notebook, as Markdown."""
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
    shown = []
    try:
        shell.display_pub.publish = lambda data, **_: shown.append(data)
        show(*objects)
    finally:
        type(shell).clear_instance()
    return [data["text/markdown"] for data in shown]


def test_a_notebook_shows_a_fenced_block_for_each_object(capsys):
    first, second = displayed(capsys, human_bytes, row_ddp)
    assert first == "```python\n" + inspect.getsource(human_bytes).rstrip() + "\n```"
    assert "def row_ddp" in second
    assert capsys.readouterr().out == ""


def test_source_with_a_fence_inside_gets_a_longer_fence(capsys):
    def fenced():
        """```
        inside
        ```"""

    (markdown,) = displayed(capsys, fenced)
    assert markdown.startswith("````python\ndef fenced") and markdown.endswith("\n````")


def test_outside_a_notebook_the_source_is_printed():
    program = "from s2s_lib.course.show import Row, show; show(Row, Row.held.fget)"
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.startswith("@dataclass(frozen=True)\nclass Row:\n")
    assert "\n@property\ndef held(self)" in runs[0].stdout, "a method moves to the left margin"


def test_what_has_no_python_source_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="no Python source to show for <built-in.*len.*functions"):
        show(len)
    with pytest.raises(ValueError, match="for 3;"):
        show(3)


def test_ddp_holds_what_one_process_holds_and_sends_nearly_twice_the_gradients():
    alone, together = row_one_process(1000), row_ddp(1000, 4)
    assert (alone.weights, alone.gradients, alone.optimizer) == (4000, 4000, 8000)
    assert together.held == alone.held == 16000
    assert (alone.sent_per_step, together.sent_per_step) == (0, 2 * 3 / 4 * 4000)
    assert row_ddp(1000, 1).sent_per_step == 0


def test_the_table_grows_by_a_line_a_strategy():
    rows = [row_one_process(4_900_000), row_ddp(4_900_000, 4), Row("new", 1, 2, 3, 4)]
    assert repr(who_holds_what(rows)) == "\n".join(
        [
            "| each rank | weights | gradients | optimizer | held in all | sent per step |",
            "|:--|--:|--:|--:|--:|--:|",
            "| one process | 19.6 MB | 19.6 MB | 39.2 MB | 78.4 MB | 0 B |",
            "| DDP, 4 ranks | 19.6 MB | 19.6 MB | 39.2 MB | 78.4 MB | 29.4 MB |",
            "| new | 1 B | 2 B | 3 B | 6 B | 4 B |",
        ]
    )
    assert Table(["a", "b"], [])._repr_markdown_() == "| a | b |\n|:--|--:|"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.6, "1 kB"),
        (1000, "1 kB"),
        (19_571_712, "19.6 MB"),
        (999_400, "999 kB"),
        (999_600, "1 MB"),
        (280e9, "280 GB"),
        (-1500, "-1.5 kB"),
    ],
)
def test_bytes_are_written_with_three_digits_and_no_exponent(count, text):
    assert human_bytes(count) == text
