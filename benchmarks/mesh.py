"""A step of the small GPT on a 2 x 2 x 2 mesh beside the same layout of torch's own parts.

Compared: forward and backward of 8 rows of 64 tokens a replica, in 4 micro-batches by 1F1B, and the
step of AdamW. The model is not tied. Torch: one DeviceMesh, and along its axes PipelineStage and
Schedule1F1B (pp), parallelize_module with the same plan and loss_parallel (tp), fully_shard of each
block and of the stage (dp). Ours is `parallelize`, which also tells every rank the loss; with ZeRO
stage 3, which is what fully_shard does, and with stage 1. Medians on the slowest rank.
"""

import contextlib
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.collectives import alternate
from benchmarks.report import result
from s2s_lib import GPT, GPT_PLAN, GPTConfig, launch, split
from s2s_lib.strategies.tensor.plan import matches
from s2s_lib.training.config import load_config
from s2s_lib.training.parallel import parallelize

AXES = {"dp": 2, "pp": 2, "tp": 2}
ROWS, MICRO = 8, 4
STAGES = (3, 1)
# The first is fully_shard's equal.
BOUNDS = {3: 1.0}


def gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig.small(tied=False))


def torchs_plan(stage):
    names = [name for name, _ in stage.named_modules()]
    styles = {
        "column": ColwiseParallel(),
        "row": RowwiseParallel(),
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(use_local_output=False),
    }
    return {
        pattern: styles.get(pattern, styles.get(style))
        for pattern, style in GPT_PLAN.items()
        if any(matches(name, pattern) for name in names)
    }


def entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def torchs_step(x, y):
    mesh = init_device_mesh("cpu", tuple(AXES.values()), mesh_dim_names=tuple(AXES))
    rank, last = mesh["pp"].get_local_rank(), AXES["pp"] - 1
    module = split(gpt(), AXES["pp"])[rank]
    parallelize_module(module, mesh["tp"], torchs_plan(module))
    blocks = [m for name, m in module.named_modules() if matches(name, "blocks.*")]
    for unit in [*blocks, module]:
        fully_shard(unit, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(module.parameters())
    stage = PipelineStage(module, rank, AXES["pp"], torch.device("cpu"), group=mesh.get_group("pp"))
    runner = Schedule1F1B(stage, MICRO, entropy)
    given = (x,) if rank == 0 else ()
    more = {"target": y, "losses": []} if rank == last else {}

    def step():
        optimizer.zero_grad()
        with loss_parallel() if rank == last else contextlib.nullcontext():
            runner.step(*given, **more)
        optimizer.step()

    return step


def config(stage):
    sizes = {"data_parallel_size": 2, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    more = {"zero_stage": stage, "gradient_accumulation": MICRO, "global_batch": 2 * ROWS}
    lines = [f"{key}: {value}" for key, value in (sizes | more).items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mesh.yaml"
        path.write_text("\n".join([*lines, "model: {size: small, tied: false}"]))
        return load_config(path)


def our_step(world, stage, x, y):
    parallel = parallelize(gpt(), config(stage), world)
    optimizer = torch.optim.AdamW(parallel.parameters())

    def step():
        optimizer.zero_grad()
        parallel.step(x, y)
        optimizer.step()

    return step


def compare(world, repeats):
    replica = world.rank // (AXES["pp"] * AXES["tp"])
    random = torch.Generator().manual_seed(replica)
    tokens = torch.randint(256, (ROWS, 65), generator=random)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    runs = {"torch": torchs_step(x, y)}
    for stage in STAGES:
        runs[f"ours, stage {stage}"] = our_step(world, stage, x, y)
    return alternate(world, runs, repeats, warm_up=3)


def main():
    times = launch(compare, 15, ranks=8, timeout=240)[0]
    print(", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in times.items()))
    for stage in STAGES:
        ratio = times["torch"] / times[f"ours, stage {stage}"]
        result(f"step, dp 2 x pp 2 x tp 2: torch / ours, stage {stage}", ratio, BOUNDS.get(stage))
