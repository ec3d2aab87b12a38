"""Training runs of several islands, from a configuration: against a loop of plain models, and
against themselves.

Islands that see each other's samples, a step that waits for another island, an outer step taken of
gradients clipped over all islands, moments or momentum that a checkpoint does not have, and a mesh
in which the islands are not outermost fail here.
"""

import itertools

import pytest
import torch
from training_runs import write_config

from s2s_lib import GPT, Batches, checkpoint, hold_out, launch, load_config, next_token_loss, text
from s2s_lib.training.config import ConfigError
from s2s_lib.training.train import make_optimizer, train

LAYOUTS = {
    "one rank each": {},
    "shards": {"data_parallel_size": 2, "zero_stage": 3},
    "replicas": {"data_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "parts": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "all": {"data_parallel_size": 2, "zero_stage": 1, "tensor_parallel_size": 2},
    "order": {
        "data_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "mesh_order": ["pp", "tp", "dp"],
    },
}
MODEL = {"layers": 4, "hidden": 16, "heads": 2, "seq": 16, "vocab": 128, "tied": False}


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(keys, **diloco):
        diloco = {"islands": 2, "sync_every": 3} | diloco
        base = {"steps": 8, "model": MODEL | {"dropout": 0.0}, "output": str(tmp_path / "run")}
        return load_config(write_config(tmp_path, **base | keys | {"diloco": diloco}))

    return make


def samples(tokens, config, number):
    """One island's batches, epoch after epoch."""
    rows = config.global_batch // config.islands
    batches = Batches(tokens, config.gpt().seq, rows, number, config.islands, config.seed)
    for epoch in itertools.count():
        yield from batches.epoch(epoch)


def by_hand(config):
    """Weights after the run, by one process: two plain models, and torch's SGD between them."""
    tokens, _ = hold_out(text(config.data.path), config.data.hold_out)
    islands, keys = config.islands, config.diloco
    torch.manual_seed(config.seed)
    models = [GPT(config.gpt()).double() for _ in range(islands)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [make_optimizer(model, config) for model in models]
    outer = [p.detach().clone().requires_grad_() for p in models[0].parameters()]
    sgd = torch.optim.SGD(
        outer, keys.outer_lr, momentum=keys.outer_momentum, nesterov=keys.nesterov
    )
    streams = [samples(tokens, config, number) for number in range(islands)]
    for step in range(1, config.steps + 1):
        for model, optimizer, stream in zip(models, optimizers, streams, strict=True):
            optimizer.zero_grad()
            x, y = next(stream)
            next_token_loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
            optimizer.step()
        if step % keys.sync_every == 0 or step == config.steps:
            with torch.no_grad():
                for p, *mine in zip(outer, *(m.parameters() for m in models), strict=True):
                    p.grad = p - torch.stack(mine).mean(0)
                sgd.step()
                for p, *mine in zip(outer, *(m.parameters() for m in models), strict=True):
                    for weight in mine:
                        weight.copy_(p)
    return models[0].state_dict()


@pytest.mark.parametrize("name", LAYOUTS)
def test_islands_of_any_layout_train_as_plain_models_do(config_of, name):
    config = config_of(LAYOUTS[name])
    runs = launch(train, config, ranks=config.ranks)
    saved, plain = checkpoint.export(f"{runs[0].folder}/checkpoints"), by_hand(config)
    assert set(saved) == set(plain)
    for key, weight in plain.items():
        torch.testing.assert_close(saved[key], weight, rtol=1e-8, atol=1e-10, msg=key)
    # A line where the islands have met, and for the last step; the same on all ranks.
    assert [entry["step"] for entry in runs[0].log] == [3, 6, 8]
    assert all(run.log[-1]["loss"] == runs[0].log[-1]["loss"] for run in runs)
    assert runs[0].log[0]["sent_along"]["island"] == runs[0].log[1]["sent_along"]["island"] > 0


def test_an_ordinary_step_sends_nothing_between_islands(config_of):
    config = config_of({"log": {"every": 1}, "data_parallel_size": 2, "zero_stage": 2})
    log = launch(train, config, ranks=4)[0].log
    between = {entry["step"]: entry["sent_along"].get("island", 0) for entry in log}
    weights = 8 * sum(p.numel() for p in GPT(config.gpt()).parameters())
    # Each rank its shards, once there and once back; a shard is padded to the ranks of an island.
    for step, sent in between.items():
        assert sent == 0 if step not in (3, 6, 8) else 2 * weights <= sent < 2.02 * weights


STREAMED = {"fragments": 3, "delay": 0, "bits": 8, "error_feedback": True}


@pytest.mark.parametrize(
    "keys, diloco",
    [
        ({}, {}),
        ({"data_parallel_size": 2, "zero_stage": 3}, {"sync_every": 4, "delay": 1, "mixing": 0.5}),
        ({"tensor_parallel_size": 2}, {"sync_every": 6} | STREAMED),
        ({}, {"islands": 3, "gossip": True, "moments": "average"}),
    ],
)
@pytest.mark.parametrize("at", [3, 5])
def test_a_resumed_run_is_bit_for_bit_the_unbroken_one(config_of, tmp_path, keys, diloco, at):
    """In the midst of a round too; there is no flush at the break, as after a kill."""
    keys = keys | {"global_batch": 12, "log": {"every": 1}, "checkpoint": {"every": 1, "keep": 20}}
    config = config_of(keys, **diloco)
    whole = launch(train, config, ranks=config.ranks)[0]
    folder = tmp_path / "run" / "checkpoints"
    for path in [*folder.glob("step-*"), *folder.glob("island-*/step-*")]:
        if int(path.name[5:]) > at:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    rest = launch(train, config, True, ranks=config.ranks)[0]
    assert rest.first <= at
    same = ("step", "loss", "grad_norm")
    told = [[entry[key] for key in same] for entry in whole.log[rest.first :]]
    assert [[entry[key] for key in same] for entry in rest.log] == told
    assert rest.evaluation == whole.evaluation


@pytest.mark.parametrize(
    "keys, islands",
    [({"tensor_parallel_size": 2}, 2), ({"data_parallel_size": 2}, 4), ({}, 1), ({}, None)],
)
def test_a_run_goes_on_with_other_islands_and_other_layouts(config_of, keys, islands):
    first = config_of({"data_parallel_size": 2, "zero_stage": 3, "global_batch": 24, "steps": 6})
    begun = launch(train, first, ranks=4)[0]
    second = config_of(keys | {"global_batch": 24, "steps": 12}, islands=islands or 1)
    if islands is None:
        second = second.model_copy(update={"diloco": None})
    runs = launch(train, second, True, ranks=second.ranks)
    assert runs[0].first == 6 and len({run.log[-1]["loss"] for run in runs}) == 1
    assert runs[0].log[-1]["loss"] < begun.log[-1]["loss"]


def test_islands_that_did_not_all_save_the_last_step_go_on_from_the_one_before(config_of, tmp_path):
    config = config_of({"checkpoint": {"every": 3}})
    launch(train, config, ranks=2)
    folder = tmp_path / "run" / "checkpoints"
    (folder / "island-1" / "step-000008" / "manifest.json").unlink()
    (folder / "island-1" / "step-000008").rename(folder / "island-1" / "step-000008.tmp")
    assert launch(train, config, True, ranks=2)[0].first == 6


@pytest.mark.parametrize(
    "diloco, words",
    [
        ({"islands": 0}, "diloco.islands: given 0; wanted a whole number from 1"),
        ({"sync_every": 5}, "diloco.islands: missing"),
        ({"islands": 2, "sync_every": 5, "fragments": 3}, "3 or 6 steps would do"),
        ({"islands": 2, "sync_every": 5, "delay": 5}, "a delay of at most 4"),
        ({"islands": 2, "mixing": 0.5}, "give a delay, or mixing=0"),
        ({"islands": 2, "bits": 16}, "diloco.bits: given 16; wanted 4, 8, or null"),
        ({"islands": 2, "error_feedback": True}, "give bits=8 or 4 too"),
        ({"islands": 2, "gossip": True, "bits": 8}, "leave out delay=0 and bits=8"),
        (
            {"islands": 2, "outer_lr": 0},
            "diloco.outer_lr: given 0; wanted a number above",
        ),
        ({"islands": 3}, "data_parallel_size 1 x diloco.islands 3"),
        ({"islands": 2, "h": 5}, "diloco.h"),
        (7, "diloco: given 7; wanted keys of its own"),
    ],
)
def test_what_islands_cannot_be_is_told_with_its_line_and_key(tmp_path, diloco, words):
    path = write_config(tmp_path, diloco=diloco)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert words in str(error.value)
    assert f"{path}:" in str(error.value)


def test_nothing_could_be_saved_where_something_is_always_under_way(tmp_path):
    diloco = {"islands": 2, "sync_every": 6, "fragments": 3, "delay": 2}
    path = write_config(tmp_path, diloco=diloco, checkpoint={"every": 3})
    with pytest.raises(ConfigError, match="at most 1, or checkpoint.every: 0"):
        load_config(path)
    load_config(path, ["diloco.delay=1"])
    load_config(path, ["checkpoint.every=0"])
    assert load_config(path, ["diloco=null"]).ranks == 1
