"""send, recv, isend, irecv: what arrives, what never meets, and how a wait in vain ends.

A wire that sends raw storage fails the strided shapes; one without tags lets a subgroup's message
be taken by another's receive; one that forgets a send nobody waited for fails the last tests of
the first half. Values are distinct everywhere.
"""

import time

import pytest
import torch

import s2s_lib
from s2s_lib import RankError, launch


def test_every_dtype_and_shape_arrives_as_it_was():
    def exchange(world):
        from s2s_lib import recv, send

        names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32"
        names += " uint64 bool complex64 complex128 float8_e4m3fn float8_e5m2"
        dtypes = [getattr(torch, name) for name in names.split()]
        base = torch.arange(24).view(2, 3, 4)
        tensors = [base.to(dtype) for dtype in dtypes]
        plain = base.float()
        tensors += [
            torch.tensor(7.5),
            torch.empty(0),
            torch.empty(3, 0, 2),
            plain.transpose(0, 2),
            plain[:, 1],
            plain[..., ::2],
            plain.flip(0),
            torch.tensor([1.0, 2.0])[:, None].expand(2, 3),
            torch.complex(plain, plain + 1).conj(),
            torch.complex(plain, plain + 1).imag,
            torch.complex(plain, plain + 1).conj().imag,
            torch.nn.Parameter(plain) * 2,
            plain.to(memory_format=torch.contiguous_format)[1:],
        ]
        wrong = []
        for number, tensor in enumerate(tensors):
            before = tensor.clone()
            if world.rank == 0:
                send(tensor, 1, world)
                good = torch.equal(tensor.byte(), before.byte())
            else:
                out = torch.empty(tensor.shape, dtype=tensor.dtype)
                good = recv(out, 0, world) is out and not out.requires_grad
                good = good and out.tolist() == tensor.tolist()
            if not good:
                wrong.append((number, tensor.shape, tensor.dtype))
        return len(tensors), wrong

    assert launch(exchange, ranks=2, timeout=20) == [(30, []), (30, [])]


def test_messages_of_one_kind_arrive_in_the_order_sent_and_kinds_do_not_mix():
    def exchange(world):
        from s2s_lib import irecv, isend

        if world.rank == 0:
            handles = [isend(torch.full((2,), float(i)), 1, world) for i in range(5)]
            handles.append(isend(torch.full((3,), 10.0), 1, world))
            handles.append(isend(torch.full((2,), 20), 1, world))
            return [handle.wait().tolist() for handle in handles]
        other_dtype = irecv(torch.empty(2, dtype=torch.int64), 0, world).wait()
        other_shape = irecv(torch.empty(3), 0, world).wait()
        handles = [irecv(torch.empty(2), 0, world) for _ in range(5)]
        in_any_order = [handles[i].wait() for i in (4, 0, 3, 1, 2)]
        return other_dtype.tolist(), other_shape.tolist(), [x[0].item() for x in in_any_order]

    _, (other_dtype, other_shape, values) = launch(exchange, ranks=2, timeout=20)
    assert other_dtype == [20, 20] and other_shape == [10.0, 10.0, 10.0]
    assert values == [4.0, 0.0, 3.0, 1.0, 2.0]


def test_places_are_those_of_the_group_and_groups_do_not_take_each_others_messages():
    def exchange(world):
        from s2s_lib import irecv, isend, recv, send

        backwards = world.subgroup([3, 1])
        if backwards is None:
            return None
        x = torch.empty(1)
        # Place 0 is world rank 3.
        if world.rank == 1:
            send(torch.tensor([1.0]), 0, backwards)
            outer = isend(torch.tensor([2.0]), 3, world)
            inner = isend(torch.tensor([3.0]), 0, backwards)
            return outer.wait().item(), inner.wait().item()
        first = recv(x, 1, backwards).item()
        inner = irecv(torch.empty(1), 1, backwards).wait().item()
        return first, inner, irecv(torch.empty(1), 1, world).wait().item()

    assert launch(exchange, ranks=4, timeout=20) == [None, (2.0, 3.0), None, (1.0, 3.0, 2.0)]


def test_two_threads_of_a_rank_do_not_take_each_others_messages():
    def exchange(world):
        from s2s_lib import background, recv, send

        peer = 1 - world.rank
        if world.rank == 0:
            waiting = background(send, torch.tensor([1.0]), peer, world, lane=3)
            time.sleep(0.2)
            send(torch.tensor([2.0]), peer, world)
            return waiting.wait()
        foreground = recv(torch.empty(1), peer, world).item()
        return foreground, background(recv, torch.empty(1), peer, world, lane=3).wait().item()

    assert launch(exchange, ranks=2, timeout=20) == [None, (2.0, 1.0)]


