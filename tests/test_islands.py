"""Islands that die, stop, leave and come late, and a launch that goes on without them.

Who is a member must be the same for all: a rank that decides by what it has seen itself, not by
what was written down, shows in the lists of members and sums. A round that is lost with an island,
or an average that still counts it, shows against the simulation without it; a newcomer that lacks
the momentum, the round or a fragment's turn, as islands that are not equal some rounds later; a
wait that is paid twice, in its ratio to the patience. No rank is left running.
"""

import itertools
import os
import signal
import sys
import time

import cloudpickle
import pytest
import torch
from diloco_training import (
    Simulation,
    adamw,
    assert_equal,
    assert_same,
    build,
    inner_step,
    mlp,
    outer,
    weights,
)

from s2s_lib import (
    Cluster,
    DiLoCo,
    Islands,
    Link,
    Mesh,
    RankError,
    ZeRO,
    all_gather,
    all_reduce,
    bill,
    launch,
    recv,
    timeline,
)
from s2s_lib.ranks import connection
from s2s_lib.ranks.islands import LeftBehind
from s2s_lib.ranks.wire import ConnectionLost
from s2s_lib.strategies.diloco import diloco as module
from s2s_lib.strategies.diloco import newcomers

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# A launch that goes on


def test_values_of_those_that_survive_and_what_became_of_the_others():
    def work(world):
        if world.rank == 1:
            raise KeyError("missing")
        if world.rank == 2:
            die()
        if world.rank == 3:
            os._exit(3)
        return world.rank

    zero, raised, killed, left = launch(work, ranks=4, survive=True)
    assert zero == 0
    assert [type(e) for e in (raised, killed, left)] == [RankError] * 3
    assert [e.rank for e in (raised, killed, left)] == [1, 2, 3]
    assert raised.summary == "rank 1 of 4 raised KeyError: 'missing'"
    assert "in work" in str(raised)
    assert killed.summary.startswith("rank 2 of 4 was killed by SIGKILL")
    assert left.summary == "rank 3 of 4 exited with status 3 before its function returned"


def test_who_waits_for_a_rank_that_is_gone_is_told_at_once_and_may_go_on():
    def work(world):
        if world.rank == 1:
            die()
        if world.rank == 2:
            raise ValueError("enough")
        if world.rank == 0:
            # Not a wait of a minute: that would be a WaitTimeout.
            for gone in (1, 2, 3):
                with pytest.raises(ConnectionLost):
                    recv(torch.zeros(1), gone, world)
        return world.rank

    zero, *_, three = launch(work, ranks=4, survive=True)
    assert (zero, three) == (0, 3)


def test_if_all_fail_the_launch_does_too_as_it_does_without_survive_if_one_does():
    def work(world, failing):
        if world.rank in failing:
            raise ValueError(f"rank {world.rank}")
        return world.rank

    with pytest.raises(RankError, match="raised ValueError: rank"):
        launch(work, (0, 1), ranks=2, survive=True)
    with pytest.raises(RankError, match="rank 1 of 2 raised ValueError: rank 1"):
        launch(work, (1,), ranks=2)
    assert launch(work, (), ranks=2, survive=True) == [0, 1]


# Who is a member


def test_what_cannot_be_islands_is_refused():
    def work(world):
        for size in (0, 4, True, 2.0):
            with pytest.raises(ValueError, match=f"size={size!r}: a world of 6.*1, 2, 3, 6 ranks"):
                Islands(world, size)
        with pytest.raises(ValueError, match=r"late=\[1, 3\]: no island 3, there are 0..2"):
            Islands(world, 2, late=[1, 3])
        with pytest.raises(ValueError, match=r"late=\[0, 1\] are all 2 islands"):
            Islands(world, 3, late=[0, 1])
        islands = Islands(world, 2, late=[1])
        assert islands.members == [0, 2] and islands.here == (world.rank not in (2, 3))
        if islands.here:
            assert islands.group.ranks == (world.rank % 2, 4 + world.rank % 2)
            with pytest.raises(ValueError, match="is a member already"):
                islands.join()
        model = build()
        with pytest.raises(ValueError, match="delay=1: .*Islands give delay=0"):
            DiLoCo(model, adamw(model), islands, 2, delay=1)

    launch(work, ranks=6)


