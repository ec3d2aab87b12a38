"""Runs as careless people and schedulers start them: twice, with typing errors, among their copies.

A run that is known by its name alone goes on in the folder of another, or in a copy. One that takes
an empty folder for the last run begins anew, and days of training are elsewhere. Without a lock,
two jobs write one log. What nobody looks at before ranks start ends in pages of traceback. A writer
of YAML 1.1 and a reader that takes more for numbers do not fit together.
"""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
from processes import ROOT
from training_runs import log_of, write_config

from s2s_lib import launch
from s2s_lib.training.config import load_config
from s2s_lib.training.lock import locked
from s2s_lib.training.runs import check_folder, run_folder
from s2s_lib.training.yaml_lines import as_yaml

# The ranks need not import this file, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


# Before any rank starts


@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf", "1e99"])
def test_a_timeout_that_is_none_is_told_before_ranks_start(value, s2s):
    code, out, err = s2s("train", write_config(s2s.folder), "--timeout", value)
    assert (code, out) == (2, "")
    assert err.startswith("timeout is a number of seconds above 0") and err.count("\n") == 1


@pytest.mark.parametrize(
    "output", [".", "..", "runs/..", "a\0b", "text.txt/below", "n" * 300, "/proc/none/run", "/"]
)
def test_an_output_that_no_folder_can_have_is_told_before_ranks_start(output, s2s):
    code, out, err = s2s("train", write_config(s2s.folder, output=output))
    assert (code, out) == (2, "")
    assert err.startswith("output ") and err.count("\n") == 1
    assert sorted(path.name for path in s2s.folder.iterdir() if path.name != "runs") == [
        "run.yaml",
        "text.txt",
    ]


def test_a_run_inside_its_own_text_is_refused(s2s):
    (s2s.folder / "texts").mkdir()
    (s2s.folder / "link").symlink_to("texts")
    (s2s.folder / "texts/one.txt").write_text("one and two and three " * 100)
    for output in ("texts", "texts/runs/mine", "link/run", "texts/../link/run"):
        path = write_config(s2s.folder, data={"path": "texts"}, output=output)
        code, _, err = s2s("train", path)
        assert code == 2 and "is inside data.path texts" in err
    # Names with a dot in front are no text, nor is what is beside it.
    for output in ("texts/.runs/mine", "texts-2", "text"):
        check_folder(load_config(path, [f"output={output}"]))


@pytest.mark.parametrize(
    "name", ["7e12", "1e3", "-1E+5", "on", "0x1f", "1:30", "2001-01-01", "~", "a: b", "é\u2028"]
)
def test_a_runs_own_config_is_read_as_what_it_was(name, s2s):
    path = write_config(s2s.folder, data={"path": name})
    config = load_config(path, [f"output={json.dumps(name)}", f"data.path={json.dumps(name)}"])
    again = s2s.folder / "again.yaml"
    again.write_text(as_yaml(config.model_dump(mode="json")), encoding="utf-8")
    assert load_config(again) == config


# Which folder


def save_in(folder):
    """As far as the choice of a folder goes."""
    (folder / "checkpoints/step-000001").mkdir(parents=True)
    (folder / "checkpoints/step-000001/manifest.json").write_text("")
    return folder


def test_a_run_goes_on_as_itself_among_copies_failed_starts_and_runs_of_other_names(s2s):
    def new(output):
        return run_folder(f"runs/{output}", resume=False)

    def again(output, runs="runs"):
        return run_folder(f"{runs}/{output}", resume=True)

    runs = Path("runs")
    assert again("llama") == runs / "llama"
    save_in(runs / "llama")
    assert save_in(new("llama-2")) == runs / "llama-2"
    shutil.copytree(runs / "llama", runs / "llama-20240101")
    shutil.copytree(runs / "llama", runs / "llama-007")
    (runs / "llama-9").write_text("")
    assert again("llama") == runs / "llama"
    # A start that failed at once leaves a folder, which is taken only where nothing else is.
    assert new("llama") == runs / "llama-3"
    assert again("llama") == runs / "llama"
    save_in(runs / "llama-3")
    assert again("llama") == runs / "llama-3"
    # And the other way round: this name belongs to a run of llama.
    assert again("llama-3") == runs / "llama-3-2"
    assert again("llama-2") == runs / "llama-2"
    assert again("llama-20240101") == runs / "llama-20240101"
    # Numbers are in order, whatever is between them.
    for number in (4, 5, 6, 7, 8, 10):
        assert save_in(new("llama")) == runs / f"llama-{number}"
    assert again("llama") == runs / "llama-10"
    runs.rename("moved")
    assert again("llama", "moved") == Path("moved/llama-10")


