"""Islands that come, go, stop and die at the worst moments. What must hold: nobody waits longer
than a few times the patience, all who are left see the same members, and weights stay equal."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import pytest
import torch
from torch import nn

from s2s_lib import DiLoCo, Islands, RankError, all_reduce, launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
PATIENCE = 2.0


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(5, 3, dtype=torch.float64)


def walk(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def resumes_after(seconds):
    """Another process that lets this one go on; then this one stops."""
    pid = os.getpid()
    if os.fork() == 0:
        os.setsid()
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def one(group):
    return all_reduce(torch.ones(1), group).item()


def lived(values):
    return [value for value in values if not isinstance(value, RankError)]


def equal(found):
    for mine in found:
        for a, b in zip(mine, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


# The store


def test_two_islands_of_one_launch_do_not_hear_each_other():
    """All Islands of a launch say their words in one store: the second one finds what the first
    has written down, and a failure in it passes for done."""

    def run(world):
        first = Islands(world, patience=PATIENCE)
        first.together(one)
        second = Islands(world, late=[2], patience=PATIENCE)
        if not second.here:
            return first.members, [0, 1]
        return first.members, (second.together(one), second.members)[1]

    assert launch(run, ranks=3, survive=True, timeout=10) == [([0, 1, 2], [0, 1])] * 3


def test_what_failed_in_a_second_islands_is_done_again():
    """The members read the outcome that another Islands has left, so a round that one of them
    failed in counts as done, and has no value."""

    def run(world):
        Islands(world, patience=PATIENCE).together(one)
        second = Islands(world, patience=PATIENCE)
        if world.rank == 2:
            die()
        return second.together(one), second.members

    got = lived(launch(run, ranks=3, survive=True, timeout=10))
    assert got == [(2.0, [0, 1])] * 2


def test_two_models_can_have_islands_of_their_own():
    """The first model's description stays in the store, and the second is refused as another
    one than the others train."""

    def run(world):
        models = linear(1), nn.Linear(5, 2, dtype=torch.float64)
        both = []
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            islands = Islands(world, patience=PATIENCE)
            both.append(DiLoCo(model, optimizer, islands, 2))
            walk(model, optimizer, 2, world.rank)
        return [w for model in models for w in weights(model)]

    equal(launch(run, ranks=2, survive=True, timeout=10))


def test_halves_of_a_world_have_islands_of_their_own():
    """Ranks are named by their place in the world that Islands got: those of two halves have the
    same names in one store."""

    def run(world):
        half = world.subgroup([0, 1]) or world.subgroup([2, 3])
        islands = Islands(half, patience=PATIENCE)
        for _ in range(3):
            value = islands.together(one)
        if world.rank == 3:
            die()
        for _ in range(2):
            value = islands.together(one)
        return value, islands.members

    got = launch(run, ranks=4, survive=True, timeout=10)
    assert got[:3] == [(2.0, [0, 1]), (2.0, [0, 1]), (1.0, [0])]


# Dying


@pytest.mark.parametrize("when", ["before", "building"])
def test_an_island_that_dies_before_all_have_begun_does_not_end_the_others(when):
    """Construction talks to all without a vote: one that is gone by then raises ConnectionLost
    on all others, at every attempt."""

    def run(world):
        islands = Islands(world, patience=PATIENCE)
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if world.rank == 1:
            if when == "before":
                die()
            threading.Timer(0.0, die).start()
        diloco = DiLoCo(model, optimizer, islands, 2)
        walk(model, optimizer, 2, world.rank)
        diloco.flush()
        return weights(model), islands.members

    got = launch(run, ranks=3, survive=True, timeout=10)
    assert isinstance(got[1], RankError)
    assert [members for _, members in lived(got)] == [[0, 2]] * 2


@pytest.mark.parametrize("moment", ["work", "vote", "after"])
def test_members_agree_whoever_dies_when(moment):
    """In the midst of the work, with its work done but before it has said so, and right after;
    two at once, of eight."""

    def run(world):
        islands = Islands(world, patience=PATIENCE)
        dies = world.rank in (0, 5)
        islands.together(one)
        if dies and moment == "vote":
            islands.agree = lambda *_: die()

        def work(group):
            if dies and moment == "work":
                die()
            return one(group)

        value = islands.together(work)
        if dies:
            die()
        return value, islands.together(one), islands.members

    began = time.monotonic()
    got = lived(launch(run, ranks=8, survive=True, timeout=20))
    first = 8.0 if moment == "after" else 6.0
    assert got == [(first, 6.0, [1, 2, 3, 4, 6, 7])] * 6
    assert time.monotonic() - began < 6 * PATIENCE + 5


@pytest.mark.parametrize("whole", [False, True])
def test_a_joiner_that_dies_in_its_welcome_is_forgotten(whole):
    """The members have let it in, and wait for it; also where two have come at once and one of
    them lives."""

    def run(world):
        islands = Islands(world, late=[2, 3], patience=PATIENCE)
        model = linear(world.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if world.rank == 3:
            islands.join()
            if whole:
                die()
            time.sleep(3 * PATIENCE)
            return "late"
        if world.rank < 2:
            # Until both have asked.
            while not all(islands.store.check([f"asks {n}"]) for n in (2, 3)):
                time.sleep(0.01)
        diloco = DiLoCo(model, optimizer, islands, 2)
        walk(model, optimizer, 2 if world.rank < 2 else 0, world.rank)
        walk(model, optimizer, 2, world.rank)
        diloco.flush()
        return weights(model), islands.members

    got = launch(run, ranks=4, survive=True, timeout=15)[:3]
    assert [members for _, members in got] == [[0, 1, 2]] * 3
    equal([found for found, _ in got])


def test_gossip_and_a_late_island_are_the_same_after_flush():
    """That islands have met in pairs, and are apart, is news to a newcomer: it skips the last
    meeting, and the others wait for it, lose it, and end with other weights."""

    def run(world):
        islands = Islands(world, late=[2], patience=PATIENCE)
        model = linear(world.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if world.rank < 2:
            while not islands.store.check(["asks 2"]):
                time.sleep(0.01)
        diloco = DiLoCo(model, optimizer, islands, 2, gossip=True)
        if world.rank < 2:
            walk(model, optimizer, 2, world.rank)
        diloco.flush()
        return weights(model), islands.members

    got = launch(run, ranks=3, survive=True, timeout=10)
    assert [members for _, members in got] == [[0, 1, 2]] * 3
    equal([found for found, _ in got])


def test_all_come_back_after_leaving_one_by_one():
    """An island that leaves and comes back, twice; its old words in the store must not count."""

    def run(world):
        islands = Islands(world, patience=PATIENCE)
        seen = []
        for turn in range(4):
            if turn % 2 and world.rank == turn // 2:
                islands.leave()
                islands.join()
            else:
                while turn % 2 and not islands.store.check([f"asks {turn // 2}"]):
                    time.sleep(0.01)
                islands.together(one)
            seen.append(islands.members)
        return seen, islands.together(one)

    for seen, value in launch(run, ranks=3, survive=True, timeout=15):
        assert seen[-1] == [0, 1, 2] and value == 3.0


# Slow


@pytest.mark.parametrize("seconds", [0.6, 2.5])
def test_an_island_that_is_stopped_goes_on_or_comes_back(seconds):
    """Stopped for less than the patience nothing changes; for longer the others go on, and it
    takes part again with what they have then."""

    def run(world):
        islands = Islands(world, patience=1.5)
        model = linear()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        diloco = DiLoCo(model, optimizer, islands, 2)
        walk(model, optimizer, 3, world.rank)
        if world.rank == 1:
            resumes_after(seconds)
        walk(model, optimizer, 1, world.rank)
        gone = islands.members == [0, 2]
        while islands.members != [0, 1, 2]:
            walk(model, optimizer, 1, world.rank)
            time.sleep(0.01)
        return gone, diloco.counts, weights(model)

    got = launch(run, ranks=3, survive=True, timeout=20)
    assert [gone for gone, *_ in got] == [seconds > 1.5, False, seconds > 1.5]
    assert got[0][1] == got[1][1] == got[2][1]
    equal([found for *_, found in got])


def test_an_island_that_is_left_behind_in_its_welcome_comes_back_by_itself():
    """Stopped again when it has just been let in, an island is left behind within its coming
    back, where nobody catches it: optimizer.step() raises, which otherwise goes on."""

    def run(world):
        islands = Islands(world, patience=1.0)
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = DiLoCo(model, optimizer, islands, 1)
        walk(model, optimizer, 1, world.rank)
        if world.rank == 1:
            join, joined = islands.join, []

            def stop_once_in():
                join()
                joined.append(True)
                if len(joined) == 1:
                    resumes_after(2.5)

            islands.join = stop_once_in
            resumes_after(2.5)
            walk(model, optimizer, 1, world.rank)
            return len(joined), diloco.counts
        until, joined = time.monotonic() + 20, 0
        while not joined and time.monotonic() < until:
            before = islands.members
            walk(model, optimizer, 1, world.rank)
            joined += islands.members == [0, 1, 2] != before
            time.sleep(0.02)
        return joined, diloco.counts

    got = launch(run, ranks=3, survive=True, timeout=12)
    assert not isinstance(got[1], RankError), got[1]
    assert got[0][0] == 1 and got[1][0] == 2
    assert got[0][1] == got[1][1] == got[2][1]


def test_an_island_that_gave_up_asking_may_ask_again():
    """What it has taken back must not let it in, and its second question must."""

    def run(world):
        islands = Islands(world, late=[2], patience=PATIENCE, wait=2)
        if world.rank == 2:
            try:
                islands.join()
            except RuntimeError:
                islands.store.set("gave up", "")
            islands.join()
        else:
            islands.store.wait(["gave up", "asks 2"])
            islands.together(one)
        return islands.together(one), islands.members

    assert launch(run, ranks=3, survive=True, timeout=10) == [(3.0, [0, 1, 2])] * 3


def test_an_error_of_all_leaves_the_islands_as_they_were():
    """What all raise alike is no death: the next time they are together as before."""

    def run(world):
        islands = Islands(world, patience=PATIENCE)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                islands.together(lambda group: 1 / 0)
        return islands.together(one), islands.members

    assert launch(run, ranks=3, survive=True, timeout=10) == [(3.0, [0, 1, 2])] * 3


def test_an_island_that_has_left_is_told_so_when_it_steps():
    """A step after leave() ends in `1 is not in list`, out of the connecting."""

    def run(world):
        islands = Islands(world, patience=PATIENCE)
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        DiLoCo(model, optimizer, islands, 1)
        walk(model, optimizer, 1, world.rank)
        if world.rank == 1:
            islands.leave()
        walk(model, optimizer, 1, world.rank)
        return islands.members

    got = launch(run, ranks=2, survive=True, timeout=5)
    assert got[0] == [0]
    assert not isinstance(got[1], RankError) or "island 1" in str(got[1]), got[1]


def test_a_launch_ends_though_a_rank_is_stopped_for_good(tmp_path):
    """The others have gone on without it and returned; waiting for its answer never ends."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, torch\n"
        "from s2s_lib import Islands, all_reduce, launch\n"
        "def run(world):\n"
        "    islands = Islands(world, patience=1)\n"
        "    if world.rank == 1:\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    return islands.together(lambda group: all_reduce(torch.ones(1), group).item())\n"
        "print(launch(run, ranks=3, survive=True, timeout=2))\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=25)
    assert done.stdout.startswith("[2.0, RankError"), done.stdout


