"""Gradients through collectives are those of the sum of every rank's loss.

A collective is linear: over all ranks, f maps the tensors x to f(x), and backward must be the
transpose, so sum <f(x), y> = sum <x, grad> for any y. That finds a missing or doubled factor, a
piece sent to the wrong rank and a sum over the wrong group; parity with one process shows that
this is the gradient one wants.
"""

import pytest
import torch

from s2s_lib import (
    RankError,
    all_gather,
    all_reduce,
    all_to_all,
    background,
    barrier,
    broadcast,
    launch,
    reduce_scatter,
)

ALGORITHMS = {
    all_reduce: ["naive", "tree", "ring", "doubling", "direct", "torch"],
    reduce_scatter: ["naive", "tree", "ring", "direct"],
    all_gather: ["naive", "tree", "ring", "direct"],
    broadcast: ["naive", "tree", "torch"],
}


def random(*shape, like=torch.float64):
    """The same on no two ranks: each has seeded its own generator."""
    return torch.randn(shape, dtype=like)


def check_transpose(function, x, group, *what, **kwargs):
    """sum <f(x), y> over the group equals sum <x, f^T(y)>, for a random y."""
    x = x.requires_grad_()
    before = x.detach().clone()
    result = function(x, group, **kwargs)
    assert result.requires_grad and torch.equal(x, before), what
    y = torch.randn_like(result)
    (grad,) = torch.autograd.grad(result, x, y)
    assert grad.shape == x.shape and grad.dtype == x.dtype, what
    with torch.no_grad():
        plain = function(x, group, **kwargs)
        assert torch.equal(plain, result), what
        # <a, b> of complex numbers is sum(conj(a) b), and gradients follow that.
        there = (result.conj() * y).sum()
        back = (x.conj() * grad).sum()
        pair = all_reduce(torch.stack([there, back]), group)
    torch.testing.assert_close(pair[0], pair[1], rtol=1e-12, atol=1e-12, msg=str((what, pair)))


def transposes(group):
    torch.manual_seed(1000 + group.ranks[group.rank])
    size, rank = group.size, group.rank
    for op in ("sum", "avg"):
        for algorithm in ["auto", *ALGORITHMS[all_reduce]]:
            check_transpose(all_reduce, random(5, 2), group, algorithm, op=op, algorithm=algorithm)
        for algorithm in ["auto", *ALGORITHMS[reduce_scatter]]:
            kwargs = {"op": op, "algorithm": algorithm}
            check_transpose(reduce_scatter, random(2 * size, 3), group, **kwargs)
            rows = [3, 0, 1, 2, 1][:size]
            check_transpose(reduce_scatter, random(sum(rows), 3), group, sizes=rows, **kwargs)
    for algorithm in ["auto", *ALGORITHMS[all_gather]]:
        check_transpose(all_gather, random(2, 3), group, algorithm, algorithm=algorithm)
        check_transpose(all_gather, random(), group, "number", algorithm=algorithm)
        rows = [3, 0, 1, 2, 1][:size]
        for sizes in (rows, "exchange"):
            x = random(rows[rank], 2)
            check_transpose(all_gather, x, group, sizes, sizes=sizes, algorithm=algorithm)
    for root in range(size):
        for algorithm in ["auto", *ALGORITHMS[broadcast]]:
            check_transpose(broadcast, random(4), group, root, root=root, algorithm=algorithm)
    check_transpose(all_to_all, random(2 * size, 2), group, "even")
    shares = [(rank + place) % 3 for place in range(size)]
    check_transpose(all_to_all, random(sum(shares), 2), group, shares, sizes=shares)
    # Strides and complex numbers.
    check_transpose(all_reduce, random(3, 4).t()[::2], group, "strides")
    for function in (all_reduce, all_gather, broadcast, reduce_scatter, all_to_all):
        check_transpose(function, random(2 * size, like=torch.complex128), group, "complex")
        check_transpose(function, random(2 * size, like=torch.complex128).conj(), group, "conj")


def in_subgroups(world):
    # At the same time, unsorted, one without rank 0.
    transposes(world.subgroup([4, 0, 2]) or world.subgroup([3, 1]))
    barrier(world)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_backward_is_the_transpose_of_forward(size):
    launch(transposes, ranks=size)


