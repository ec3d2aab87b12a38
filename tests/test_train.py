"""`s2s train`: what a user gets who has one YAML file.

Runs of one seed at different layouts must tell the same losses. Data dealt by a rank's number in
the world and not by its replica, a loss divided by the wrong count, a learning rate that is a step
late, or weights drawn by layout each shift them. A resumed run must do what it would have done:
a position that is saved a step early, dropout that draws from a global generator, or an epoch that
begins again at its first batch does not. What the log counts is counted here a second time, by
class of link and by axis: groups taken for another axis, or forgotten as the two ends of a tied
weight, shift bytes from one axis to another. A run that cannot go on, or has nothing left to do,
must say so in one line; without the comparison ranks start and end in a traceback.
"""

import math
import re
import signal
import subprocess
import sys

import cloudpickle
import psutil
import pytest
import torch
import yaml
from processes import ROOT, wait_until
from safetensors.torch import load_file, save_file
from training_runs import BASE, TEXT, course, log_of, start, write_config

from s2s_lib import bill, launch
from s2s_lib.course.data import Batches, hold_out, text
from s2s_lib.course.model import GPT, next_token_loss
from s2s_lib.meters.timeline import Timeline, Timelines
from s2s_lib.meters.units import human_bytes
from s2s_lib.training.config import load_config
from s2s_lib.training.parallel import Parallel, parallelize
from s2s_lib.training.report import bars_of, rows_of
from s2s_lib.training.train import (
    EVALUATED,
    batches_of,
    build,
    make_optimizer,
    one_step,
    rate_of,
    train,
)

# The ranks need not import this file, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LAYOUTS = {
    "one": {},
    "two": {"data_parallel_size": 2, "zero_stage": 2},
    "four": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}