# An ordinary error


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_of_one_rank_ends_its_island_only(size):
    """A rank that raises within the work says nothing: its island is out after the patience; the
    others go on, with each other."""

    def run(world):
        islands = Islands(world, size, patience=PATIENCE)

        def work(group):
            if world.rank == size:
                raise ValueError("mine")
            return one(group)

        first = islands.together(work)
        return first, islands.together(one), islands.members

    began = time.monotonic()
    got = launch(run, ranks=3 * size, survive=True, timeout=3)
    assert "mine" in str(got[size])
    for rank, value in enumerate(got):
        if rank // size != 1:
            assert value == (2.0, 2.0, [0, 2])
        else:
            assert isinstance(value, RankError)
    assert time.monotonic() - began < 5 * PATIENCE + 5


@pytest.mark.parametrize("patience", [0, -1, float("nan"), "3", True])
def test_a_patience_that_is_no_time_is_refused(patience):
    """Accepted, it would put out every island at its first word, or raise deep inside."""

    def run(world):
        try:
            Islands(world, patience=patience)
        except (TypeError, ValueError) as error:
            return "patience" in str(error)
        return False

    assert all(launch(run, ranks=2))


@pytest.mark.parametrize("late", [5, "1", [1.5]])
def test_late_islands_that_are_no_list_of_numbers_are_refused(late):
    """A number alone is the likeliest slip; it must be told in words."""

    def run(world):
        try:
            Islands(world, late=late)
        except (TypeError, ValueError) as error:
            return str(error)

    said = launch(run, ranks=2)
    assert all(text and "late=" in text for text in said), said