def meet(islands, die_at=None):
    """Six times the number of members: sums of ones; a victim dies before or after the first."""

    def work(group):
        if die_at == "before":
            die()
        one = all_reduce(torch.ones(3), group)
        if die_at == "amid":
            die()
        return one.sum().item() + all_reduce(torch.ones(3), group).sum().item()

    return islands.together(work)


@pytest.mark.parametrize("when", ["between", "before", "amid"])
@pytest.mark.parametrize("victims", [[3], [0], [1, 2], [0, 1, 3]])
def test_after_a_death_all_know_the_same_members_and_what_was_under_way_is_done_by_them(
    victims, when
):
    def work(world):
        islands, history = Islands(world, patience=1.0), []
        for number in range(4):
            dying = number == 1 and world.rank in victims
            if dying and when == "between":
                die()
            total = meet(islands, when if dying else None)
            history.append((tuple(islands.members), total))
        return history

    left = tuple(rank for rank in range(4) if rank not in victims)
    want = [((0, 1, 2, 3), 24.0)] + [(left, 6.0 * len(left))] * 3
    for rank, history in enumerate(launch(work, ranks=4, survive=True)):
        if rank in victims:
            assert history.summary.startswith(f"rank {rank} of 4 was killed by SIGKILL")
        else:
            assert history == want


def test_what_one_has_not_got_is_done_again_by_all_though_nobody_died():
    def work(world):
        islands, calls = Islands(world, patience=2.0), []

        def sums(group):
            calls.append(group.size)
            total = all_reduce(torch.ones(1), group).item()
            if world.rank == 1 and len(calls) == 1:
                raise ConnectionLost("the others have the sum, and this one has not")
            return total

        return islands.together(sums), islands.together(sums), calls, islands.members

    want = (3.0, 3.0, [3, 3, 3], [0, 1, 2])
    assert launch(work, ranks=3, survive=True) == [want] * 3


def test_a_death_costs_the_others_at_most_one_patience():
    def work(world, how):
        islands, took = Islands(world, patience=2.0), []
        pids = all_gather(torch.tensor([os.getpid()]), world).tolist()
        for number in range(3):
            began = time.monotonic()
            if number == 1 and world.rank == 2:
                os.kill(os.getpid(), how)
                return None
            meet(islands)
            took.append(time.monotonic() - began)
        if how == signal.SIGSTOP and world.rank == 0:
            os.kill(pids[2], signal.SIGCONT)
        return max(took) / islands.patience

    for how in (signal.SIGKILL, signal.SIGSTOP):
        zero, one, _ = launch(work, how, ranks=3, survive=True)
        assert max(zero, one) < 2


@pytest.mark.parametrize("at_once", [False, True])
def test_leaving_costs_nothing_and_who_left_may_come_back(at_once):
    """Who asks at once may do so before the others look: that it had left must still be there."""

    def work(world):
        islands = Islands(world, patience=40.0)
        began = time.monotonic()
        meet(islands)
        if world.rank == 1:
            islands.leave()
            assert islands.members == [0, 2] and not islands.here
            if not at_once:
                islands.store.wait(["gone on"])
            islands.join()
            assert islands.joined == [1]
        else:
            if at_once:
                islands.store.wait(["asks 1"])
            else:
                assert meet(islands) == 12 and islands.members == [0, 2]
                islands.store.set("gone on", "")
            while not islands.joined:
                meet(islands)
        return islands.members, meet(islands), (time.monotonic() - began) / islands.patience

    for members, total, took in launch(work, ranks=3, survive=True):
        assert members == [0, 1, 2] and total == 18
        assert took < 0.5


def test_who_asks_where_nobody_is_left_is_told():
    def work(world):
        islands = Islands(world, late=[1], wait=0.2)
        if world.rank == 1:
            with pytest.raises(RuntimeError, match="no island has let island 1 in"):
                islands.join()
        return islands.members

    assert launch(work, ranks=2, survive=True) == [[0], [0]]


