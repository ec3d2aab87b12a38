"""What the tests of checkpoints train: two small models, at which layouts, and for how long.

`built` puts a model and an optimizer on the ranks of a layout, `steps` trains them. A layout of
fewer ranks than the world has runs on the first of them, so one launch sees many layouts.
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from s2s_lib import GPT, GPT_PLAN, Column, Row, Vocab, clip_grad_norm_
from s2s_lib.training.config import load_config
from s2s_lib.training.disk import read_manifest
from s2s_lib.training.parallel import parallelize
from s2s_lib.training.reader import Reader

ROWS, SEED = 12, 3
# An odd vocabulary: its parts are not of one size.
SHAPE = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 61, "seq": 8}

UNTIED = {
    "one process": {},
    "dp 2, zero 1": {"data_parallel_size": 2, "zero_stage": 1},
    "tp 2, sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "dp 3, zero 2": {"data_parallel_size": 3, "zero_stage": 2},
    "pp 2, zbv": {"pipeline_parallel_size": 2, "pipeline_schedule": "zbv"},
    "dp 4, zero 3 in pairs": {
        "data_parallel_size": 4,
        "zero_stage": 3,
        "hybrid_shard_size": 2,
        "gradient_accumulation": 1,
    },
    "dp 2, tp 2, zero 3, tp outside": {
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "zero_stage": 3,
        "mesh_order": ["tp", "pp", "dp"],
    },
    "dp 2, pp 2, zero 2, interleaved": {
        "data_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "zero_stage": 2,
        "pipeline_schedule": "interleaved",
    },
}
TIED = {
    "one process": {},
    "dp 2": {"data_parallel_size": 2},
    "tp 2, pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp 2, tp 2, zero 1": {
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "zero_stage": 1,
        "sequence_parallel": True,
    },
    "pp 4, gpipe": {"pipeline_parallel_size": 4, "pipeline_schedule": "gpipe"},
}


class Fused(nn.Module):
    """q, k and v in one weight, gate and up in another; biases, a frozen layer, and two buffers of
    which one is saved."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(61, 32)
        self.blocks = nn.ModuleList(FusedBlock() for _ in range(2))
        self.scale = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.register_buffer("offset", torch.randn(32))
        self.register_buffer("ones", torch.ones(32), persistent=False)
        self.head = nn.Linear(32, 61)
        self.scale.requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.scale(x)) * self.ones + self.offset)


class FusedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.gate_up, self.down = nn.Linear(32, 96), nn.Linear(48, 32)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


FUSED_PLAN = {
    "embed": Vocab(),
    "blocks.*.qkv": Column(blocks=3),
    "blocks.*.out": Row(),
    "blocks.*.gate_up": Column(blocks=2),
    "blocks.*.down": Row(),
    "head": Vocab(),
}


def config_of(settings, model=(), **more):
    """The Config of a file that says this."""
    dp = settings.get("data_parallel_size", 1)
    said = {"precision": "float64", "global_batch": ROWS, "seed": SEED}
    said |= {"gradient_accumulation": 4 if dp == 1 else 2, "model": SHAPE | dict(model)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(json.dumps(said | settings | more))
        return load_config(path)


def gpt(config):
    with torch.device("meta"):
        return GPT(config.gpt())


def fused(_):
    torch.manual_seed(SEED)
    return Fused()


def adamw(parameters):
    """Matrices decay, the rest does not."""
    parameters = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def built(world, config, make=gpt, optimizer=adamw):
    """Model and optimizer on the first ranks of the world; None elsewhere."""
    group = world.subgroup(range(config.ranks))
    if group is None:
        return None
    plan = GPT_PLAN if make is gpt else FUSED_PLAN
    parallel = parallelize(make(config), config, group, plan)
    return parallel, optimizer(parallel.parameters())


def batch(step):
    random = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(61, (ROWS, 9), generator=random)
    return tokens[:, :-1], tokens[:, 1:]


def steps(parallel, optimizer, count) -> list[tuple[float, float]]:
    """Losses and norms of the next steps; the learning rate falls from step to step."""
    seen = []
    for _ in range(count):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.8**parallel.number
        x, y = (t.chunk(parallel.dp.size)[parallel.dp.rank] for t in batch(parallel.number))
        optimizer.zero_grad()
        loss = parallel.step(x, y)
        seen.append((float(loss), float(clip_grad_norm_(parallel, 0.5))))
        optimizer.step()
    return seen


def contents(path) -> dict:
    """All that a checkpoint holds: whole tensors by key and name, numbers, settings by name."""
    manifest = read_manifest(path)
    reader = Reader(path, manifest)
    found = {"step": manifest["step"], "progress": manifest["progress"]}
    for name, tensor in manifest["tensors"].items():
        found |= {f"{key}/{name}": reader.whole(key, name) for key in reader.keys(name)}
        found[f"numbers/{name}"] = tensor["numbers"]
    for group in manifest["optimizer"]["groups"]:
        found |= {f"settings/{name}": group["settings"] for name in group["names"]}
    return found


def assert_same(got: dict, want: dict, what, atol=0.0):
    assert got.keys() == want.keys(), what
    for key, value in want.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                got[key], value, rtol=0, atol=atol, msg=lambda m, key=key: f"{what}, {key}: {m}"
            )
        else:
            assert got[key] == value, (what, key)
