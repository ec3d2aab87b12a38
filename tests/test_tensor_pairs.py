"""What each pair does to a tensor and to its gradient: the backward is the forward's transpose.

Over all ranks f is linear: sum <f(x), y> = sum <x, f*(y)>, where an inner product of whole tensors
counts once, being the same on every rank, and one of cut or partial tensors is the sum over ranks.
A factor W too much or too little shows there, as does a part taken from the wrong place; that a
gradient is whole where it should be is asserted by comparing ranks. Sums over the wrong group show
since ranks outside have other numbers.
"""

import pytest
import torch
from tensor_training import CLOSE, in_groups, joined

from s2s_lib import (
    RankError,
    all_gather,
    all_reduce,
    copy_to_group,
    gather_from_group,
    gather_sequence,
    launch,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_to_group,
)

GROUPS = [[0, 1, 2, 3], [3, 1], [2, 0, 3], [1]]
# What a pair takes and gives. "used" is a whole tensor of which each rank makes its own use, so
# its gradient is partial; the gradient of a partial one is whole.
STATES = {
    copy_to_group: ("whole", "used"),
    reduce_from_group: ("partial", "whole"),
    scatter_to_group: ("whole", "cut"),
    gather_from_group: ("cut", "whole"),
    gather_sequence: ("cut", "used"),
    reduce_scatter_sequence: ("partial", "cut"),
}
ALONG_A_DIM = [f for f in STATES if f not in (copy_to_group, reduce_from_group)]
EVEN = (12, 5, 12)
UNEVEN = (7, 5, 6)


def drawn(shape, seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64)


