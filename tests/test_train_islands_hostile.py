"""Training runs of islands: resumed as something else, from hostile files, cut in hostile ways."""

import shutil
import sys

import cloudpickle
import pytest
import torch
from training_runs import BASE, course, start, write_config

from s2s_lib import launch
from s2s_lib.training.command import main
from s2s_lib.training.config import load_config
from s2s_lib.training.parallel import parallelize
from s2s_lib.training.train import build, make_diloco, make_optimizer, one_step, to_load, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(folder, resume=False, **keys):
    config = load_config(write_config(folder, **keys))
    return launch(train, config, resume, ranks=config.ranks, timeout=60)


ISLANDS = {"diloco": {"islands": 2, "sync_every": 2}}


@pytest.mark.parametrize("then", [1, 3])
def test_a_run_of_fewer_islands_goes_on_where_it_stopped_the_second_time_too(folder, then):
    """Of islands that are no more, folders stay behind; a step that all folders have is then an
    old one, and the second --resume goes back to it, or gives all the first island's moments."""
    run(folder, diloco={"islands": 4, "sync_every": 2}, global_batch=12 if then == 3 else 8)
    keys = {"diloco": {"islands": then, "sync_every": 2}} if then > 1 else {}
    if then == 3:
        keys["global_batch"] = 12
    assert run(folder, True, steps=6, **keys)[0].first == 4
    assert run(folder, True, steps=8, **keys)[0].first == 6


def test_each_island_keeps_its_own_moments_the_second_time_too(folder):
    """Where old islands' folders stay behind and keep has deleted what they have in common, all
    islands would be given the first one's checkpoint, without a word."""
    keys = {"checkpoint": {"keep": 1}}
    run(folder, diloco={"islands": 4, "sync_every": 2}, **keys)
    run(folder, True, steps=6, **ISLANDS, **keys)
    found = to_load(folder / "runs" / "run" / "checkpoints", 2)
    assert ["island-1" in path for path in found] == [False, True]


def tied_weights(world, config):
    """What the stages of each island have of the embedding and of the head that is tied to it."""
    parallel = parallelize(build(config), config, world)
    optimizer = make_optimizer(parallel, config)
    make_diloco(parallel, optimizer)
    generator = torch.Generator().manual_seed(parallel.data.rank)
    found = []
    for _ in range(config.steps):
        rows = config.micro_batch_size * config.gradient_accumulation
        x = torch.randint(0, 128, (rows, 17), generator=generator)
        one_step(parallel, optimizer, x[:, :-1], x[:, 1:], config)
        found += [p.detach().clone() for p in parallel.parameters() if p.shape == (128, 16)]
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"fragments": 2}, {"bits": 8}, {"bits": 4}, {"gossip": True}],
)
def test_two_stages_keep_one_tied_weight_the_same(folder, options):
    """The embedding on the first stage and the head on the last are one weight: in another
    fragment on each, or rounded beside other numbers, they become two."""
    keys = {
        "diloco": {"islands": 2, "sync_every": 2, **options},
        "pipeline_parallel_size": 2,
        "model": BASE["model"] | {"tied": True},
    }
    config = load_config(write_config(folder, **keys))
    got = launch(tied_weights, config, ranks=4, timeout=60)
    for first, last in ((got[0], got[1]), (got[2], got[3])):
        assert len(first) == len(last) == config.steps
        for step, (a, b) in enumerate(zip(first, last, strict=True), start=1):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=f"after step {step}")


def shared_weights(world, config):
    """By name, what this rank holds whole after each step."""
    parallel = parallelize(build(config), config, world)
    optimizer = make_optimizer(parallel, config)
    make_diloco(parallel, optimizer)
    generator = torch.Generator().manual_seed(parallel.data.rank)
    for _ in range(config.steps):
        rows = config.micro_batch_size * config.gradient_accumulation
        x = torch.randint(0, 127, (rows, 17), generator=generator)
        one_step(parallel, optimizer, x[:, :-1], x[:, 1:], config)
    return {n: p.detach() for n, p in parallel.named_parameters() if p.dim() == 1}


def test_norms_stay_the_same_on_ranks_of_a_cut_vocabulary(folder):
    """An odd vocabulary gives ranks of tp parts of other sizes; with fragments and 4 bits, what
    both have whole must be cut and rounded at the same places."""
    keys = {
        "diloco": {
            "islands": 2,
            "sync_every": 4,
            "fragments": 4,
            "bits": 4,
            "error_feedback": True,
        },
        "tensor_parallel_size": 2,
        "model": BASE["model"] | {"vocab": 127},
        "steps": 8,
    }
    config = load_config(write_config(folder, **keys))
    got = launch(shared_weights, config, ranks=4, timeout=60)
    for island in (0, 2):
        assert got[island].keys() == got[island + 1].keys() and len(got[island]) > 4
        for name, tensor in got[island].items():
            torch.testing.assert_close(tensor, got[island + 1][name], rtol=0, atol=1e-12)