def test_backward_is_the_transpose_in_two_subgroups_at_once():
    launch(in_subgroups, ranks=5)


def test_a_loss_on_gathered_rows_has_the_gradient_of_one_process():
    rows = [3, 0, 1]
    torch.manual_seed(11)
    whole = torch.randn(4, 2, dtype=torch.float64)
    weights = torch.randn(3, 4, 2, dtype=torch.float64)

    def work(world):
        mine = whole.split(rows)[world.rank].clone().requires_grad_()
        gathered = all_gather(mine, world, sizes=rows)
        # Each rank has a loss of its own, of all rows.
        (gathered.softmax(0) * weights[world.rank]).sum().backward()
        return mine.grad

    x = whole.clone().requires_grad_()
    sum((x.softmax(0) * weight).sum() for weight in weights).backward()
    torch.testing.assert_close(torch.cat(launch(work, ranks=3)), x.grad, rtol=1e-12, atol=1e-12)


def test_a_layer_cut_by_columns_and_rows_has_the_gradients_of_one_process():
    torch.manual_seed(12)
    x, first, second = (torch.randn(s, dtype=torch.float64) for s in ((5, 4), (4, 6), (6, 4)))

    def work(world):
        mine, a, b = (
            t.clone().requires_grad_()
            for t in (x, first.chunk(2, 1)[world.rank], second.chunk(2, 0)[world.rank])
        )
        y = all_reduce((mine @ a).tanh() @ b, world)
        # The loss is a sum over ranks: each takes its half of the same number.
        (y.square().sum() / world.size).backward()
        return all_reduce(mine.grad, world), a.grad, b.grad

    whole = [t.clone().requires_grad_() for t in (x, first, second)]
    ((whole[0] @ whole[1]).tanh() @ whole[2]).square().sum().backward()
    results = launch(work, ranks=2)
    for x_grad, _, _ in results:
        torch.testing.assert_close(x_grad, whole[0].grad, rtol=1e-12, atol=1e-12)
    for place, dim in ((1, 1), (2, 0)):
        grad = torch.cat([result[place] for result in results], dim)
        torch.testing.assert_close(grad, whole[place].grad, rtol=1e-12, atol=1e-12)


def test_several_collectives_in_one_graph_and_one_used_twice():
    def work(world):
        x = torch.full((2,), 1.0 + world.rank, dtype=torch.float64, requires_grad=True)
        total = all_reduce(x, world)
        (total * broadcast(total, world, root=1) + all_gather(x, world)[:2]).sum().backward()
        return x.grad.tolist()

    # With s the sum of x0 and x1, the loss over ranks is 2 s * s + 2 x0 in each of two places.
    assert launch(work, ranks=2) == [[14.0, 14.0], [12.0, 12.0]]


def test_sixteen_bit_gradients_keep_their_dtype():
    def work(world):
        results = []
        for function in (all_reduce, all_gather, reduce_scatter, broadcast, all_to_all):
            x = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
            function(x, world).sum().backward()
            results.append((x.grad.dtype, x.grad.tolist()))
        return results

    twos, ones = (torch.bfloat16, [2.0] * 4), (torch.bfloat16, [1.0] * 4)
    first, second = launch(work, ranks=2)
    assert first == [twos, twos, ones, twos, ones]
    assert second == [twos, twos, ones, (torch.bfloat16, [0.0] * 4), ones]


def test_no_graph_is_kept_where_no_gradient_is_asked_for():
    def work(world):
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            assert not all_reduce(x, world).requires_grad
        assert not all_reduce(x.detach(), world).requires_grad
        assert not background(all_reduce, x, world).wait().requires_grad
        with torch.no_grad():
            out = torch.empty(2)
            assert all_reduce(x, world, out=out) is out
        return out.tolist()

    assert launch(work, ranks=2) == [[2.0, 2.0]] * 2


def test_a_gradient_of_a_gradient_is_refused():
    def work(world):
        x = torch.ones(2, requires_grad=True)
        (grad,) = torch.autograd.grad(all_reduce(x, world).square().sum(), x, create_graph=True)
        grad.sum().backward()

    with pytest.raises(RankError, match="create_graph=True asks for the gradient of a gradient"):
        launch(work, ranks=2)