MORE_LAYOUTS = {
    "interleaved": {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved"},
    "hybrid": {"data_parallel_size": 4, "zero_stage": 3, "hybrid_shard_size": 2},
    "order": {
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "mesh_order": ["tp", "pp", "dp"],
        "activation_checkpointing": True,
    },
}


def near(one, other, tolerance=1e-9):
    """Whether two courses have the same steps, and numbers this near."""
    return len(one) == len(other) and all(
        a[0] == b[0]
        and all(math.isclose(x, y, rel_tol=tolerance) for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )


# The command, as a process of its own.


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Folder, stdout, stderr and exit code of a run at each of LAYOUTS, all at the same time."""
    folder = tmp_path_factory.mktemp("ran")
    for name, keys in LAYOUTS.items():
        write_config(folder, name, **keys)
    processes = {name: start(folder, "train", f"{name}.yaml") for name in LAYOUTS}
    ended = {name: process.communicate(timeout=250) for name, process in processes.items()}
    return {
        name: (folder / "runs" / name, *ended[name], process.returncode)
        for name, process in processes.items()
    }


@pytest.mark.parametrize("name, ranks", [("one", 1), ("two", 2), ("four", 4)])
def test_one_file_trains_on_as_many_ranks_as_it_says(ran, name, ranks):
    folder, out, err, code = ran[name]
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"runs/{name}: begins, ranks {ranks}, steps 4"
    assert all(line.startswith(f"step    {n}/4  loss ") for n, line in enumerate(lines[1:5], 1))
    assert re.search(r": step 4, loss [0-9.]+, [0-9.]+ on held-out text$", lines[5])
    assert lines[6:] == [f"report: runs/{name}/report.html"]
    log = log_of(folder)
    assert [entry["step"] for entry in log] == [1, 2, 3, 4]
    for entry, line in zip(log, lines[1:5], strict=True):
        sent, held = human_bytes(sum(entry["sent"].values())), human_bytes(entry["held_total"])
        assert line.endswith(f"  all sent {sent}  the fullest holds {held}")
        assert all(math.isfinite(entry[key]) for key in ("loss", "grad_norm", "lr"))
        assert entry["tokens_per_second"] > 0 and entry["held"]["weights"] > 0
        assert sum(entry["sent"].values()) > 0 or ranks == 1
    assert log[-1]["loss"] < log[0]["loss"]


def test_layouts_of_one_seed_tell_the_same_losses_norms_and_evaluation(ran):
    one = ran["one"]
    for folder, out, _, _ in (ran["two"], ran["four"]):
        assert near(course(folder), course(one[0]))
        ended, expected = out.splitlines()[5], one[1].splitlines()[5]
        assert ended.partition(": step")[2] == expected.partition(": step")[2]


def test_the_report_has_its_pictures_and_names_no_folder(ran):
    for folder, *_ in ran.values():
        page = (folder / "report.html").read_text()
        assert page.count("<img ") == (3 if folder.name == "one" else 4)
        assert page.count("alt=") == page.count("<img ")
        assert 'src="data:image/svg+xml;base64,' in page and "http" not in page.split("<h1>")[0]
        assert str(folder.parent) not in page and "/home" not in page
        assert f"loss {log_of(folder)[-1]['loss']:.4f}" in page
    assert "<td>rank 3</td>" in page
    sent = {axis: human_bytes(n) for axis, n in log_of(folder)[-1]["sent_along"].items()}
    assert f"by axis: pp, stages {sent['pp']}, tp, parts of layers {sent['tp']}." in page


def test_the_timeline_of_the_report_has_rows_that_say_what_a_thread_does_and_none_empty(ran):
    threads = {"one": set(), "two": {"averages", "weights"}, "four": {"averages", "tensor sums"}}
    for folder, *_ in ran.values():
        (told,) = re.findall('alt="Timeline. (.*?)"', (folder / "report.html").read_text())
        assert "nothing" not in told
        assert set(re.findall(r"rank \d ([a-z ]+):", told)) <= threads[folder.name]


def test_a_thread_of_whose_work_nothing_could_be_seen_has_no_row():
    line = Timeline(3)
    line.start, line.end = 10.0, 20.0
    line.operation("all_reduce", None, 1, 12.0, 16.0)
    line.operation("all_reduce", None, 3, 17.0, 17.001)
    (main, computed), averages = rows_of(Timelines([line]))
    assert main == "rank 3" and computed == [(0.0, 10_000.0, "compute", "compute")]
    assert averages == ("rank 3 averages", [(2000.0, 6000.0, "communication", "all_reduce")])


def test_bytes_by_link_have_a_bar_on_a_cluster_only():
    entry = {"sent": {"wire": 5}, "sent_along": {"shard": 3, "replicate": 2}}
    along = ("by axis", {"between shards": 3, "between replicas": 2})
    assert bars_of(entry) == [along]
    entry["sent"] = {"intra": 3, "inter": 2}
    assert bars_of(entry) == [along, ("by link", {"inside nodes": 3, "between nodes": 2})]
    assert bars_of({"sent": {}, "sent_along": {}}) == []


def test_the_configuration_in_the_folder_gives_the_same_run_again(ran, s2s, monkeypatch):
    folder = ran["two"][0]
    kept = yaml.safe_load((folder / "config.yaml").read_text())
    assert kept["optimizer"]["betas"] == [0.9, 0.95] and kept["micro_batch_size"] == 4
    monkeypatch.chdir(folder.parent.parent)
    code, _, err = s2s("train", "runs/two/config.yaml", "--set", "output=again")
    assert (code, err) == (0, "")
    assert course(folder.parent.parent / "again") == course(folder)
    again = yaml.safe_load((folder.parent.parent / "again/config.yaml").read_text())
    assert again == kept | {"output": "again"}


def test_a_broken_file_is_one_clear_line_and_exit_code_2(tmp_path):
    write_config(tmp_path, zero_stag=3)
    (tmp_path / "broken.yaml").write_text("steps: [1, 2\noutput: x: y\n")
    processes = [
        start(tmp_path, "train", "run.yaml"),
        start(tmp_path, "train", "broken.yaml"),
        start(tmp_path, "train", "missing.yaml"),
        start(tmp_path, "train", "run.yaml", "--set", "steps=many"),
        start(tmp_path, "train"),
    ]
    said = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (2, "") and "Traceback" not in err
        said.append(err)
    assert "run.yaml:" in said[0] and "did you mean zero_stage?" in said[0]
    assert said[0].count("\n") == 1
    assert said[1].startswith("broken.yaml:")
    assert "missing.yaml" in said[2]
    assert "steps" in said[3] and "many" in said[3]
    assert said[4].startswith("usage: s2s train")
    assert not (tmp_path / "runs").exists()


# Data and learning rates.


def test_all_ranks_of_a_replica_get_the_same_rows_and_replicas_other_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = MORE_LAYOUTS["order"] | {"pipeline_parallel_size": 2, "steps": 8}
    config = load_config(write_config(tmp_path, **keys))

    def rows(world, config):
        seen, step = [], Parallel.step

        def seeing(parallel, x, y):
            seen.append((parallel.dp.rank, x.tolist(), y.tolist()))
            return step(parallel, x, y)

        Parallel.step = seeing
        train(world, config)
        return seen

    seen = launch(rows, config, ranks=8)
    tokens, _ = hold_out(text(config.data.path), config.data.hold_out)
    batches = Batches(tokens, 16, 8, seed=config.seed)
    assert 5 <= len(batches) < config.steps <= 2 * len(batches)
    for step, (x, y) in enumerate([*batches.epoch(0), *batches.epoch(1)][: config.steps]):
        for rank in range(8):
            # The order of the axes is tp, pp, dp, so dp varies fastest.
            assert seen[rank][step][0] == rank % 2
            part = slice(4 * (rank % 2), 4 * (rank % 2) + 4)
            assert seen[rank][step][1:] == (x[part].tolist(), y[part].tolist())


def torchs_rates(name, steps, warmup, final):
    """The rates of `steps` steps as torch's own schedulers give them, from a rate of 1."""
    from torch.optim import lr_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    down = max(1, steps - 1 - warmup)
    after = {
        "constant": lambda: lr_scheduler.ConstantLR(optimizer, factor=1.0),
        "linear": lambda: lr_scheduler.LinearLR(optimizer, 1.0, max(final, 1e-30), down),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, down, eta_min=final),
    }
    parts = [lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, warmup - 1)] if warmup > 1 else []
    parts.append(after[name]())
    schedule = lr_scheduler.SequentialLR(optimizer, parts, [warmup] * (len(parts) - 1))
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("steps, warmup, final", [(20, 0, 0.1), (20, 5, 0.0), (7, 2, 1.0)])
def test_learning_rates_are_those_of_torchs_schedulers(tmp_path, name, steps, warmup, final):
    schedule = {"name": name, "warmup_steps": warmup, "final": final}
    config = load_config(write_config(tmp_path, steps=steps, lr_schedule=schedule))
    rates = [rate_of(config, step) for step in range(steps)]
    assert rates == pytest.approx(torchs_rates(name, steps, warmup, final), rel=1e-12, abs=1e-15)
    assert rates[0] == (1 / warmup if warmup else 1) and max(rates) == 1.0
    assert rates[-1] == pytest.approx(1 if name == "constant" else final)