def test_a_send_returns_when_the_receiver_has_taken_it_and_isend_at_once():
    def exchange(world):
        from s2s_lib import isend, recv, send

        peer, x = 1 - world.rank, torch.arange(1000.0)
        if world.rank == 1:
            time.sleep(0.3)
            recv(torch.empty(1000), peer, world)
            time.sleep(0.3)
            return recv(torch.empty(1000), peer, world).sum().item()
        began = time.monotonic()
        send(x, peer, world)
        blocked, began = time.monotonic() - began, time.monotonic()
        handle = isend(x, peer, world)
        free = time.monotonic() - began
        handle.wait()
        handle.wait()
        return blocked, free

    (blocked, free), total = launch(exchange, ranks=2, timeout=20)
    assert blocked > 0.2 > free and total == 499500.0


def test_a_send_that_nobody_waits_for_still_arrives():
    """Its handle is dropped, its tensor (a temporary copy) too, and the function returns."""

    def exchange(world):
        import gc

        from s2s_lib import isend, recv

        x = torch.arange(250_000.0).view(500, 500)
        if world.rank == 0:
            isend(x.t(), 1, world)
            gc.collect()
            return [torch.full((500, 500), -1.0) for _ in range(8)][0][0, 0].item()
        time.sleep(0.3)
        arrived = recv(torch.empty(500, 500), 0, world)
        return torch.equal(arrived, x.t())

    def drop_both(world):
        from s2s_lib import irecv, isend

        peer = 1 - world.rank
        isend(torch.ones(3), peer, world)
        irecv(torch.empty(3), peer, world)

    assert launch(exchange, ranks=2, timeout=20) == [-1.0, True]
    assert launch(drop_both, ranks=2, timeout=20) == [None, None]


def test_a_send_that_nobody_takes_ends_at_the_timeout_and_is_named():
    def exchange(world):
        from s2s_lib import isend

        if world.rank == 0:
            isend(torch.ones(2, 3), 1, world)

    with pytest.raises(RankError, match="ranks waited for each other longer than 0.5 s") as error:
        launch(exchange, ranks=2, timeout=0.5)
    assert "isend, (2, 3) float32: send to rank 1" in str(error.value)
    assert "nothing: its function has returned" in str(error.value)


def test_a_wait_in_vain_raises_after_the_timeout_not_before_and_ends_the_connection():
    def wait(world):
        from s2s_lib import recv
        from s2s_lib.ranks.wire import ConnectionLost, WaitTimeout

        if world.rank == 1:
            time.sleep(1.5)
        said, began = [], time.monotonic()
        for size in (5, 1):
            try:
                recv(torch.empty(size), 1 - world.rank, world)
            except (WaitTimeout, ConnectionLost) as error:
                said.append(str(error))
        return said, time.monotonic() - began

    (mine, took), (theirs, _) = launch(wait, ranks=2, timeout=0.5)
    assert 0.4 < took < 1.4
    assert mine[0] == "recv, (5,) float32: receive from rank 1 did not complete in 0.5 s"
    assert mine[1].startswith("recv, (1,) float32: receive from rank 1 failed: ")
    assert "timeout" in mine[1]
    assert theirs[0].endswith("rank 0 failed: the other end is gone, or gave up waiting")


