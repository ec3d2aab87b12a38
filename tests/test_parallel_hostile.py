"""Odd sizes and odd layouts against one plain process: the same losses, norms and weights.

The reference is a loop without any of the library's strategies, in float64, so that what differs is
an error and not a rounding.
"""

import math

import pytest
import torch
from torch import nn

from s2s_lib import (
    GPT,
    Config,
    checkpoint,
    clip_grad_norm_,
    launch,
    next_token_loss,
    parallelize,
)
from s2s_lib.training.config import load_config
from s2s_lib.training.train import make_optimizer

STEPS, CLIP = 3, 0.5


def config_of(folder, **keys) -> Config:
    """A Config of these keys, by way of a file: with all that follows from them, and checked."""
    import yaml

    keys = {"precision": "float64", "steps": STEPS, "seed": 3} | keys
    file = folder / f"{abs(hash(repr(keys)))}.yaml"
    file.write_text(yaml.safe_dump(keys))
    return load_config(file)


def rows_of(config, step, vocab=None):
    gpt = config.gpt()
    generator = torch.Generator().manual_seed(100 + step)
    shape = (config.global_batch, gpt.seq + 1)
    tokens = torch.randint(0, vocab or gpt.vocab, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain(config, steps=STEPS, model=None):
    """Losses, norms and weights of one process without the library."""
    torch.manual_seed(config.seed)
    model = (GPT(config.gpt()) if model is None else model).double()
    optimizer = make_optimizer(model, config)
    told = []
    for step in range(steps):
        x, y = rows_of(config, step)
        optimizer.zero_grad()
        loss = next_token_loss(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        told.append((loss.item(), norm.item()))
    return told, model.state_dict()


def one_step(parallel, optimizer, step):
    config = parallel.config
    x, y = (rows.chunk(parallel.dp.size)[parallel.dp.rank] for rows in rows_of(config, step))
    optimizer.zero_grad()
    loss = parallel.step(x, y)
    norm = clip_grad_norm_(parallel, CLIP)
    optimizer.step()
    return float(loss), float(norm)


def built(world, config):
    with torch.device("meta"):
        model = GPT(config.gpt())
    parallel = parallelize(model, config, world)
    return parallel, make_optimizer(parallel, config)


def trained(world, config, folder):
    parallel, optimizer = built(world, config)
    told = [one_step(parallel, optimizer, step) for step in range(STEPS)]
    checkpoint.save(folder, parallel, optimizer, {})
    return told


THREES = {"hidden": 18, "heads": 3, "vocab": 257, "seq": 9, "mlp_hidden": 33, "layers": 2}
GROUPED = {
    "hidden": 40,
    "heads": 4,
    "kv_heads": 2,
    "vocab": 131,
    "seq": 10,
    "mlp_hidden": 22,
    "layers": 3,
}
LAYOUTS = {
    "three parts of everything, sequence too": dict(
        tensor_parallel_size=3,
        sequence_parallel=True,
        data_parallel_size=2,
        zero_stage=3,
        mesh_order=["tp", "dp", "pp"],
        global_batch=4,
        model=THREES | {"tied": True},
    ),
    "three replicas in shards, three stages, recomputed": dict(
        data_parallel_size=3,
        pipeline_parallel_size=2,
        zero_stage=2,
        gradient_accumulation=3,
        activation_checkpointing=True,
        mesh_order=["pp", "tp", "dp"],
        global_batch=9,
        model=THREES | {"tied": False},
    ),
    "hybrid of six replicas": dict(
        data_parallel_size=6,
        hybrid_shard_size=3,
        zero_stage=3,
        global_batch=12,
        model=THREES | {"tied": True},
    ),
    "stages of one layer each, the norm alone": dict(
        pipeline_parallel_size=4,
        gradient_accumulation=3,
        global_batch=3,
        model=GROUPED | {"layers": 1, "tied": True},
    ),
    "interleaved over heads that share keys": dict(
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        pipeline_schedule="interleaved",
        stages_per_rank=2,
        gradient_accumulation=4,
        global_batch=4,
        sequence_parallel=True,
        activation_checkpointing=True,
        mesh_order=["tp", "pp", "dp"],
        model=GROUPED | {"tied": False},
    ),
    "a V of stages, hybrid by another order": dict(
        pipeline_parallel_size=2,
        data_parallel_size=2,
        pipeline_schedule="zbv",
        gradient_accumulation=3,
        global_batch=6,
        mesh_order=["tp", "dp", "pp"],
        model=GROUPED | {"tied": False},
    ),
    "hybrid inside tensor parallel": dict(
        data_parallel_size=4,
        hybrid_shard_size=2,
        zero_stage=1,
        tensor_parallel_size=2,
        mesh_order=["dp", "tp", "pp"],
        global_batch=8,
        gradient_accumulation=2,
        model=GROUPED | {"tied": True},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_sizes_at_odd_layouts_are_one_process(layout, tmp_path):
    """Broken by a cut that assumes even sizes, a norm that counts a replica twice, or a mesh whose
    groups follow another order than the configuration's."""
    config = config_of(tmp_path, **LAYOUTS[layout])
    told, weights = plain(config)
    for mine in launch(trained, config, tmp_path / "saved", ranks=config.ranks):
        for (loss, norm), (loss_1, norm_1) in zip(mine, told, strict=True):
            assert math.isclose(loss, loss_1, rel_tol=1e-10)
            assert math.isclose(norm, norm_1, rel_tol=1e-9)
    saved = checkpoint.export(tmp_path / "saved")
    assert set(saved) == set(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-8, atol=1e-10, msg=name)


def hop(world, config, folder, take):
    """Load what is there, take some steps, save."""
    parallel, optimizer = built(world, config)
    if checkpoint.latest(folder):
        assert checkpoint.load(folder, parallel, optimizer) == {"at": parallel.number}
    told = [one_step(parallel, optimizer, parallel.number) for _ in range(take)]
    progress = {"at": parallel.number}
    checkpoint.save(folder, parallel, optimizer, progress, keep=1, background=True).wait()
    return told


def test_a_run_hops_over_five_layouts_and_is_one_run(tmp_path):
    """Broken by moments that are cut otherwise than weights, a count of steps that one stage loses,
    or a stretch read from the wrong place: each hop hides what the one before did."""
    model = {
        "hidden": 24,
        "heads": 6,
        "kv_heads": 6,
        "vocab": 103,
        "seq": 6,
        "mlp_hidden": 30,
        "layers": 3,
        "tied": False,
        "dropout": 0.2,
    }
    hops = [
        dict(data_parallel_size=3, zero_stage=3),
        dict(
            tensor_parallel_size=3,
            pipeline_parallel_size=2,
            sequence_parallel=True,
            gradient_accumulation=3,
            mesh_order=["tp", "pp", "dp"],
        ),
        dict(data_parallel_size=6, hybrid_shard_size=2, zero_stage=2),
        dict(
            pipeline_parallel_size=3,
            pipeline_schedule="interleaved",
            stages_per_rank=2,
            gradient_accumulation=6,
        ),
        dict(
            tensor_parallel_size=2,
            data_parallel_size=2,
            zero_stage=1,
            mesh_order=["tp", "dp", "pp"],
        ),
        dict(),
    ]
    configs = [config_of(tmp_path, global_batch=6, model=model, steps=20, **keys) for keys in hops]
    folder = tmp_path / "chain of hops"
    told = []
    for config in configs:
        told += launch(hop, config, folder, 2, ranks=config.ranks)[0]
    alone = launch(hop, configs[-1], tmp_path / "alone", 12, ranks=1)[0]
    for mine, one in zip(told, alone, strict=True):
        assert mine == pytest.approx(one, rel=1e-9)
    chained, whole = checkpoint.export(folder), checkpoint.export(tmp_path / "alone")
    for name in whole:
        torch.testing.assert_close(chained[name], whole[name], rtol=1e-7, atol=1e-9, msg=name)


class Odd(nn.Module):
    """Not a GPT: a scalar, a vector of 3, a buffer, a frozen table, an own name for everything."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.first = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))
        self.second = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.three = nn.Linear(6, 3)
        self.out = nn.Linear(3, 11)
        self.register_buffer("offset", torch.arange(6.0) / 10)
        self.table.weight.requires_grad_(False)
        self.first[0].bias.requires_grad_(False)

    def forward(self, tokens):
        x = self.table(tokens) + self.offset
        x = x + self.first(x)
        x = x + self.second(x) * self.scale
        return self.out(self.three(x))


def odd():
    torch.manual_seed(8)
    return Odd()


def odd_batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (6, 8), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def odd_steps(world, config, folder, first, last):
    parallel = parallelize(odd(), config, world, plan={})
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.05)
    if first:
        checkpoint.load(folder, parallel, optimizer)
    told = []
    for step in range(first, last):
        x, y = (rows.chunk(parallel.dp.size)[parallel.dp.rank] for rows in odd_batch(step))
        optimizer.zero_grad()
        loss = parallel.step(x, y)
        norm = clip_grad_norm_(parallel, 0.3)
        optimizer.step()
        told.append((loss.item(), norm.item()))
    checkpoint.save(folder, parallel, optimizer, {})
    return told


def test_a_users_own_model_with_frozen_parts_buffers_and_a_scalar_goes_from_layout_to_layout(
    tmp_path,
):
    """Broken by moments expected of a frozen weight, a scalar that cannot be cut, more ranks than
    elements, or a buffer that a stage loses."""
    layouts = [
        dict(data_parallel_size=3, zero_stage=3),
        dict(pipeline_parallel_size=3, gradient_accumulation=3),
        dict(data_parallel_size=2, pipeline_parallel_size=2, zero_stage=2, gradient_accumulation=3),
        dict(data_parallel_size=6, zero_stage=1),
    ]
    configs = [
        config_of(tmp_path, global_batch=6, model={"tied": False}, **keys) for keys in layouts
    ]
    told = []
    for number, config in enumerate(configs):
        mine = launch(
            odd_steps, config, tmp_path / "odd", 2 * number, 2 * number + 2, ranks=config.ranks
        )
        assert all(one == mine[0] for one in mine)
        told += mine[0]

    model = odd().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(8):
        x, y = odd_batch(step)
        optimizer.zero_grad()
        loss = next_token_loss(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        assert told[step] == pytest.approx((float(loss), float(norm)), rel=1e-9)
    saved = checkpoint.export(tmp_path / "odd")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-8, atol=1e-10, msg=name)


def with_a_whole_head(world, config):
    torch.manual_seed(0)
    model = GPT(config.gpt()).double()
    plan = {"blocks.*.mlp.gate": "column", "blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}
    try:
        parallel = parallelize(model, config, world, plan=plan)
        x, y = rows_of(config, 0)
        return float(parallel.step(x, y))
    except ValueError as error:
        return str(error)


def test_a_plan_that_leaves_the_head_whole_is_no_other_loss(tmp_path):
    """Broken by a loss that takes whole logits for a part of them: with two ranks each token's
    softmax then runs over every word twice, log 2 too much, and nobody notices."""
    config = config_of(
        tmp_path, tensor_parallel_size=2, global_batch=2, model=GROUPED | {"tied": False}
    )
    torch.manual_seed(0)
    x, y = rows_of(config, 0)
    with torch.no_grad():
        loss = float(next_token_loss(GPT(config.gpt()).double()(x), y))
    for answer in launch(with_a_whole_head, config, ranks=2):
        assert answer == pytest.approx(loss, rel=1e-12)


def looked_at(world, config, often):
    parallel, optimizer = built(world, config)
    told = []
    for step in range(STEPS):
        if often:
            x, y = (r.chunk(parallel.dp.size)[parallel.dp.rank] for r in rows_of(config, 50 + step))
            first = float(parallel.evaluate(x, y))
            parallel.eval()
            assert first == float(parallel.evaluate(x, y))
            parallel.train()
        told.append(one_step(parallel, optimizer, step))
    return told, torch.get_rng_state().sum().item()


@pytest.mark.parametrize(
    "keys",
    [
        dict(data_parallel_size=2, pipeline_parallel_size=2, zero_stage=3, gradient_accumulation=2),
        dict(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            gradient_accumulation=2,
            sequence_parallel=True,
            activation_checkpointing=True,
        ),
    ],
)
def test_evaluation_between_steps_changes_no_bit(keys, tmp_path):
    """Broken by an evaluation that draws masks, keeps whole weights, counts a step or leaves
    something in a queue of the pipeline."""
    model = GROUPED | {"tied": False, "dropout": 0.3}
    config = config_of(tmp_path, global_batch=4, model=model, **keys)
    often, never = (launch(looked_at, config, how, ranks=4) for how in (True, False))
    assert often == never