def test_a_warm_up_longer_than_the_run_and_a_run_of_one_step_have_rates(tmp_path):
    long = {"name": "cosine", "warmup_steps": 10}
    config = load_config(write_config(tmp_path, steps=4, lr_schedule=long))
    assert [rate_of(config, step) for step in range(4)] == [0.1, 0.2, 0.3, 0.4]
    config = load_config(write_config(tmp_path, steps=1, lr_schedule={"name": "cosine"}))
    assert rate_of(config, 0) == 1.0


# What is logged.


def counted_by_hand(world, config, steps):
    """A model and its steps as `train` makes them, with a bill of our own around each."""
    parallel = parallelize(build(config), config, world)
    optimizer = make_optimizer(parallel, config)
    tokens, _ = hold_out(text(config.data.path), config.data.hold_out)
    bills = []
    for (x, y), _ in zip(
        batches_of(tokens, config, parallel.dp, config.seed).epoch(0), range(steps), strict=False
    ):
        with bill() as sent:
            one_step(parallel, optimizer, x, y, config)
        bills.append(sent)
    gradients = sum(p.numel() for p in parallel.parameters()) * 8
    return bills, gradients


def test_bytes_by_class_of_link_are_the_sum_of_the_ranks_bills(s2s):
    path = write_config(
        s2s.folder,
        steps=2,
        cluster={"nodes": 2, "gpus_per_node": 2, "inter": {"gbit_s": 10}},
        data_parallel_size=2,
        tensor_parallel_size=2,
    )
    assert s2s("train", path)[0] == 0
    config = load_config(path)
    ranks = launch(counted_by_hand, config, 2, ranks=4, cluster=config.cluster_object())
    for step, entry in enumerate(log_of(s2s.folder / "runs/run")):
        by_link = [bills[step].by("link") for bills, _ in ranks]
        assert entry["sent"] == {
            link: sum(each.get(link, 0) for each in by_link) for link in ("intra", "inter")
        }
        # Between the two nodes only the replicas talk: each of four ranks sends as many bytes as
        # its gradients have (half of them twice), and a few for the loss and the norm.
        gradients = sum(each for _, each in ranks)
        assert 0 <= entry["sent"]["inter"] - gradients < 1000