def sizes_of(length, ranks):
    """How many places each rank gets: here in order, as the parts lie."""
    ends = [length * (r + 1) // ranks for r in range(ranks)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def tensor_in(state, group, shape, dim, seed):
    """The whole tensor's values here: the same on all ranks, a part of them, or a term."""
    if state == "partial":
        return drawn(shape, 1000 * seed + group.ranks[group.rank])
    whole = drawn(shape, 1000 * seed + 900)
    if state != "cut":
        return whole
    return whole.split(sizes_of(shape[dim], group.size), dim)[group.rank].clone()


def assert_whole(tensor, group, what):
    parts = all_gather(tensor.reshape(1, -1), group)
    assert torch.equal(parts, parts[:1].expand_as(parts)), f"{what}: not the same on all ranks"


def inner(state, a, b, group):
    """<a, b> over all ranks: of what is whole once, and else the sum of theirs."""
    product = (a * b).sum()
    if state == "whole":
        assert_whole(product, group, "a product of whole tensors")
        return product
    return all_reduce(product, group)


def cases(group):
    """A function, its keywords, the shape of the whole tensor and the dim that is cut."""
    for function in STATES:
        if function not in ALONG_A_DIM:
            yield function, {}, EVEN, 0
            yield function, {}, (), 0
            continue
        for dim in (0, 2, -1, -3):
            yield function, {"dim": dim}, EVEN, dim
            if function is scatter_to_group:
                yield function, {"dim": dim}, UNEVEN, dim
            if function is gather_from_group:
                sizes = sizes_of(UNEVEN[dim], group.size)
                yield function, {"dim": dim, "sizes": sizes}, UNEVEN, dim
    # As they are called without a dim.
    yield scatter_to_group, {}, EVEN, -1
    yield gather_from_group, {}, EVEN, -1
    yield gather_sequence, {}, (2, 12, 5), -2
    yield reduce_scatter_sequence, {}, (2, 12, 5), -2


GRADIENT = {"whole": "whole", "cut": "cut", "used": "partial", "partial": "whole"}


def check_transpose(function, group, kwargs, shape, dim):
    takes, gives = STATES[function]
    what = f"{function.__name__} {kwargs} {shape} in {group.ranks}"
    x = tensor_in(takes, group, shape, dim, 1).requires_grad_()
    y = tensor_in(GRADIENT[gives], group, shape, dim, 2)
    kept, kept_y = x.detach().clone(), y.clone()
    out = function(x, group, **kwargs)
    (grad,) = torch.autograd.grad(out, x, y)
    assert grad.shape == x.shape and out.shape == y.shape, what
    assert torch.equal(x, kept) and torch.equal(y, kept_y), f"{what} changes its argument"
    with torch.no_grad():
        # Each rank uses a "used" tensor in its own way: the sum over ranks of <x, y of this rank>.
        there, back = inner(gives, out, y, group), inner(takes, x, grad, group)
        torch.testing.assert_close(there, back, rtol=1e-12, atol=1e-12, msg=what)
        for state, tensor in ((takes, x), (GRADIENT[takes], grad), (gives, out)):
            if state in ("whole", "used"):
                assert_whole(tensor, group, what)


def test_backward_is_the_transpose_of_forward():
    def work(world):
        done = 0
        for group in in_groups(world, GROUPS):
            for case in cases(group):
                function, kwargs, shape, dim = case
                check_transpose(function, group, kwargs, shape, dim)
                done += 1
        return done

    assert sum(launch(work, ranks=4)) == (4 + 2 + 3 + 1) * (4 + 4 * 6 + 4)


def test_forward_and_backward_give_what_the_table_says():
    """The values themselves, put together from all ranks by the parent."""

    def work(world):
        found = {}
        for group in in_groups(world, GROUPS):
            for function, (takes, gives) in STATES.items():
                kwargs = {"dim": 1} if function in ALONG_A_DIM else {}
                x = tensor_in(takes, group, (2, 12), 1, 1).requires_grad_()
                y = tensor_in(GRADIENT[gives], group, (2, 12), 1, 2)
                out = function(x, group, **kwargs)
                (grad,) = torch.autograd.grad(out, x, y)
                found[function.__name__, group.ranks] = out.detach(), grad
        return found

    results = launch(work, ranks=4)
    whole = {seed: drawn((2, 12), 1000 * seed + 900) for seed in (1, 2)}
    for function, (takes, gives) in STATES.items():
        for ranks in map(tuple, GROUPS):
            outs, grads = zip(*(results[r][function.__name__, ranks] for r in ranks), strict=True)
            summed = {seed: sum(drawn((2, 12), 1000 * seed + r) for r in ranks) for seed in (1, 2)}
            want = summed[1] if takes == "partial" else whole[1]
            want_grad = summed[2] if gives == "used" else whole[2]
            what = f"{function.__name__} in {ranks}"
            torch.testing.assert_close(joined(outs, want, what=what), want, **CLOSE)
            torch.testing.assert_close(joined(grads, want_grad, what=what), want_grad, **CLOSE)


def test_pairs_in_series_undo_each_other_twice_over():
    """whole -> cut -> whole, and cut -> used -> partial -> cut, forward and backward."""

    def work(world):
        for group in in_groups(world, GROUPS):
            x = drawn((12, 24), 3).requires_grad_()
            h = x
            for dim in (0, -1):
                h = gather_from_group(scatter_to_group(h, group, dim), group, dim)
                h = h.sin()
            h.backward(y := drawn((12, 24), 4))
            plain = x.detach().clone().requires_grad_()
            plain.sin().sin().backward(y)
            torch.testing.assert_close(x.grad, plain.grad, **CLOSE)

            part = scatter_to_group(drawn((12, 4), 5), group, 0).requires_grad_()
            h = part
            for _ in range(2):
                # Each rank multiplies by a number of its own; the sum over ranks by all of them.
                used = gather_sequence(h, group, 0) * (1 + group.rank)
                h = reduce_scatter_sequence(used, group, 0)
            h.sum().backward()
            factor = sum(range(1, group.size + 1)) ** 2
            torch.testing.assert_close(h.detach(), part.detach() * factor, **CLOSE)
            torch.testing.assert_close(part.grad, torch.full_like(part, factor), **CLOSE)

            x = drawn((3,), 6).requires_grad_()
            h = x
            for _ in range(2):
                h = reduce_from_group(copy_to_group(h, group) * (1 + group.rank), group)
            h.sum().backward()
            torch.testing.assert_close(h.detach(), x.detach() * factor, **CLOSE)
            torch.testing.assert_close(x.grad, torch.full_like(x, factor), **CLOSE)

    launch(work, ranks=4)


def test_copying_to_the_group_and_back_without_the_pairs_is_noticed():
    """The reason for the pairs: without them the output is right and the gradient is not."""

    def work(world):
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        out = reduce_from_group(x * (1 + world.rank), world)
        out.sum().backward()
        return out.tolist(), x.grad.tolist()

    assert launch(work, ranks=2) == [([3.0] * 3, [1.0] * 3), ([3.0] * 3, [2.0] * 3)]


def test_no_graph_is_kept_where_no_gradient_is_asked_for():
    def work(world):
        for function in STATES:
            x = torch.ones(4, 4)
            assert not function(x, world).requires_grad
            with torch.no_grad():
                assert not function(x.requires_grad_(), world).requires_grad

    launch(work, ranks=2)


def test_sixteen_bits_stay_sixteen_bits_and_are_rounded_once():
    def work(world):
        for function in STATES:
            x = torch.full((6, 6), 1 + 2**-7, dtype=torch.bfloat16, requires_grad=True)
            out = function(x, world)
            out.sum().backward()
            assert out.dtype is x.grad.dtype is torch.bfloat16
        # In bfloat16 256 + 1 + 1 is 256 if rounded after each.
        x = torch.tensor([256.0 if world.rank == 0 else 1.0], dtype=torch.bfloat16)
        return reduce_from_group(x, world).item()

    assert launch(work, ranks=3) == [258.0] * 3


def test_a_sequence_that_does_not_divide_is_refused_with_the_numbers():
    def work(world):
        return reduce_scatter_sequence(torch.ones(1, 7, 2), world)

    with pytest.raises(RankError, match="a sequence of 7 does not cut into 2 equal parts"):
        launch(work, ranks=2)