def test_too_many_islands_for_this_machine_are_counted_in_the_error(folder, capsys):
    """The factors that are told must multiply to the number of ranks, islands too."""
    path = write_config(folder, diloco={"islands": 300}, global_batch=300)
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert "diloco.islands 300" in error, error


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_does_what_it_would_have_done(folder, background):
    """Saved in the middle of a round of a streaming run, with feedback and averaged moments: what
    rounding left out, momentum or the place in the round that is lost shows in the losses."""
    keys = {
        "diloco": {
            "islands": 2,
            "sync_every": 4,
            "fragments": 2,
            "delay": 1,
            "mixing": 0.5,
            "bits": 8,
            "error_feedback": True,
            "moments": "average",
        },
        "checkpoint": {"every": 4, "background": background, "keep": 10},
        "log": {"every": 1},
    }
    run(folder, output="whole", steps=12, **keys)
    saved = sorted(p.name for p in (folder / "whole" / "checkpoints").glob("step-*"))
    # Of a fresh run, all that came after the first save is taken away again.
    run(folder, output="part", steps=12, **keys)
    for name in saved[1:]:
        shutil.rmtree(folder / "part" / "checkpoints" / name)
        shutil.rmtree(folder / "part" / "checkpoints" / "island-1" / name)
    first = run(folder, True, output="part", steps=12, **keys)[0].first
    assert 0 < first < 12
    assert course(folder / "part") == course(folder / "whole")


@pytest.mark.parametrize(
    "after",
    [
        {"diloco": {"islands": 2, "sync_every": 3}},
        {"diloco": {"islands": 4, "sync_every": 2}},
        {
            "diloco": {
                "islands": 2,
                "sync_every": 4,
                "fragments": 4,
                "bits": 8,
                "error_feedback": True,
            }
        },
        {"diloco": {"islands": 2, "sync_every": 2}, "data_parallel_size": 2, "zero_stage": 3},
        {"diloco": {"islands": 2, "sync_every": 2}, "pipeline_parallel_size": 2},
        {},
    ],
)
def test_a_run_goes_on_with_other_islands(folder, after):
    """Other rounds, fragments, islands or layouts inside: all go on at the saved step, end with
    islands that are equal, and with a loss that is a number."""
    run(folder, steps=3, **ISLANDS)
    got = run(folder, True, steps=6, **after)
    assert got[0].first == 3
    losses = {r.evaluation for r in got}
    assert len(losses) == 1 and losses.pop() > 0


def test_an_island_killed_in_the_midst_of_its_save_costs_that_save_only(folder):
    """Island 1's checkpoint of the last step is missing: all go on from the step that both have."""
    keys = {**ISLANDS, "checkpoint": {"every": 2, "keep": 3}}
    run(folder, steps=4, **keys)
    island = folder / "runs" / "run" / "checkpoints" / "island-1"
    last = sorted(island.glob("step-*"))[-1]
    last.rename(last.with_name(last.name + ".tmp"))
    got = run(folder, True, steps=6, **keys)
    assert got[0].first == 2


def test_a_broken_checkpoint_of_one_island_is_told_on_all(folder):
    """A manifest cut in half on one island: an error that names the file, or the step before."""
    keys = {**ISLANDS, "checkpoint": {"every": 2, "keep": 3}}
    run(folder, steps=4, **keys)
    island = folder / "runs" / "run" / "checkpoints" / "island-1"
    last = sorted(island.glob("step-*"))[-1]
    for path in last.iterdir():
        if path.suffix == ".json":
            path.write_bytes(path.read_bytes()[:40])
    path = write_config(folder, steps=6, **keys)
    process = start(folder, "train", path, "--resume")
    out, error = process.communicate(timeout=90)
    if process.returncode:
        assert "island-1" in error, error
    else:
        assert "goes on after step 2" in out, out


def test_torchrun_starts_a_run_of_islands(folder):
    """The same losses as from one command."""
    run(folder, output="one", **ISLANDS)
    path = write_config(folder, output="two", **ISLANDS)
    process = start(
        folder,
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "s2s_lib",
        "train",
        path,
        program=("-m", "torch.distributed.run"),
    )
    _, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert course(folder / "one") == course(folder / "two")