# Axis -> its groups, written out.
ALONG = {
    "stages": (
        {"data_parallel_size": 2, "pipeline_parallel_size": 4},
        {
            "dp": [(0, 4), (1, 5), (2, 6), (3, 7)],
            # The first and the last stage share the embedding's weight.
            "pp": [(0, 1, 2, 3), (4, 5, 6, 7), (0, 3), (4, 7)],
        },
    ),
    "hybrid": (
        MORE_LAYOUTS["hybrid"],
        {
            "replicate": [(0, 2), (1, 3)],
            "shard": [(0, 1), (2, 3)],
            "dp": [(0, 1, 2, 3)],
        },
    ),
    "order": (
        MORE_LAYOUTS["order"],
        {"tp": [(0, 2), (1, 3)], "dp": [(0, 1), (2, 3)]},
    ),
}


@pytest.mark.parametrize("name", ALONG)
def test_bytes_along_an_axis_are_those_of_its_groups(s2s, name):
    keys, groups = ALONG[name]
    path = write_config(s2s.folder, **keys, steps=2)
    assert s2s("train", path)[0] == 0
    config = load_config(path)
    ranks = launch(counted_by_hand, config, 2, ranks=config.ranks)
    for step, entry in enumerate(log_of(s2s.folder / "runs/run")):
        by_group = [bills[step].by("group") for bills, _ in ranks]
        assert entry["sent_along"] == {
            axis: sum(each.get(group, 0) for each in by_group for group in groups[axis])
            for axis in groups
        }
        assert sum(entry["sent_along"].values()) == sum(entry["sent"].values())
        assert all(entry["sent_along"].values())


def test_what_is_held_follows_from_the_model_and_the_stage(s2s):
    keys = {"data_parallel_size": 2, "steps": 1}
    plain = write_config(s2s.folder, "plain", **keys)
    sharded = write_config(s2s.folder, "sharded", **keys, zero_stage=3)
    assert s2s("train", plain)[0] == s2s("train", sharded)[0] == 0
    parameters = list(build(load_config(plain)).parameters())
    size = 8 * sum(p.numel() for p in parameters)
    (held,) = (entry["held"] for entry in log_of(s2s.folder / "runs/plain"))
    assert (held["weights"], held["gradients"]) == (size, size)
    # Two moments of each element, and a count of steps of 4 bytes for each parameter.
    assert held["optimizer"] == 2 * size + 4 * len(parameters)
    (part,) = (entry["held"] for entry in log_of(s2s.folder / "runs/sharded"))
    assert part["weights"] == pytest.approx(size / 2, rel=0.02)
    assert part["optimizer"] == pytest.approx(size, rel=0.02)
    for entry in log_of(s2s.folder / "runs/plain") + log_of(s2s.folder / "runs/sharded"):
        assert entry["held_total"] == sum(entry["held"].values())


@pytest.mark.parametrize("name", MORE_LAYOUTS)
def test_more_layouts_tell_the_same_losses(s2s, ran, name):
    assert s2s("train", write_config(s2s.folder, name, **MORE_LAYOUTS[name]))[0] == 0
    assert near(course(s2s.folder / "runs" / name), course(ran["one"][0]))


def test_only_some_steps_are_logged_when_it_says_so_and_the_last_one_always(s2s):
    path = write_config(s2s.folder, steps=5, log={"every": 2})
    assert s2s("train", path)[0] == 0
    assert [entry["step"] for entry in log_of(s2s.folder / "runs/run")] == [2, 4, 5]