def test_a_rank_that_exits_without_a_word_counts_as_failed():
    """os._exit(0) is no answer; the others go on and the launch ends."""

    def run(world):
        islands = Islands(world, patience=PATIENCE)
        if world.rank == 1:
            os._exit(0)
        return islands.together(one)

    got = launch(run, ranks=3, survive=True, timeout=10)
    assert got[0] == got[2] == 2.0 and isinstance(got[1], RankError)


def test_a_late_island_with_another_optimizer_takes_part_and_with_other_numbers_not():
    """What a newcomer must share with the others is told to it alone, before they wait for it."""

    def run(world):
        islands = Islands(world, late=[1, 2], patience=PATIENCE)
        model = linear(world.rank)
        kind = torch.optim.Adagrad if world.rank == 1 else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.1)
        if world.rank == 0:
            DiLoCo(model, optimizer, islands, 2)
            islands.store.wait(["asks 1"])
            walk(model, optimizer, 2, 0)
        else:
            islands.store.wait(["trains 1 at place 0"])
            try:
                DiLoCo(model, optimizer, islands, 2, 0.7 if world.rank == 1 else 0.5)
            except ValueError as error:
                return str(error)
        walk(model, optimizer, 2, world.rank)
        return weights(model), islands.members

    got = launch(run, ranks=3, survive=True, timeout=15)
    assert "outer_lr=0.7" in got[2] and "outer_lr=0.5" in got[2]
    equal([got[0][0], got[1][0]])