def test_fewer_islands_than_are_to_go_on_do_not():
    def work(world, least):
        islands = Islands(world, patience=0.5, least=least, wait=0.5)
        if world.rank == 2:
            die()
        try:
            return islands.together(lambda group: group.size)
        except RuntimeError as error:
            return str(error)

    assert launch(work, 2, ranks=3, survive=True)[:2] == [2, 2]
    for said in launch(work, 3, ranks=3, survive=True)[:2]:
        assert "islands [0, 1] are left, and least=3 are to go on" in said


def test_under_torchrun_no_rank_can_survive_another(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="survive=True under torchrun"):
        launch(lambda world: None, survive=True)


# DiLoCo on them


class Training:
    """This rank's island: a model, and a DiLoCo over `Islands`."""

    def __init__(self, world, late=(), patience=1.0, sync_every=2, make=mlp, **options):
        self.islands = Islands(world, late=late, patience=patience)
        self.model = build(make, seed=world.rank)
        self.optimizer = adamw(self.model)
        self.rank, self.taken = world.rank, 0
        self.diloco = DiLoCo(self.model, self.optimizer, self.islands, sync_every, **options)

    def step(self):
        self.taken += 1
        inner_step(self.model, self.optimizer, self.rank, self.taken)

    def rounds(self, count):
        """So many, from where all islands are now."""
        until = self.diloco.rounds + count
        while self.diloco.rounds < until:
            self.step()

    def until_there_are(self, count):
        while len(self.islands.members) != count:
            self.step()

    def state(self):
        """The outer weights are first: live ones differ within a round."""
        momentum = outer(self.diloco, "momentum")
        return outer(self.diloco), momentum, self.diloco.rounds, self.diloco.steps

    def end(self):
        self.diloco.flush()
        return weights(self.model)


def assert_same_states(states):
    for other, momentum, *counts in states:
        assert_equal(other, states[0][0])
        assert_equal(momentum, states[0][1])
        assert counts == list(states[0][2:])
        assert any(tensor.any() for tensor in momentum.values())


def test_if_nothing_happens_islands_are_a_group():
    def work(world):
        training = Training(world)
        training.rounds(2)
        training.step()
        return training.end()

    want = Simulation(3, 2).steps(1, 5).flush().results()[0][0]
    results = launch(work, ranks=3, survive=True)
    for got in results:
        assert_equal(got, results[0])
        assert_same(got, want)


def dies_amid(at):
    """From now on this rank dies in its `at`-th exchange of a DiLoCo."""
    real, calls = module.all_reduce, itertools.count(1)

    def all_reduce(*args, **kwargs):
        if next(calls) == at:
            die()
        return real(*args, **kwargs)

    module.all_reduce = all_reduce


def with_buffer():
    """Two messages to each sync, so that there is something between them."""
    model = mlp()
    model.register_buffer("seen", torch.ones(3))
    return model


@pytest.mark.parametrize("victims", [[2], [0], [1, 3]])
@pytest.mark.parametrize("amid", [False, True])
def test_the_others_take_the_outer_step_that_the_dead_had_no_part_in(victims, amid):
    def work(world):
        training = Training(world, make=with_buffer)
        training.rounds(1)
        if world.rank in victims:
            if amid:
                # After the first of two messages has been averaged by all.
                dies_amid(2)
            else:
                training.step()
                die()
        training.rounds(2)
        return training.end(), training.islands.members

    simulation = Simulation(4, 2, make=with_buffer).steps(1, 2).lose(victims).steps(3, 6)
    want = weights(simulation.models[0])
    left = [rank for rank in range(4) if rank not in victims]
    results = launch(work, ranks=4, survive=True)
    for rank in left:
        got, members = results[rank]
        assert members == left
        assert_equal(got, results[left[0]][0])
        assert_same(got, want, f"rank {rank}")


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"bits": 8, "error_feedback": True}])
def test_a_late_island_gets_all_that_it_needs_to_be_an_equal(options):
    def work(world):
        training = Training(world, late=[1, 2], **options)
        # All see it in the same step, the newcomers when they have been let in.
        training.until_there_are(4)
        at_first = training.state()
        training.rounds(2)
        return at_first, training.end(), training.state()

    results = launch(work, ranks=4, survive=True)
    at_first, ends, states = zip(*results, strict=True)
    assert_same_states(at_first)
    assert at_first[0][2:] != (0, 0)
    assert_same_states(states)
    for end in ends:
        assert_equal(end, ends[0])


