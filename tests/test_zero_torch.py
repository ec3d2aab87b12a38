"""ZeRO ends where torch's own classes end: `fully_shard`, its hybrid, `ZeroRedundancyOptimizer`.

All of them run on gloo, in the same launch, on the same batches, in float64 to 1e-10; with the same
units, optimizer groups and, where torch has it, clipping.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from zero_training import TORCH, adamw, assert_same, build, gpt, hybrid, mlp, train, trunk

from s2s_lib import ZeRO, launch


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def state_of(module):
    return {name: whole(tensor) for name, tensor in module.state_dict().items()}


def clip_dtensors(parameters, limit):
    norm = TORCH(list(parameters), limit)
    return whole(norm)


def torchs_fully_sharded(make, mesh, world):
    """torch's stage 3, with the blocks of the GPT as units and the rest as the root."""
    model = build(make)
    for block in model.blocks if make is gpt else filter(any_parameters, model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    norms = train(model, make, world, clip=lambda m, limit: clip_dtensors(m.parameters(), limit))
    return state_of(model), norms


def any_parameters(module):
    return any(True for _ in module.parameters())


@pytest.mark.parametrize("ranks", [2, 3])
def test_stage_3_ends_where_fully_shard_ends(ranks):
    def work(world):
        mesh = init_device_mesh("cpu", (world.size,))
        for make in (gpt, mlp):
            want, norms = torchs_fully_sharded(make, mesh, world)
            for stage in (1, 2, 3):
                model = ZeRO(build(make), world, stage)
                got = train(model, make, world)
                assert_same(model.full_state_dict(), want, f"{make.__name__}, stage {stage}")
                assert got == pytest.approx(norms, abs=1e-10)

    launch(work, ranks=ranks)


def test_hybrid_shard_ends_where_fully_shard_on_a_mesh_of_two_axes_ends():
    def work(world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for make in (gpt, mlp):
            want, norms = torchs_fully_sharded(make, mesh, world)
            model = hybrid(world, 2, 2, build(make), 3)
            got = train(model, make, world)
            assert_same(model.full_state_dict(), want, make.__name__)
            assert got == pytest.approx(norms, abs=1e-10)

    launch(work, ranks=4)


def test_stage_1_ends_where_ddp_with_the_zero_redundancy_optimizer_ends():
    def work(world):
        for make in (gpt, mlp, trunk):
            model = nn.parallel.DistributedDataParallel(build(make))
            groups = adamw(model).param_groups
            groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups]
            optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-2)
            # The gradients are whole here, so torch's own clipping is right.
            norms = train(model, make, world, optimizer=optimizer, clip=TORCH)
            for stage in (0, 1):
                ours = ZeRO(build(make), world, stage)
                got = train(ours, make, world)
                assert_same(ours.full_state_dict(), state_of(model.module), make.__name__)
                assert got == pytest.approx(norms, abs=1e-10)

    launch(work, ranks=4)
