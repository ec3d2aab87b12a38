"""The explorer draws what `scene` gives for its controls, again at every change.

Without a kernel its image must still be there, and be the same each time: lessons store it. A
control that is not observed, a schedule left out of the list, a refusal that becomes a traceback,
a bundle without the image or with a random id in it: each fails here.
"""

import html
import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from processes import printed_by

from s2s_lib.course.explorer import SCHEDULES, explore, scene, timed
from s2s_lib.strategies.pipeline import schedule as schedules

VIEW = "application/vnd.jupyter.widget-view+json"
CHANGES = {
    "schedule": "ZB-H1",
    "ranks": 3,
    "microbatches": 5,
    "chunks": 3,
    "backward": 1.5,
    "weight_share": 0.25,
    "transfer": 0.3,
}


def shown(**chosen):
    """What the explorer should show for these values of its controls."""
    picture, numbers = scene(**chosen)
    image = picture._repr_html_().replace("<img", '<img style="max-width: 100%"')
    return f"{image}<p>{html.escape(numbers)}</p>"


def test_every_builder_can_be_chosen():
    assert set(SCHEDULES.values()) == set(schedules.BUILDERS.values())
    assert list(explore().controls["schedule"].options) == list(SCHEDULES)
    assert {"GPipe", "1F1B", "interleaved 1F1B", "ZB-H1", "ZBV"} <= set(SCHEDULES)


def test_it_starts_as_scene_does_or_as_it_is_told():
    assert explore().view.value == shown()
    assert explore(**CHANGES).view.value == shown(**CHANGES)
    large = explore(ranks=20, microbatches=70)
    assert large.view.value == shown(ranks=20, microbatches=70)
    with pytest.raises(TypeError, match="stages"):
        explore(stages=4)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_any_control_draws_again(name):
    # ZBV has halves of backwards, interleaved has chunks: then every control matters to one.
    first = {"schedule": "interleaved 1F1B" if name == "chunks" else "ZBV"}
    explorer = explore(**first)
    before = explorer.view.value
    explorer.controls[name].value = CHANGES[name]
    assert explorer.view.value == shown(**{**first, name: CHANGES[name]}) != before
    if name != "schedule":
        assert explorer.controls[name].continuous_update


def test_the_numbers_name_their_denominators_and_the_peak_of_each_rank():
    assert scene()[1] == (
        "total 33 (1 is a rank's forward of one micro-batch); bubble 27.3 % of the total time, "
        "37.5 % over the useful time; in flight at most, rank by rank: 4, 3, 2, 1"
    )
    assert scene("ZBV")[1].endswith("8, 8, 8, 8 stages of 1/2 of a rank's layers")
    assert "bubble 0.0 % of the total time, 0.0 % over" in scene(ranks=1, backward=0.7)[1]
    assert scene(ranks=20, microbatches=20)[1].endswith("7, 6, 5, ...")


def test_every_schedule_computes_the_same_model():
    for name, build in SCHEDULES.items():
        timetable = timed(build(4, 8), backward=3, weight_share=0.4)
        one = 1 if name == "forward only" else 4
        assert timetable.busy == pytest.approx([8 * one] * 4), name
    slow = timed(schedules.zb_h1(2, 3), backward=3, weight_share=0.4, transfer=0.5)
    durations = {x.kind: end - start for start, end, x in slow.spans[0]}
    assert durations == pytest.approx({"F": 1, "I": 1.8, "W": 1.2})
    assert slow.spans[1][0][0] == 1.5


def test_what_a_schedule_refuses_is_said_and_the_next_change_draws_again():
    explorer = explore(schedule="DualPipeV")
    explorer.controls["microbatches"].value = 7
    assert "<img" not in explorer.view.value
    assert "needs at least as many micro-batches, got 7" in explorer.view.value
    assert "got 7" in explorer._repr_mimebundle_()["text/plain"]
    explorer.controls["microbatches"].value = 9
    assert explorer.view.value == shown(schedule="DualPipeV", microbatches=9)
    with pytest.raises(ValueError, match="got 7"):
        scene("DualPipeV", microbatches=7)
    with pytest.raises(ValueError, match="no schedule '2F2B'; there are naive, GPipe"):
        scene("2F2B")


def test_controls_that_do_not_matter_are_hidden():
    explorer, there = explore(), {}
    for name in SCHEDULES:
        explorer.controls["schedule"].value = name
        hidden = [c for c, control in explorer.controls.items() if control.layout.display == "none"]
        there[name] = {"chunks", "weight_share"} - set(hidden)
        assert set(hidden) <= {"chunks", "weight_share"}
    assert there["interleaved 1F1B"] == there["looped breadth-first"] == {"chunks"}
    assert there["ZB-H1"] == there["DualPipeV"] == {"weight_share"}
    assert there["GPipe"] == there["1F1B"] == there["forward only"] == set()


def test_the_bundle_has_the_live_widget_and_the_image_for_where_it_does_not_live():
    explorer = explore()
    bundle = explorer._repr_mimebundle_()
    assert bundle[VIEW]["model_id"] == explorer.model_id
    assert re.match('<img [^>]*alt="1F1B: 4 stages, 8 micro-batches; total', bundle["text/html"])
    assert bundle["text/plain"].startswith("Explorer: 1F1B: 4 stages, 8 micro-batches; total 33")
    assert explorer.model_id not in bundle["text/html"] + bundle["text/plain"]
    explorer.controls["microbatches"].value = 9
    assert "9 micro-batches" in explorer._repr_mimebundle_()["text/plain"]


def test_the_image_is_the_same_in_another_process():
    program = (
        "from s2s_lib.course.explorer import explore; b = explore()._repr_mimebundle_();"
        "print([b['text/html'], b['text/plain']])"
    )
    bundle = explore()._repr_mimebundle_()
    assert printed_by(program) == repr([bundle["text/html"], bundle["text/plain"]])


def test_a_stored_notebook_keeps_the_image_and_compares_equal(tmp_path):
    cell = new_code_cell("from s2s_lib.course.explorer import explore\nexplore()")
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook = new_notebook(cells=[cell], metadata=kernel)
    NotebookClient(notebook, kernel_name="python3", store_widget_state=False).execute()
    [output] = notebook.cells[0].outputs
    assert set(output.data) == {"text/plain", "text/html", VIEW}
    # A stored lesson has no widget, so that every reader shows the image.
    del output.data[VIEW]
    nbformat.write(notebook, tmp_path / "stored.ipynb")
    nbval = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env"]
    run = subprocess.run(
        [*nbval, "-p", "no:cacheprovider", str(tmp_path / "stored.ipynb")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert run.returncode == 0 and re.search("1 passed", run.stdout), run.stdout