def test_an_island_that_was_stopped_is_left_behind_and_comes_back_by_itself():
    def work(world):
        training = Training(world)
        pids = all_gather(torch.tensor([os.getpid()]), world).tolist()
        training.rounds(1)
        if world.rank == 1:
            own = training.optimizer.state[training.model[0].weight]
            os.kill(os.getpid(), signal.SIGSTOP)
            training.rounds(1)
            assert own is not training.optimizer.state.get(training.model[0].weight)
        else:
            training.until_there_are(2)
            if world.rank == 0:
                os.kill(pids[1], signal.SIGCONT)
            training.until_there_are(3)
        came_back = training.state()
        training.rounds(2)
        return came_back, training.end()

    came_back, ends = zip(*launch(work, ranks=3, survive=True), strict=True)
    assert_same_states(came_back)
    for end in ends:
        assert_equal(end, ends[0])


def test_an_island_that_was_stopped_in_the_last_sync_is_told():
    def work(world):
        training = Training(world)
        pids = all_gather(torch.tensor([os.getpid()]), world).tolist()
        training.step()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            with pytest.raises(LeftBehind, match="islands \\[0, 2\\] did not hear from island 1"):
                training.end()
            return None
        end = training.end()
        if world.rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        return end

    zero, one, two = launch(work, ranks=3, survive=True)
    assert one is None
    assert_equal(zero, two)
    want = Simulation(3, 2).steps(1, 1).lose([1]).flush().models[0]
    assert_same(zero, weights(want))


def test_in_gossip_a_death_leaves_the_others_their_round():
    def work(world):
        training = Training(world, gossip=True, make=with_buffer)
        training.rounds(1)
        if world.rank == 1:
            dies_amid(1)
        training.rounds(2)
        return training.diloco.rounds, training.islands.members, training.end()

    zero, _, *others = launch(work, ranks=4, survive=True)
    for rounds, members, end in (zero, *others):
        assert (rounds, members) == (3, [0, 2, 3])
        assert_equal(end, zero[2])


def test_an_island_that_leaves_is_not_waited_for():
    def work(world):
        training = Training(world, patience=40.0)
        training.rounds(1)
        if world.rank == 2:
            training.islands.leave()
            return None
        began = time.monotonic()
        training.rounds(2)
        return training.end(), (time.monotonic() - began) / training.islands.patience

    zero, one, _ = launch(work, ranks=3, survive=True)
    assert_equal(zero[0], one[0])
    assert max(zero[1], one[1]) < 0.5
    simulation = Simulation(3, 2).steps(1, 2).lose([2]).steps(3, 6)
    assert_same(zero[0], weights(simulation.models[0]))


@pytest.mark.parametrize("fragments", [1, 2])
def test_who_asks_while_the_others_flush_is_let_in_in_a_sync_after_that(fragments):
    def work(world):
        training = Training(world, late=[2], sync_every=4, fragments=fragments)
        if world.rank != 2:
            # One step, after which nothing is due.
            training.step()
            training.islands.store.wait(["asks 2"])
            training.end()
            training.until_there_are(3)
        state = training.state()
        training.rounds(2)
        return state, training.end()

    states, ends = zip(*launch(work, ranks=3, survive=True), strict=True)
    assert_same_states(states)
    for end in ends:
        assert_equal(end, ends[0])