# Two jobs


def train_while_others_try(world, config):
    """How often another job was refused; after the run it is not."""
    loop, refused = importlib.import_module("s2s_lib.training.train"), []
    one_step = loop.one_step

    def try_first(*args):
        with pytest.raises(ValueError, match="another job writes into run"):
            with locked(Path("run")):
                pass
        refused.append(True)
        return one_step(*args)

    loop.one_step = try_first
    loop.train(world, config)
    loop.one_step = one_step
    if world.rank == 0:
        with locked(Path("run")):
            pass
    return len(refused)


def test_a_run_holds_its_folder_while_it_is_alive(s2s):
    path = write_config(s2s.folder, steps=2, data_parallel_size=2, output="run")
    assert launch(train_while_others_try, load_config(path), ranks=2) == [2, 2]


def test_a_job_that_is_started_again_while_the_first_lives_is_refused_and_writes_nothing(s2s):
    path = write_config(s2s.folder, steps=1)
    assert s2s("train", path)[0] == 0
    run = s2s.folder / "runs/run"
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with locked(run):
        code, out, err = s2s("train", path, "--resume", "--steps", 2)
        assert (code, out) == (1, "")
        assert f"another job writes into runs/run: process {os.getpid()} on " in err
        # The way out.
        assert s2s("train", path)[1].startswith("runs/run-2: begins")
    assert before == {
        file: file.read_bytes() if file.name != ".lock" else before[file]
        for file in run.rglob("*")
        if file.is_file()
    }


def test_the_kernel_takes_the_lock_from_who_was_killed(tmp_path):
    program = (
        "import pathlib, runpy, sys\n"
        f"lock = runpy.run_path({str(ROOT / 's2s_lib/training/lock.py')!r})\n"
        f"with lock['locked'](pathlib.Path({str(tmp_path)!r})):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"process {process.pid} on "):
            with locked(tmp_path):
                pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        with locked(tmp_path):
            pass


# What was left


def test_a_broken_last_checkpoint_is_told_with_a_way_out_that_the_command_has(s2s):
    keys = {"steps": 2, "checkpoint": {"every": 1}, "data_parallel_size": 2, "zero_stage": 3}
    path = write_config(s2s.folder, **keys)
    assert s2s("train", path)[0] == 0
    last = s2s.folder / "runs/run/checkpoints/step-000002"
    shard = last / "rank-00001.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    code, _, err = s2s("train", path, "--resume", "--steps", 3)
    assert code == 1 and "rank-00001.safetensors is broken" in err
    assert "Move this checkpoint out of its folder: --resume, load and export then take" in err
    last.rename(s2s.folder / "broken")
    code, out, _ = s2s("train", path, "--resume", "--steps", 3)
    assert code == 0 and out.startswith("runs/run: goes on after step 1,")
    assert [entry["step"] for entry in log_of(last.parent.parent)] == [1, 2, 3]


def test_lines_of_a_log_that_are_none_are_left_out(s2s):
    path = write_config(s2s.folder, steps=3)
    assert s2s("train", path)[0] == 0
    log = s2s.folder / "runs/run/log.jsonl"
    one, two, three = log.read_bytes().splitlines()
    log.write_bytes(b"\n".join([one[:20], b"[]", b"\xff\0", two, b'{"step": 3}', three, b"{"]))
    assert s2s("train", path, "--resume", "--steps", 4)[0] == 0
    assert [entry["step"] for entry in log_of(log.parent)] == [2, 3, 4]


def test_an_edited_manifest_is_told_by_export_and_the_old_file_stays(s2s):
    assert s2s("train", write_config(s2s.folder, steps=1))[0] == 0
    (s2s.folder / "w.safetensors").write_text("precious")
    manifest = next(s2s.folder.glob("runs/run/checkpoints/step-*/manifest.json"))
    there = json.loads(manifest.read_text())
    del there["tensors"]["norm.weight"]["dtypes"]
    manifest.write_text(json.dumps(there))
    code, out, err = s2s("export", "runs/run", "w.safetensors")
    assert (code, out) == (2, "") and "manifest.json is no manifest" in err
    assert "tensors.norm.weight.dtypes: Field required" in err
    assert (s2s.folder / "w.safetensors").read_text() == "precious"