# Arguments and folders.


def test_steps_and_set_take_the_place_of_what_the_file_says(s2s):
    path = write_config(s2s.folder, steps=4)
    code, out, err = s2s("train", path, "--steps", 2, "--set", "optimizer.lr=0.01", "--set",
                         "optimizer.name=sgd", "--set", "output=other")  # fmt: skip
    assert (code, err) == (0, "")
    log = log_of(s2s.folder / "other")
    assert [(entry["step"], entry["lr"]) for entry in log] == [(1, 0.01), (2, 0.01)]
    assert log[-1]["held"].keys() == {"weights", "gradients", "optimizer"}
    kept = yaml.safe_load((s2s.folder / "other/config.yaml").read_text())
    assert (kept["steps"], kept["optimizer"]["name"]) == (2, "sgd")
    assert not (s2s.folder / "runs").exists()


def test_a_second_run_gets_a_folder_of_its_own_and_resume_takes_the_last(s2s):
    path = write_config(s2s.folder, steps=1)
    for folder in ("run", "run-2"):
        assert f"report: runs/{folder}/report.html" in s2s("train", path)[1]
    first = (s2s.folder / "runs/run/log.jsonl").read_bytes()
    code, out, _ = s2s("train", path, "--resume", "--steps", 2)
    assert code == 0 and out.startswith("runs/run-2: goes on after step 1, ranks 1, steps 2\n")
    assert (s2s.folder / "runs/run/log.jsonl").read_bytes() == first
    assert [entry["step"] for entry in log_of(s2s.folder / "runs/run-2")] == [1, 2]


# Going on.