def test_one_with_another_model_or_other_options_is_refused_and_the_others_go_on():
    def work(world):
        if world.rank == 2:
            Training(world, late=[2, 3], make=lambda: torch.nn.Linear(7, 3))
        if world.rank == 3:
            Training(world, late=[2, 3], outer_lr=0.5)
        training = Training(world, late=[2, 3])
        connection.current().store("order").set("begun", "")
        training.rounds(3)
        return training.end(), training.islands.members

    # The first to come decides what is trained.
    def in_order(world):
        if world.rank > 1:
            connection.current().store("order").wait(["begun"])
        return work(world)

    zero, one, model, options = launch(in_order, ranks=4, survive=True)
    assert zero[1] == one[1] == [0, 1]
    assert_equal(zero[0], one[0])
    assert "island 2 cannot take part" in model.summary
    assert "0.weight (13, 7) float64" in model.summary and "'weight (3, 7)" in model.summary
    assert "the first that came has" in model.summary
    assert "outer_lr=0.7" in options.summary and "outer_lr=0.5" in options.summary


@pytest.mark.parametrize("victim", [0, 3])
def test_a_death_while_a_newcomer_is_let_in_stops_nobody(victim):
    """Of the newcomer, 3, or of who sends to it, 0."""

    def work(world):
        store = connection.current().store("islands")

        def broadcast(*_):
            store.set("dead", "")
            die()

        if world.rank == victim:
            newcomers.broadcast = broadcast
        training = Training(world, late=[3])
        # It is let in by all in one step, and nobody goes on before it is dead.
        while not store.check(["dead"]):
            training.step()
        state = training.state()
        training.rounds(2)
        return state, training.end(), training.islands.members

    results = launch(work, ranks=4, survive=True)
    left = [rank for rank in range(4) if rank != victim]
    states, ends, members = zip(*(results[rank] for rank in left), strict=True)
    assert_same_states(states)
    assert members == (left,) * 3
    for end in ends:
        assert_equal(end, ends[0])


def zero_inside(world, killed):
    islands = Islands(world, 2, patience=1.5)
    mesh = Mesh(world, island=3, shard=2)
    torch.manual_seed(world.rank)
    model = ZeRO(mlp().double(), mesh["shard"], 3)
    optimizer = adamw(model)
    diloco = DiLoCo(model, optimizer, islands, 2)
    for step in range(1, 9):
        if world.rank == killed and step == 4:
            die()
        inner_step(model, optimizer, world.rank // 2, step)
    diloco.flush()
    return model.full_state_dict(), islands.members


@pytest.mark.parametrize("killed", [1, 2])
def test_of_an_island_of_two_ranks_one_dies_and_the_others_go_on(killed):
    results = launch(zero_inside, killed, ranks=6, survive=True)
    gone = killed // 2
    left = [number for number in range(3) if number != gone]
    want = weights(Simulation(3, 2).steps(1, 2).lose([gone]).steps(3, 8).models[0])
    for rank, result in enumerate(results):
        if rank // 2 == gone:
            assert isinstance(result, RankError)
        else:
            assert result[1] == left
            assert_same(dict(result[0]), want, f"rank {rank}")


# What listens and what slows goes on after a new connection


def test_bills_timelines_and_emulated_links_go_on_after_a_new_connection():
    latency = 0.02

    def work(world):
        islands = Islands(world, patience=1.5)
        with bill() as sent, timeline() as line:
            meet(islands)
            before = sent.bytes, len(line.operations)
            if world.rank == 2:
                die()
            meet(islands)
            again = sent.bytes
            began = time.monotonic()
            meet(islands)
            took = time.monotonic() - began
        return before, sent.bytes - again, len(line.operations), took, sent.by("link")

    cluster = Cluster(3, 1, inter=Link(1, latency * 1e6))
    zero, one, _ = launch(work, ranks=3, cluster=cluster, survive=True)
    for before, sent, operations, took, by_link in (zero, one):
        assert before[0] > 0 and sent > 0 and operations > before[1]
        assert by_link.keys() == {"inter"}
        # Two sums between a pair, an exchange each: no faster than the links.
        assert took >= 2 * latency
