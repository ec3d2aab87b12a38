"""A rank of `s2s train` is killed at some moment; the run gets over it. tools/kills.py does this
30 times, with all layouts; here are a few of them.

A save that is not atomic, a checkpoint that lacks the optimizer, the data's position or the state
of dropout, a log that keeps the steps that are done again, a command that hangs, blames a
bystander or leaves processes behind: each fails here.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
from processes import ROOT
from training_runs import course, rank_processes, start


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


kills = load(ROOT / "tools" / "kills.py")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The course of a run that nobody disturbs, by layout."""
    folder = tmp_path_factory.mktemp("undisturbed")
    layouts = ("zero3", "background")
    return {name: kills.undisturbed(kills.write_config(folder, name)) for name in layouts}


@pytest.mark.parametrize(
    "layout, kill",
    [
        ("zero3", kills.Kill(rank=0, step=2, saving=False)),
        ("background", kills.Kill(rank=1, step=7, saving=False, work=0.01)),
        ("background", kills.Kill(rank=0, step=9, saving=True)),
    ],
)
def test_after_a_kill_the_run_goes_on_as_if_nothing_had_been(tmp_path, expected, layout, kill):
    kills.survive(kills.write_config(tmp_path, layout), layout, kill, expected[layout])


def test_a_kill_before_a_checkpoint_is_whole_leaves_the_one_before(tmp_path, expected):
    """A kill may come too late by a moment, when the checkpoint has its name; then once more."""
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        kill = kills.Kill(rank=3, step=6, saving=True)
        path = kills.write_config(folder, "zero3")
        after = kills.survive(path, "zero3", kill, expected["zero3"])
        if after.cost_a_checkpoint:
            assert (after.logged, after.step) == (6, 3)
            return
    pytest.fail("five kills, and none came while a checkpoint was being written")


def test_a_kill_right_after_resuming_keeps_the_log(tmp_path):
    """Before the first step is logged again, the steps that were done must be on disk."""
    path = kills.write_config(tmp_path, "zero3")
    first = start(tmp_path, "train", path.name, "--steps", 6)
    assert first.wait(kills.LONG) == 0
    process = start(tmp_path, "train", path.name, "--resume")
    assert "goes on after step 6" in process.stdout.readline()
    rank_processes(process)[0].kill()
    process.communicate(timeout=kills.SOON)
    steps = [step for step, *_ in course(kills.folder_of(path))]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 6


def test_what_is_surely_saved_is_a_checkpoint_that_the_next_step_came_after():
    steps = range(9)
    assert [kills.checkpointed(n, background=False) for n in steps] == [0, 0, 0, 0, 3, 3, 3, 6, 6]
    assert [kills.checkpointed(n, background=True) for n in steps] == [0, 0, 0, 0, 0, 0, 0, 3, 3]