def test_what_cannot_be_sent_is_refused_with_the_way_out():
    def misuse(world):
        from s2s_lib import irecv, isend, recv, send

        one, outside = torch.ones(2), world.subgroup([0])
        attempts = {
            "itself": lambda: send(one, world.rank, world),
            "nobody": lambda: send(one, 2, world),
            "negative": lambda: recv(one, -1, world),
            "bool": lambda: isend(one, True, world),
            "no group": lambda: send(one, 1, outside),
            "a list": lambda: send([1.0], 0, world),
            "meta": lambda: send(torch.ones(2, device="meta"), 0, world),
            "recv meta": lambda: irecv(torch.ones(2, device="meta"), 0, world),
            "sparse": lambda: send(torch.eye(2).to_sparse(), 0, world),
            "gaps": lambda: recv(torch.ones(4)[::2], 0, world),
            "conjugated": lambda: recv(torch.ones(2, dtype=torch.complex64).conj(), 0, world),
            "negated": lambda: irecv(torch.ones(2, dtype=torch.complex64).conj().imag, 0, world),
        }
        said = {}
        for name, attempt in attempts.items():
            try:
                attempt()
            except (TypeError, ValueError) as error:
                said[name] = str(error)
        return said

    _, said = launch(misuse, ranks=2, timeout=5)
    assert said == {
        "itself": "rank 1 cannot send to or from itself; copy the tensor instead",
        "nobody": "destination 2 is not a rank of this group of 2: "
        "give its place in the group, 0..1",
        "negative": "source -1 is not a rank of this group of 2: give its place in the group, 0..1",
        "bool": "destination True is not a rank of this group of 2: "
        "give its place in the group, 0..1",
        "no group": "expected a Group, got None: "
        "this rank is not in the subgroup, so it must not call",
        "a list": "expected a tensor, got [1.0]; wrap it: torch.tensor(...)",
        "meta": "this tensor is on meta, the ranks exchange tensors on the CPU: .cpu()",
        "recv meta": "this tensor is on meta, the ranks exchange tensors on the CPU: .cpu()",
        "sparse": "cannot send a torch.sparse_coo tensor; make it dense: .to_dense()",
        "gaps": "cannot receive into a tensor of shape (2,) and strides (2,): "
        "its memory has gaps; receive into torch.empty(...) and copy",
        "conjugated": "cannot receive into a tensor that conjugates or negates what its memory "
        "holds; receive into torch.empty(...) and copy",
        "negated": "cannot receive into a tensor that conjugates or negates what its memory "
        "holds; receive into torch.empty(...) and copy",
    }


def test_outside_of_a_launch_the_error_says_so():
    with pytest.raises(RuntimeError, match=r"no ranks here: .*launch\(fn, ranks=...\)"):
        s2s_lib.send(torch.ones(1), 1, s2s_lib.Group((0, 1), 0))


def test_with_check_a_mismatch_is_raised_at_once_on_all_ranks_with_what_each_said():
    def disagree(world):
        from s2s_lib import all_gather, all_reduce, barrier, broadcast

        x, odd = torch.arange(6.0).view(2, 3), world.rank == 1
        back = world.subgroup([2, 1])
        calls = {
            "operation": lambda: broadcast(x, world) if odd else all_reduce(x, world),
            "shape": lambda: all_reduce(x.view(3, 2) if odd else x, world),
            "dtype": lambda: all_reduce(x.double() if odd else x, world),
            "reduction": lambda: all_reduce(x, world, op="max" if odd else "min"),
            "root": lambda: broadcast(x, world, root=int(odd)),
            "algorithm": lambda: all_reduce(x, world, algorithm="tree" if odd else "ring"),
            "barrier": lambda: barrier(world) if odd else all_gather(x, world),
            "subgroup": lambda: back and all_gather(x[:1] if odd else x, back),
        }
        said = {}
        for kind, call in calls.items():
            try:
                call()
            except ValueError as error:
                said[kind] = str(error)
        return said, all_reduce(x, world)[1, 2].item()

    began = time.monotonic()
    results = launch(disagree, ranks=3, timeout=30, check=True)
    assert time.monotonic() - began < 10
    assert [total for _, total in results] == [15.0] * 3
    first, second, third = (said for said, _ in results)
    assert first.pop("subgroup", None) is None and second == third | second
    assert first == {kind: text for kind, text in second.items() if kind != "subgroup"}
    for kind, usual, other in (
        ("operation", "all_reduce number 1, (2, 3) float32", "broadcast number 1, (2, 3) float32"),
        ("shape", "all_reduce number 2, (2, 3) float32", "all_reduce number 2, (3, 2) float32"),
        ("dtype", "(2, 3) float32, sum", "(2, 3) float64, sum"),
        ("reduction", "float32, min", "float32, max"),
        ("root", "broadcast number 5, (2, 3) float32, 0", "broadcast number 5, (2, 3) float32, 1"),
        ("algorithm", "sum, ring", "sum, tree"),
        ("barrier", "all_gather number 7", "barrier number 7"),
    ):
        head, *rows = first[kind].splitlines()
        assert head == "the ranks of group [0, 1, 2] disagree:"
        assert [row.split(":")[0] for row in rows] == ["  rank 0", "  rank 1", "  rank 2"]
        assert usual in rows[0] and other in rows[1] and usual in rows[2]
    head, *rows = second["subgroup"].splitlines()
    assert head == "the ranks of group [2, 1] disagree:"
    assert "(2, 3) float32" in rows[0] and "(1, 3) float32" in rows[1]
