"""DDP takes the steps of one process, and says so in bytes.

Parity is in float64 to 1e-10. A wrong divisor shows in every gradient; a bucket sent before its
last gradient, in the parameters of that bucket; a missing initial broadcast, in the weights of
all ranks but the first; gradients of an unused parameter, in the step that weight decay takes.
Modules that are hard to average are in test_ddp_cases.py, failures and odd uses in
test_ddp_uses.py.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from s2s_lib import DDP, GPT, Cluster, GPTConfig, Link, all_reduce, bill, launch, timeline

CLOSE = {"rtol": 0, "atol": 1e-10}


def mlp():
    """Odd sizes throughout, so that no bucket divides by the number of ranks."""
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))


def gpt():
    config = GPTConfig(layers=2, hidden=24, heads=3, kv_heads=1, vocab=31, seq=8)
    return GPT(config)


def build(make, seed=0):
    torch.manual_seed(seed)
    return make().double()


def batch_for(make, samples, step):
    random = torch.Generator().manual_seed(100 + step)
    if make is gpt:
        tokens = torch.randint(31, (samples, 9), generator=random)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(samples, 7, generator=random, dtype=torch.float64)
    return x, torch.randn(samples, 3, generator=random, dtype=torch.float64)


def loss_of(model, x, y):
    out = model(x)
    if y.dtype == torch.long:
        return F.cross_entropy(out.flatten(0, 1), y.flatten())
    return F.mse_loss(out, y)


def train(model, make, samples=12, steps=5, rank=0, size=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    share = samples // size
    for step in range(steps):
        x, y = batch_for(make, samples, step)
        mine = slice(rank * share, (rank + 1) * share)
        optimizer.zero_grad()
        loss_of(model, x[mine], y[mine]).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


SETTINGS = {
    "ours": {},
    "no overlap": {"overlap": False},
    "small buckets": {"bucket_mb": 1e-3},
}
# The world, a group out of order, one without rank 0, and one alone.
GROUPS = [[0, 1, 2, 3], [3, 0, 2], [2, 1], [3]]


def test_five_adamw_steps_equal_one_process_and_torch():
    def work(world):
        results = {}
        for members in GROUPS:
            group, torchs = world.subgroup(members), dist.new_group(members)
            for make in (mlp, gpt) if group else ():
                place = {"make": make, "rank": group.rank, "size": group.size}
                for name, settings in SETTINGS.items():
                    model = DDP(build(make, seed=group.rank), group, **settings)
                    results[group.size, make.__name__, name] = train(model, **place)
                model = nn.parallel.DistributedDataParallel(build(make), process_group=torchs)
                results[group.size, make.__name__, "torch"] = train(model, **place)
        return results

    expected = {make.__name__: train(build(make), make) for make in (mlp, gpt)}
    done = set()
    for results in launch(work, ranks=4):
        done |= results.keys()
        for (size, make, name), weights in results.items():
            for got, want in zip(weights, expected[make], strict=True):
                what = f"{make}, {name} on {size} ranks: "
                torch.testing.assert_close(got, want, **CLOSE, msg=lambda m, w=what: w + m)
    assert len(done) == 4 * 2 * 4


# Bytes


def share(numel, size, rank, itemsize):
    """Bytes that a rank sends of a large bucket: the pieces of the others to each, then its own
    to all."""
    mine = numel * (rank + 1) // size - numel * rank // size
    return (numel + (size - 2) * mine) * itemsize


def neighbours(rank, size):
    """In the binomial tree r hangs below r without its lowest bit."""
    return sum(1 for r in range(1, size) if rank in (r, r & (r - 1)))


def test_each_rank_sends_what_the_docstring_says():
    large, small = nn.Linear(385, 701), nn.Linear(7, 5)

    def work(world):
        counts = {}
        for members in GROUPS:
            group = world.subgroup(members)
            for layer in (large, small) if group else ():
                for dtype in (torch.float64, torch.float32, torch.bfloat16):
                    model = DDP(copy_as(layer, dtype), group)
                    with bill() as sent:
                        model(torch.ones(2, layer.in_features, dtype=dtype)).sum().backward()
                    numel = sum(p.numel() for p in model.parameters())
                    assert set(sent.by("collective")) <= {"all_reduce"}
                    counts[group.size, group.rank, numel, dtype.itemsize] = sent.bytes
        return counts

    totals = {}
    for counts in launch(work, ranks=4):
        for (size, rank, numel, itemsize), nbytes in counts.items():
            in_tree = numel * itemsize <= 2**20
            if in_tree:
                # Up and down a tree, in which 16-bit floats travel as float32.
                expected = neighbours(rank, size) * numel * max(4, itemsize)
            else:
                expected = share(numel, size, rank, itemsize)
            assert nbytes == expected, (size, rank, numel, itemsize)
            key = size, numel, itemsize, max(4, itemsize) if in_tree else itemsize
            totals[key] = totals.get(key, 0) + nbytes
    assert len(totals) == 4 * 2 * 3
    for (size, numel, _, on_wire), total in totals.items():
        assert total == 2 * (size - 1) * numel * on_wire


def copy_as(layer, dtype):
    return nn.Linear(layer.in_features, layer.out_features, dtype=dtype)


def test_buffers_are_sent_by_the_first_rank_in_training_forwards_alone():
    def work(world):
        torch.manual_seed(world.rank)
        model = DDP(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), world)
        x = torch.randn(5, 3)
        counts = []
        for mode, grad in [("train", True), ("train", False), ("eval", True), ("eval", False)]:
            getattr(model, mode)()
            with bill() as sent, torch.set_grad_enabled(grad):
                model(x)
            counts.append(sent.bytes)
        plain = DDP(nn.Linear(3, 4), world)
        with bill() as sent:
            plain(x)
            plain.eval()(x)
        return counts, sent.bytes, [b.tolist() for b in model.buffers()]

    results = launch(work, ranks=3)
    # Mean, variance, and a count of 8 bytes; along a tree, whose root has two children here.
    nbytes = 4 * 4 + 4 * 4 + 8
    assert [counts for counts, _, _ in results] == [[2 * nbytes, 2 * nbytes, 0, 0]] + [[0] * 4] * 2
    assert all(sent == 0 for _, sent, _ in results)
    assert results[0][2] == results[1][2] == results[2][2]


# Gradients, buckets and when they are sent


def test_gradients_are_views_into_the_buckets_and_stay_so():
    def work(world):
        model = DDP(build(mlp), world, bucket_mb=6e-4)
        flats = {bucket.flat.untyped_storage().data_ptr() for bucket in model.buckets}
        assert len(flats) == 3
        for to_none in (True, False, True):
            model.zero_grad(set_to_none=to_none)
            loss_of(model, *batch_for(mlp, 2, world.rank)).backward()
            held = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
            assert held == flats, "a gradient lies elsewhere"
        kept = [p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=False)
        assert not any(bucket.flat.any() for bucket in model.buckets)
        return kept

    zero, one = launch(work, ranks=2)
    assert all(map(torch.equal, zero, one))


def test_buckets_fill_from_the_last_parameter_and_leave_while_backward_computes():
    def work(world, overlap):
        model = DDP(build(mlp), world, bucket_mb=6e-4, overlap=overlap)
        gone = []
        model.module[0].weight.register_hook(
            lambda _: gone.append(model.buckets[0].sent is not None)
        )
        for _ in range(2):
            loss_of(model, *batch_for(mlp, 2, world.rank)).backward()
        with timeline() as line:
            loss_of(model, *batch_for(mlp, 2, world.rank)).backward()
        names = [bucket.names for bucket in model.buckets]
        return names, gone, line.tracks(), [name for name, _ in line.marks]

    names, gone, tracks, marks = launch(work, True, ranks=2)[0]
    # 6e-4 MB are 629 bytes; the weights have 120, 520 and 728.
    assert names == [["4.bias", "4.weight", "2.bias"], ["2.weight", "0.bias"], ["0.weight"]]
    # The first backward does not know yet which gradients will come.
    assert gone == [False, True, True]
    assert tracks == [0, 1] and sorted(marks) == [f"bucket {i} ready" for i in range(3)]
    _, gone, tracks, marks = launch(work, False, ranks=2)[0]
    assert gone == [False] * 3 and tracks == [0] and len(marks) == 3


@pytest.mark.parametrize("overlap", [True, False])
def test_a_slow_link_changes_nothing_but_the_time(overlap):
    def work(world):
        model = DDP(build(mlp), world, bucket_mb=6e-4, overlap=overlap)
        for step in range(3):
            model.zero_grad()
            x, y = batch_for(mlp, 8, step)
            mine = slice(world.rank * 2, world.rank * 2 + 2)
            with bill() as sent:
                loss_of(model, x[mine], y[mine]).backward()
            total = all_reduce(torch.tensor(sent.bytes), world).item()
            assert total == 6 * sum(p.nbytes for p in model.parameters())
            descend(model)
        return [p.detach().clone() for p in model.parameters()]

    plain = build(mlp)
    for step in range(3):
        plain.zero_grad()
        loss_of(plain, *batch_for(mlp, 8, step)).backward()
        descend(plain)
    cluster = Cluster(2, 2, intra=Link(1, 50), inter=Link(0.02, 1000))
    for weights in launch(work, ranks=4, cluster=cluster):
        for got, want in zip(weights, plain.parameters(), strict=True):
            torch.testing.assert_close(got, want.detach(), **CLOSE)


def descend(model, lr=0.1):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad


# The divisor


def test_a_mean_loss_over_equal_batches_needs_no_factor_and_tokens_need_the_documented_one():
    def work(world):
        torch.manual_seed(0)
        model = DDP(nn.Linear(1, 1, bias=False).double(), world)
        with torch.no_grad():
            model.module.weight.fill_(1.0)
        # Rank 0 has three tokens with a loss of 1 each, rank 1 one with a loss of 5.
        tokens = torch.tensor([[1.0], [1.0], [1.0]] if world.rank == 0 else [[5.0]]).double()
        all_tokens = all_reduce(torch.tensor(len(tokens)), world).item()
        grads = {}
        for name, scale in {"mean": 1 / len(tokens), "right": world.size / all_tokens}.items():
            model.zero_grad()
            (model(tokens).sum() * scale).backward()
            grads[name] = model.module.weight.grad.item()
        return grads

    # Over all tokens the mean is 8 / 4; the mean of the two means is 3.
    assert launch(work, ranks=2) == [{"mean": 3.0, "right": 2.0}] * 2


def test_sixteen_bit_gradients_are_added_in_float32_and_rounded_once():
    def work(world):
        results = {}
        for dtype in (torch.bfloat16, torch.float16):
            for numel in (4, 600_000):
                model = DDP(Scale(numel, dtype), world)
                # One large number and small ones that 16 bits would swallow one by one.
                ours = torch.linspace(1, 2, numel).to(dtype)
                factor = ours * (512 if world.rank == 1 else 1)
                model(factor).backward()
                exact = sum(ours.float() * (512 if r == 1 else 1) for r in range(world.size))
                expected = (exact / world.size).to(dtype)
                assert torch.equal(model.module.weight.grad, expected), (dtype, numel)
                results[dtype, numel] = (model.module.weight.grad[0]).item()
        return results

    (result,) = {tuple(r.values()) for r in launch(work, ranks=4)}
    assert result[0] == result[1] == torch.tensor(515 / 4).bfloat16().item()


class Scale(nn.Module):
    def __init__(self, numel, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel, dtype=dtype))

    def forward(self, factor):
        return (self.weight * factor).float().sum()


def test_a_sum_too_small_for_sixteen_bits_is_still_a_gradient_where_it_was_missing():
    def work(world):
        pair = nn.ModuleList([Scale(3, torch.float16), Scale(3, torch.float16)])
        model = DDP(pair, world)
        # The smallest float16 is 6e-8: a third of it rounds to -0.0.
        factor = torch.tensor([-6e-8, 3.0, 0.0], dtype=torch.float16)
        model.module.forward = lambda: pair[0](factor) + (pair[1](factor) if world.rank == 0 else 0)
        model().backward()
        return [p.grad.tolist() for p in model.parameters()]

    results = launch(work, ranks=3)
    assert all(second == [0.0, 1.0, 0.0] for _, second in results)
    assert results[0] == results[1] == results[2]


def test_dtypes_are_averaged_apart_and_each_keeps_its_own():
    def work(world):
        model = DDP(nn.ModuleList([Scale(3, d) for d in MIXED]), world)
        model.module.forward = lambda rank: sum(
            layer(torch.full((3,), rank + 1.0).to(layer.weight.dtype)) for layer in model.module
        )
        for _ in range(2):
            model.zero_grad()
            model(world.rank).backward()
        names = [" ".join(bucket.names) for bucket in model.buckets]
        assert names == ["4.weight 0.weight", "3.weight", "2.weight", "1.weight"]
        return [(p.grad.dtype, p.grad.tolist()) for p in model.parameters()]

    for grads in launch(work, ranks=3):
        assert grads == [(dtype, [2.0] * 3) for dtype in MIXED]


MIXED = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]


# Accumulation


def accumulate(model, world, how):
    """Gradients of three micro-batches a rank, as counted bytes and as tensors."""
    model.zero_grad()
    sent = []
    for i in range(3):
        x, y = batch_for(mlp, 4, 10 * i + world.rank)
        last = i == 2
        with bill() as b:
            how(model, lambda x=x, y=y: loss_of(model, x, y) / 3, last)
        sent.append(b.bytes)
    return sent


def inside(model, loss, last):
    if last:
        loss().backward()
    else:
        with model.no_sync():
            loss().backward()


def forward_outside(model, loss, last):
    value = loss()
    if last:
        value.backward()
    else:
        with model.no_sync():
            value.backward()


def backward_outside(model, loss, last):
    with model.no_sync():
        value = loss()
    if last:
        value.backward()
    else:
        with model.no_sync():
            value.backward()


def every_time(model, loss, last):
    loss().backward()


def nested(make, world):
    model = build(make)
    model[2] = DDP(model[2], world)
    return DDP(model, world)


def test_accumulated_gradients_equal_those_of_one_batch_and_no_sync_sends_nothing():
    def work(world):
        plain = build(mlp)
        losses = [
            loss_of(plain, *batch_for(mlp, 4, 10 * i + rank)) / 3 / world.size
            for i in range(3)
            for rank in range(world.size)
        ]
        sum(losses).backward()
        results = {}
        for wrapped in (DDP(build(mlp), world), nested(mlp, world)):
            for how in (inside, forward_outside, backward_outside, every_time, inside):
                sent = accumulate(wrapped, world, how)
                for got, want in zip(wrapped.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(got.grad, want.grad, **CLOSE, msg=how.__name__)
                results[how.__name__] = sent
        return results

    nbytes = sum(p.nbytes for p in build(mlp).parameters())
    zero, one = launch(work, ranks=2)
    assert zero == one
    assert zero.pop("every_time") == [nbytes] * 3
    assert list(zero.values()) == [[0, 0, nbytes]] * 3


def test_a_layer_used_in_a_silent_micro_batch_only_is_averaged_at_the_end():
    def work(world):
        model = DDP(build(mlp), world)
        for _ in range(3):
            model.zero_grad()
            with model.no_sync():
                loss_of(model, *batch_for(mlp, 4, world.rank)).backward()
            model.module[0].requires_grad_(False)
            loss_of(model, *batch_for(mlp, 4, 9)).backward()
            model.module[0].requires_grad_(True)
        return [p.grad for p in model.parameters()]

    plain = build(mlp)
    for rank in range(2):
        (loss_of(plain, *batch_for(mlp, 4, rank)) / 2).backward()
    plain[0].requires_grad_(False)
    loss_of(plain, *batch_for(mlp, 4, 9)).backward()
    for grads in launch(work, ranks=2):
        for got, want in zip(grads, plain.parameters(), strict=True):
            torch.testing.assert_close(got, want.grad, **CLOSE)


def test_no_sync_ends_with_an_error_inside_and_nests():
    def work(world):
        model = nested(mlp, world)
        with pytest.raises(ZeroDivisionError), model.no_sync():
            1 / 0  # noqa: B018
        with model.no_sync():
            with model.no_sync():
                pass
            with bill() as sent:
                loss_of(model, *batch_for(mlp, 2, world.rank)).backward()
            assert sent.bytes == 0
        with bill() as sent:
            loss_of(model, *batch_for(mlp, 2, world.rank)).backward()
        return sent.bytes, [p.grad.clone() for p in model.parameters()]

    zero, one = launch(work, ranks=2)
    assert zero[0] == one[0] == sum(p.nbytes for p in build(mlp).parameters())
    assert all(map(torch.equal, zero[1], one[1]))


def test_a_second_backward_of_one_graph_adds_its_average():
    def work(world):
        model = DDP(build(mlp), world)
        loss = loss_of(model, *batch_for(mlp, 2, world.rank))
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        loss.backward()
        return once, [p.grad.clone() for p in model.parameters()]

    for once, both in launch(work, ranks=2):
        for one, two in zip(once, both, strict=True):
            torch.testing.assert_close(two, 2 * one, **CLOSE)
