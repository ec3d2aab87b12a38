"""Tensor parallelism takes the steps of torch's parallelize_module with the same plan.

Both on gloo, in the same launch, on the same batches: loss, gradients and norm of each of five
steps of AdamW with clipping, and the weights after them, in float64 to 1e-10; whole, and with
torch's SequenceParallel.
"""

import pytest
import torch
from tensor_training import CLIP, OPTIONS, Case, adamw, assert_same, gpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from s2s_lib import clip_grad_norm_, launch

CASE = Case(lambda: gpt(tied=False, kv_heads=4))


def torchs_plan(sequence):
    """GPT_PLAN in torch's styles. Its logits are put together for its loss."""
    between = Shard(1) if sequence else Replicate()
    row = RowwiseParallel(output_layouts=between)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.attn.[qkv]": ColwiseParallel(),
        "blocks.*.attn.o": row,
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": row,
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        gathers = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        plan |= dict.fromkeys(
            ("blocks.*.attn_norm", "blocks.*.mlp_norm", "norm"), SequenceParallel()
        )
        plan |= dict.fromkeys(("blocks.*.attn", "blocks.*.mlp"), gathers)
    return plan


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def clip_dtensors(model, limit):
    """By hand: torch's own does not take cut and whole gradients together."""
    grads = [whole(p.grad) for p in model.parameters()]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for parameter in model.parameters():
        parameter.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def history(model, loss_of, clip, seen=lambda tensor: tensor.detach().clone()):
    """Of five steps loss, norm and gradients, then the weights; a tensor as `seen` shows it."""
    optimizer, told = adamw(model), []
    for step in range(5):
        x, y = CASE.data(step)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        grads = {name: seen(p.grad) for name, p in model.named_parameters()}
        told.append({"loss": loss.detach(), "norm": clip(model, CLIP)} | grads)
        optimizer.step()
    return [*told, {name: seen(p) for name, p in model.named_parameters()}]


def ours(world, options):
    model = CASE.cut(world, **options)
    return history(model, lambda z, y: CASE.loss(z, y, world), clip_grad_norm_)


def torchs(world, options):
    mesh = init_device_mesh("cpu", (world.size,))
    model = parallelize_module(CASE.build(), mesh, torchs_plan(bool(options)))
    return history(model, lambda z, y: CASE.loss(z, y, None), clip_dtensors, whole)


@pytest.mark.parametrize("how", ["whole", "sequence"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_gradients_and_steps_are_those_of_parallelize_module(ranks, how):
    def work(world):
        return ours(world, OPTIONS[how]), torchs(world, OPTIONS[how])

    mine, theirs = zip(*launch(work, ranks=ranks), strict=True)
    for step, want in enumerate(theirs[0]):
        assert_same([told[step] for told in mine], want, f"step {step}")