GOING_ON = {
    "data_parallel_size": 2,
    "zero_stage": 1,
    "steps": 10,
    "model": BASE["model"] | {"dropout": 0.2},
    "lr_schedule": {"name": "constant", "warmup_steps": 7},
}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The course of ten steps without a break; they reach into a second epoch."""
    folder = tmp_path_factory.mktemp("unbroken")
    config = load_config(
        write_config(folder, **GOING_ON),
        [f"data.path={folder / 'text.txt'}", f"output={folder / 'run'}"],
    )
    tokens, _ = hold_out(text(config.data.path), config.data.hold_out)
    assert 5 < len(Batches(tokens, 16, 8)) < 10
    launch(train, config, ranks=2)
    return course(folder / "run")


def test_resume_without_a_checkpoint_begins(s2s, unbroken):
    path = write_config(s2s.folder, **GOING_ON)
    code, out, _ = s2s("train", path, "--resume", "--steps", 1)
    assert code == 0 and out.startswith("runs/run: begins, ranks 2, steps 1\n")
    assert course(s2s.folder / "runs/run") == unbroken[:1]


def test_the_rate_of_a_step_is_that_of_its_number(unbroken):
    assert [rate for *_, rate in unbroken] == [
        pytest.approx(1e-3 * min(1, step / 7)) for step in range(1, 11)
    ]


@pytest.mark.parametrize("broken_at", [5, 6, 7])
def test_a_resumed_run_is_bit_for_bit_the_unbroken_one(s2s, unbroken, broken_at):
    """The break is before, at and after the end of an epoch."""
    path = write_config(s2s.folder, **GOING_ON)
    assert s2s("train", path, "--steps", broken_at)[0] == 0
    code, out, _ = s2s("train", path, "--resume")
    assert code == 0 and out.startswith(
        f"runs/run: goes on after step {broken_at}, ranks 2, steps 10\n"
    )
    assert course(s2s.folder / "runs/run") == unbroken
    kept = (s2s.folder / "runs/run/config.yaml").read_bytes()
    for steps in (10, 4):
        code, out, err = s2s("train", path, "--resume", "--steps", steps)
        assert (code, err) == (0, "")
        assert out == (
            f"runs/run is at step 10, and no further than step {steps} was asked for: --steps "
            "takes it further\n"
        )
        assert course(s2s.folder / "runs/run") == unbroken
        assert (s2s.folder / "runs/run/config.yaml").read_bytes() == kept


@pytest.mark.parametrize("name", ["one", "four", "hybrid", "order"])
def test_at_another_layout_a_resumed_run_is_the_unbroken_one(s2s, unbroken, name):
    assert s2s("train", write_config(s2s.folder, **GOING_ON), "--steps", 5)[0] == 0
    keys = {key: GOING_ON[key] for key in ("steps", "model", "lr_schedule")}
    other = write_config(s2s.folder, **keys, **(LAYOUTS | MORE_LAYOUTS)[name])
    assert s2s("train", other, "--resume")[0] == 0
    assert near(course(s2s.folder / "runs/run"), unbroken)


def test_with_another_global_batch_it_goes_on_at_the_next_whole_batch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def first_rows(world, config):
        seen, step = [], Parallel.step

        def seeing(parallel, x, y):
            seen.append(x.tolist())
            return step(parallel, x, y)

        Parallel.step = seeing
        return train(world, config, resume=True).first, seen

    launch(train, load_config(write_config(tmp_path, steps=3)), ranks=1)
    config = load_config(write_config(tmp_path, steps=4, global_batch=10))
    ((first, seen),) = launch(first_rows, config, ranks=1)
    # 24 samples were used, so the next whole batch of 10 begins with sample 30.
    tokens, _ = hold_out(text("text.txt"), config.data.hold_out)
    expected = next(Batches(tokens, 16, 10).epoch(0, 3))[0]
    assert first == 3 and seen == [expected.tolist()]


@pytest.mark.parametrize(
    "change, told",
    [
        ("seed=4", "seed was 3 and is 4"),
        ("model.seq=8", "model.seq was 16 and is 8"),
        ("model.layers=2", "model.layers was 4 and is 2"),
        ("model.tied=false", "model.tied was True and is False"),
        ("model.mlp_hidden=96", "model.mlp_hidden was 8/3 of model.hidden and is 96"),
        ("precision=float32", "precision was float64 and is float32 or bfloat16"),
        ("optimizer.name=sgd", "optimizer.name was adamw and is sgd"),
    ],
)
def test_going_on_with_another_run_is_refused_before_any_rank_starts(s2s, change, told):
    path = write_config(s2s.folder, steps=1, seed=3)
    assert s2s("train", path)[0] == 0
    folder = s2s.folder / "runs/run"
    kept = (folder / "config.yaml").read_bytes()
    code, out, err = s2s("train", path, "--resume", "--steps", 2, "--set", change)
    assert (code, out) == (2, "") and err == (
        f"the run in runs/run cannot go on so: {told}. Give what it was, or begin a new run "
        "without --resume\n"
    )
    assert (folder / "config.yaml").read_bytes() == kept and len(log_of(folder)) == 1
    # Without --resume it is a run of its own, and so it is where there is nothing to go on from.
    assert s2s("train", path, "--steps", 1, "--set", change, "--set", "output=new")[0] == 0
    for checkpoint in (folder / "checkpoints").iterdir():
        checkpoint.rename(folder / checkpoint.name)
    assert s2s("train", path, "--resume", "--steps", 1, "--set", change)[0] == 0


def test_a_run_goes_on_with_what_changes_no_weight(s2s):
    path = write_config(s2s.folder, steps=1, precision="float32")
    assert s2s("train", path)[0] == 0
    changes = ["model.dropout=0.3", "model.kv_heads=2", "precision=bfloat16", "optimizer.lr=0.1"]
    changes = [word for change in changes for word in ("--set", change)]
    assert s2s("train", path, "--resume", "--steps", 2, *changes)[0] == 0


@pytest.mark.parametrize("text", [None, "steps: [1, 2"])
def test_without_its_configuration_a_run_goes_on_and_the_checkpoint_tells_what_does_not_fit(
    s2s, text
):
    path = write_config(s2s.folder, steps=1)
    assert s2s("train", path)[0] == 0
    config = s2s.folder / "runs/run/config.yaml"
    config.unlink() if text is None else config.write_text(text)
    code, _, err = s2s("train", path, "--resume", "--steps", 2, "--set", "model.layers=2")
    assert code == 1 and "blocks.2." in err.splitlines()[1]
    assert s2s("train", path, "--resume", "--steps", 2)[0] == 0
    assert yaml.safe_load(config.read_text())["steps"] == 2


def test_another_text_is_refused_with_what_was_and_is(s2s):
    path = write_config(s2s.folder, steps=1)
    (s2s.folder / "other.txt").write_text(TEXT.replace("squared", "doubled"))
    assert s2s("train", path)[0] == 0
    code, _, err = s2s("train", path, "--resume", "--steps", 2, "--set", "data.path=other.txt")
    assert code == 1 and "the text to train on was " in err.splitlines()[1]
    assert [entry["step"] for entry in log_of(s2s.folder / "runs/run")] == [1]


def test_the_optimizers_settings_are_those_of_the_file_after_resuming_too(s2s):
    path = write_config(s2s.folder, steps=5)
    assert s2s("train", path)[0] == s2s("train", path, "--steps", 3)[0] == 0
    assert s2s("train", path, "--resume", "--set", "optimizer.weight_decay=50")[0] == 0
    kept, decayed = (course(s2s.folder / "runs" / name) for name in ("run", "run-2"))
    # Decay acts in step 4, so what is the same is its loss; and what is not, the next.
    assert decayed[:4] == kept[:4] and decayed[4][1] != kept[4][1]


def test_a_lost_piece_of_a_log_does_not_stop_resuming(s2s):
    path = write_config(s2s.folder, steps=2)
    assert s2s("train", path)[0] == 0
    log = s2s.folder / "runs/run/log.jsonl"
    log.write_text(log.read_text() + '{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
    assert s2s("train", path, "--resume", "--steps", 3)[0] == 0
    assert [entry["step"] for entry in log_of(log.parent)] == [1, 2, 3]
    assert log_of(log.parent)[2]["loss"] != 1.0


# At the end.


def test_evaluation_and_export_are_those_of_the_plain_model(s2s):
    keys = LAYOUTS["four"] | {"model": BASE["model"] | {"dropout": 0.3}, "seed": 5}
    path = write_config(s2s.folder, **keys)
    config = load_config(path)
    runs = launch(train, config, ranks=4)
    assert s2s("export", "runs/run", "weights.safetensors")[0] == 0
    assert s2s("export", "runs/run", "weights.pt")[0] == 2
    weights = load_file(s2s.folder / "weights.safetensors")
    plain = GPT(config.gpt()).double().eval()
    plain.load_state_dict(weights)
    _, tokens = hold_out(text("text.txt"), config.data.hold_out)
    batches = list(Batches(tokens, 16, 8, seed=0).epoch(0))[: max(1, EVALUATED // 8)]
    with torch.no_grad():
        losses = [next_token_loss(plain(x), y).item() for x, y in batches]
    assert len(losses) >= 1
    for run in runs:
        assert run.evaluation == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def test_without_held_out_text_for_a_batch_there_is_no_evaluation(s2s):
    path = write_config(s2s.folder, steps=1, data={"path": "text.txt", "hold_out": 0.02})
    code, out, _ = s2s("train", path)
    assert code == 0 and "held-out" not in out
    assert "held-out" not in (s2s.folder / "runs/run/report.html").read_text()


def test_a_run_can_start_from_a_plain_file_of_weights(s2s):
    first = write_config(s2s.folder, "first", steps=3)
    assert (
        s2s("train", first)[0] == s2s("export", "runs/first/checkpoints", "w.safetensors")[0] == 0
    )
    for name, layout in (("alone", "one"), ("cut", "four")):
        keys = LAYOUTS[layout] | {"checkpoint": {"start_from": "w.safetensors"}, "steps": 2}
        assert s2s("train", write_config(s2s.folder, name, **keys))[0] == 0
    alone, cut = (course(s2s.folder / "runs" / name) for name in ("alone", "cut"))
    assert near(alone, cut) and alone[0][1] < log_of(s2s.folder / "runs/first")[0]["loss"]


# What goes wrong.


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"global_batch": 1000}, "take a smaller batch, a smaller seq or more text"),
        ({"data": {"path": "nowhere.txt"}}, "nowhere.txt"),
        ({"checkpoint": {"start_from": "nowhere.safetensors"}}, "nowhere.safetensors"),
        ({"checkpoint": {"start_from": "text.txt"}}, "start_from text.txt: it is no safetensors"),
        (
            {"model": BASE["model"] | {"vocab": 100}},
            "the text has bytes up to 117, so give at least",
        ),
    ],
)
def test_what_no_rank_could_train_on_is_told_before_any_starts(s2s, keys, words):
    code, out, err = s2s("train", write_config(s2s.folder, data_parallel_size=2, **keys))
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1
    assert not (s2s.folder / "runs").exists()


def test_a_folder_that_cannot_be_written_is_told_by_its_name(s2s):
    code, _, err = s2s("train", write_config(s2s.folder, output="text.txt/inside"))
    assert code == 2 and "text.txt" in err


def test_under_torchrun_another_number_of_processes_is_told_by_the_first(s2s, monkeypatch):
    path = write_config(s2s.folder, data_parallel_size=2, pipeline_parallel_size=2)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        code, _, err = s2s("train", path)
        assert code == 2
        assert ("= 4 ranks, and torchrun has started 8: make them equal" in err) == (rank == 0)


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step_and_saves_nothing(s2s):
    first = write_config(s2s.folder, "first", steps=1)
    assert s2s("train", first)[0] == 0
    assert s2s("export", "runs/first/checkpoints", "w.safetensors")[0] == 0
    weights = load_file(s2s.folder / "w.safetensors")
    next(iter(weights.values())).fill_(math.nan)
    save_file(weights, s2s.folder / "w.safetensors")
    keys = LAYOUTS["two"] | {"checkpoint": {"start_from": "w.safetensors", "every": 1}}
    code, _, err = s2s("train", write_config(s2s.folder, **keys))
    assert code == 1 and "step 1: the loss is nan" in err.splitlines()[1]
    assert log_of(s2s.folder / "runs/run") == []
    assert s2s("export", "runs/run/checkpoints", "w.safetensors")[0] == 2


def test_ctrl_c_ends_with_130_and_leaves_nobody(tmp_path):
    write_config(tmp_path, data_parallel_size=2, steps=100_000)
    process = start(tmp_path, "train", "run.yaml")
    wait_until(lambda: len(course(tmp_path / "runs/run")) >= 2, 120)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.strip() == "interrupted; --resume goes on from the last checkpoint"
    _, left = psutil.wait_procs(family, timeout=10)
    assert len(family) == 3 and not left


def test_a_damaged_checkpoint_is_told_by_its_file(s2s):
    path = write_config(s2s.folder, steps=1)
    assert s2s("train", path)[0] == 0
    files = (s2s.folder / "runs/run/checkpoints").rglob("*.safetensors")
    largest = max(files, key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    code, _, err = s2s("train", path, "--resume", "--steps", 2)
    assert code == 1 and largest.name in err.splitlines()[1]
    code, _, err = s2s("export", "runs/run/checkpoints", "w.safetensors")
    assert code == 2 and largest.name in err and "Traceback" not in err
    assert [entry["step"] for entry in log_of(s2s.folder / "runs/run")] == [1]


def test_exporting_from_a_folder_without_checkpoints_is_refused(s2s):
    (s2s.folder / "empty").mkdir()
    for folder in ("empty", "missing"):
        code, out, err = s2s("export", folder, "w.safetensors")
        assert (code, out) == (2, "") and folder in err
    assert not (s2s.folder / "w.safetensors").exists()


# The examples for several machines.


def test_the_examples_are_valid_and_name_files_that_exist_and_ranks_that_multiply(tmp_path):
    script = (ROOT / "examples/slurm.sh").read_text()
    lines = (ROOT / "examples/two_nodes.md").read_text()
    blocks = re.findall("```bash\n(.*?)```", lines, re.DOTALL)
    assert len(blocks) == 2
    for number, block in enumerate([script, *blocks]):
        path = tmp_path / f"{number}.sh"
        path.write_text(block)
        done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        changes = re.findall("--set ([a-z_.]+=[0-9]+)", block)
        (name,) = re.findall("train (configs/[a-z0-9_]+[.]yaml) --resume", block)
        nodes = 2 if number else int(re.search("--nodes=([0-9]+)", block).group(1))
        processes = int(re.search("--nproc-per-node ([0-9]+)", block).group(1))
        assert load_config(ROOT / name, changes).ranks == nodes * processes
