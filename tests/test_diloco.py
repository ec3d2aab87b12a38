"""DiLoCo against all islands held in one process, and against numbers worked by hand.

A wrong sign of the pseudo-gradient, a momentum that is forgotten or a Nesterov step that is none
shows in the worked numbers; a sync too many or too few, a fragment at another step, a delay off by
one or shares that are swapped in mixing, in the simulation (diloco_training.py). Outer weights that
share memory with live ones, and a failed exchange that leaves half a step, show where the run with
a failure must end like the one without; tensors that are skipped or touched, among those that
carry another value on each island; bytes too many, on the bill.
"""

import contextlib
import copy
import itertools
import math
import warnings
from fractions import Fraction

import pytest
import torch
from diloco_training import (
    CLOSE,
    adamw,
    assert_equal,
    assert_same,
    batch,
    build,
    inner_step,
    mlp,
    outer,
    run,
    sgd,
    simulate,
    weights,
)
from torch import nn

from s2s_lib import DDP, Cluster, DiLoCo, Link, Mesh, ZeRO, bill, launch, timeline
from s2s_lib.collectives.codes import Codes
from s2s_lib.strategies.diloco import diloco as module
from s2s_lib.strategies.diloco.fragment import cut
from s2s_lib.strategies.diloco.gossip import pairs

LOCAL = {"outer_lr": 1.0, "outer_momentum": 0.0}


class Number(nn.Module):
    def __init__(self, value=0.0, dtype=torch.float64):
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value], dtype=dtype))


def assert_all_equal(results):
    for island, result in enumerate(results[1:], start=1):
        assert_equal(result, results[0], f"island {island}")


# The arithmetic


def test_the_worked_numbers():
    """Islands at 8 and 6 after starting at 10: the mean has moved by 3."""

    def work(world, ends, options):
        model = Number(10.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        diloco = DiLoCo(model, optimizer, world, sync_every=1, **options)
        for end in ends[world.rank]:
            model.value.grad = model.value.detach() - end
            optimizer.step()
        diloco.flush()
        return model.value.item()

    once = ([8.0], [6.0])
    assert launch(work, once, LOCAL, ranks=2) == [7.0] * 2
    for got in launch(work, once, LOCAL | {"outer_lr": 0.7}, ranks=2):
        assert got == pytest.approx(7.9, abs=1e-12)
    for got in launch(work, once, {}, ranks=2):
        assert got == pytest.approx(6.01, abs=1e-12)
    twice = ([8.0, 6.01 - 2], [6.0, 6.01 - 4])
    for got in launch(work, twice, {}, ranks=2):
        assert got == pytest.approx(0.319, abs=1e-12)


OUTER_STEPS = [
    {},
    {"nesterov": False},
    {"outer_momentum": 0.0},
    {"outer_lr": 1.3, "outer_momentum": 0.4, "nesterov": False},
    {"outer_lr": 1.0, "outer_momentum": 0.5},
]


@pytest.mark.parametrize("size", [2, 3])
def test_rounds_are_those_of_torchs_sgd_as_the_outer_optimizer(size):
    def work(world):
        return [run(world, 8, 3, **options) for options in OUTER_STEPS]

    results = launch(work, ranks=size)
    for options, *islands in zip(OUTER_STEPS, *results, strict=True):
        for island, (got, want) in enumerate(
            zip(islands, simulate(size, 8, 3, **options), strict=True)
        ):
            for what, mine, theirs in zip(("live", "outer", "momentum"), got, want, strict=True):
                assert_same(mine, theirs, f"{options}, island {island}, {what}")


def test_one_island_takes_an_outer_step_as_lookahead_does_and_is_told():
    def work(world):
        with pytest.warns(UserWarning, match="over one island sends nothing.*Lookahead"):
            DiLoCo(model := build(), adamw(model), world, 2)
        with warnings.catch_warnings(), bill() as sent:
            warnings.simplefilter("ignore")
            return [run(world, 6, 2, **options)[0] for options in OUTER_STEPS], sent.bytes

    results, sent = launch(work, ranks=1)[0]
    assert sent == 0
    for options, got in zip(OUTER_STEPS, results, strict=True):
        # Lookahead: slow += outer_lr * (fast - slow) is momentum 0.
        ((want, *_),) = simulate(1, 6, 2, **options)
        assert_same(got, want, str(options))


def test_a_sync_after_each_sgd_step_without_momentum_is_data_parallelism():
    def by_ddp(world):
        model = DDP(build(), world)
        optimizer = sgd(model)
        for step in range(1, 5):
            inner_step(model, optimizer, world.rank, step)
        return {n.removeprefix("module."): p for n, p in weights(model).items()}

    def work(world):
        return run(world, 4, 1, inner=sgd, **LOCAL)[0], by_ddp(world)

    model = build()
    optimizer = sgd(model)
    for step in range(1, 5):
        x, y = map(torch.cat, zip(*(batch(island, step) for island in range(3)), strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for islands, ddp in launch(work, ranks=3):
        assert_same(islands, weights(model), "one process")
        assert_same(islands, ddp, "DDP")


def test_post_local_sgd_averages_after_each_step_and_then_after_every_fourth():
    def work(world):
        model = build()
        optimizer = sgd(model)
        diloco = DiLoCo(model, optimizer, world, 1, **LOCAL)
        sent = []
        for step in range(1, 13):
            if step == 3:
                diloco.sync_every = 4
            with bill() as b:
                inner_step(model, optimizer, world.rank, step)
            sent.append(b.bytes > 0)
        with pytest.raises(RuntimeError, match="and 2 steps of one of 4.*flush"):
            diloco.sync_every = 2
        with pytest.raises(ValueError, match="sync_every=0"):
            diloco.sync_every = 0
        diloco.flush()
        return weights(model), sent

    models = [build() for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    for step in range(1, 13):
        for island, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inner_step(model, optimizer, island, step)
        if step in (1, 2, 6, 10, 12):
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack([p.detach() for p in same]).mean(0)
                    for parameter in same:
                        parameter.copy_(mean)
    for got, sent in launch(work, ranks=2):
        assert_same(got, weights(models[0]))
        assert [step for step, s in enumerate(sent, start=1) if s] == [1, 2, 6, 10]


# When there is a sync, and when not


def test_as_many_syncs_as_there_are_full_rounds_and_a_flush_for_the_rest():
    def work(world):
        model = build(seed=world.rank)
        optimizer = adamw(model)
        syncs, rounds = [], []
        with DiLoCo(model, optimizer, world, 3) as diloco:
            for step in range(1, 9):
                with bill() as sent:
                    inner_step(model, optimizer, world.rank, step)
                if sent.bytes:
                    syncs.append(step)
                rounds.append(diloco.rounds)
            before = weights(model)
        after = weights(model)
        with bill() as again:
            diloco.flush()
            inner_step(model, optimizer, world.rank, 9)
            inner_step(model, optimizer, world.rank, 10)
            inner_step(model, optimizer, world.rank, 11)
        assert diloco.rounds == 3
        return syncs, rounds, again.bytes, before, after

    results = launch(work, ranks=3)
    for syncs, rounds, again, _, _ in results:
        assert syncs == [3, 6]
        assert rounds == [0, 0, 1, 1, 1, 2, 2, 2]
        assert again == 0
    befores, afters = zip(*(result[3:] for result in results), strict=True)
    assert not torch.equal(befores[0]["0.weight"], befores[1]["0.weight"])
    assert_all_equal(afters)


def state(model, diloco):
    return weights(model), outer(diloco), outer(diloco, "momentum")


def assert_same_state(got, want, what=""):
    for mine, theirs in zip(got, want, strict=True):
        assert_equal(mine, theirs, what)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fragments": 3},
        {"delay": 2},
        {"delay": 2, "mixing": 0.5},
        {"bits": 8},
        {"gossip": True},
    ],
)
def test_a_second_flush_sends_and_changes_nothing(options):
    def work(world):
        # A full round, a round and one step, which is within the delay, and one and a half rounds.
        for steps in (6, 7, 9):
            model = build()
            optimizer = adamw(model)
            diloco = DiLoCo(model, optimizer, world, 6, **options)
            for step in range(1, steps + 1):
                inner_step(model, optimizer, world.rank, step)
            diloco.flush()
            before = state(model, diloco)
            with bill() as sent:
                diloco.flush()
            assert sent.bytes == 0, steps
            assert_same_state(state(model, diloco), before, steps)
        return weights(model)

    assert_all_equal(launch(work, ranks=2))


def test_after_a_failed_with_nothing_is_synced_and_the_optimizer_is_let_go():
    def work(world):
        model = build()
        optimizer = adamw(model)
        diloco = DiLoCo(model, optimizer, world, 2)
        with bill() as sent:
            with pytest.raises(ZeroDivisionError), diloco:
                inner_step(model, optimizer, world.rank, 1)
                1 / 0  # noqa: B018
            for step in range(2, 5):
                inner_step(model, optimizer, world.rank, step)
        return sent.bytes, weights(model)

    (sent, zero), (_, one) = launch(work, ranks=2)
    assert sent == 0
    assert not torch.equal(zero["0.weight"], one["0.weight"])


# What becomes of the inner optimizer's moments


def moments(optimizer, model):
    return {
        f"{name} {key}": optimizer.state[p][key].clone()
        for name, p in model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
        if p in optimizer.state
    }


def test_moments_are_kept_averaged_or_forgotten():
    def work(world, policy):
        model = build()
        optimizer = adamw(model)
        diloco = DiLoCo(model, optimizer, world, 5, moments=policy)
        for step in range(1, 5):
            inner_step(model, optimizer, world.rank, step)
        before = moments(optimizer, model)
        with bill() as sent:
            diloco.flush()
        after = moments(optimizer, model)
        assert all(own["step"] == 4 for own in optimizer.state.values())
        # And a step can be taken.
        inner_step(model, optimizer, world.rank, 5)
        return before, after, sent.by("collective")["all_reduce"]

    nbytes = sum(p.nbytes for p in build().parameters())
    kept = launch(work, "keep", ranks=2)
    for before, after, _ in kept:
        assert_equal(after, before)
    assert not torch.equal(kept[0][1]["0.weight exp_avg"], kept[1][1]["0.weight exp_avg"])
    averaged = launch(work, "average", ranks=2)
    for name, mine in averaged[0][0].items():
        mean = (mine + averaged[1][0][name]) / 2
        for _, after, _ in averaged:
            torch.testing.assert_close(after[name], mean, **CLOSE, msg=name)
    assert sum(sent for *_, sent in averaged) == 3 * 2 * nbytes
    for _, after, _ in launch(work, "reset", ranks=2):
        assert after == {}


def test_moments_of_a_single_number_are_averaged_too():
    def work(world):
        model = nn.Module()
        model.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        optimizer = torch.optim.AdamW(model.parameters())
        diloco = DiLoCo(model, optimizer, world, 2, moments="average")
        model.scale.grad = torch.tensor(1.0 + world.rank, dtype=torch.float64)
        optimizer.step()
        diloco.flush()
        own = optimizer.state[model.scale]
        return own["exp_avg"].item(), own["step"].item()

    for average, steps in launch(work, ranks=2):
        assert (average, steps) == (pytest.approx(0.15, abs=1e-12), 1)


# What is synced


class Zoo(nn.Module):
    """Each kind of tensor that a module may hold."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.used = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.unused = nn.Parameter(torch.ones(3))
        self.tied = self.used.weight
        # Its columns lie together in memory.
        self.strided = nn.Parameter(torch.randn(4, 5).t())
        self.short = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))

    def forward(self, x):
        y = self.norm(self.used(self.frozen(x))) @ self.strided
        return y.sum(1) + (self.short.float() ** 2).sum() + (x @ self.tied.t()).sum(1)


TRAINED = ["tied", "used.bias", "norm.weight", "norm.bias", "unused", "strided", "short"]
AVERAGED = ["norm.running_mean", "norm.running_var"]


def train_zoo(world):
    """The state before, at the end of the inner steps and after the flush; the bytes of that; the
    names in each row of outer weights."""
    torch.manual_seed(0)
    model = Zoo()
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, rest = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    optimizer = torch.optim.SGD([{"params": matrices, "lr": 0.1}, {"params": rest, "lr": 0.01}])
    diloco = DiLoCo(model, optimizer, world, 100)
    states = [copy.deepcopy(model.state_dict())]
    random = torch.Generator().manual_seed(world.rank)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=random)).square().mean().backward()
        optimizer.step()
    assert model.unused.grad is None
    with torch.no_grad():
        # What no optimizer has done.
        for tensor in (model.unused, model.frozen.bias, model.norm.num_batches_tracked):
            tensor += world.rank
    states.append(copy.deepcopy(model.state_dict()))
    strides = model.strided.stride()
    with bill() as sent:
        diloco.flush()
    assert model.strided.stride() == strides and model.tied is model.used.weight
    states.append(copy.deepcopy(model.state_dict()))
    return states, sent.bytes, [(row.dtype, row.names) for row in diloco.rows]


def test_each_kind_of_tensor_is_synced_or_left_as_the_docstring_says():
    results = launch(train_zoo, ranks=2)
    (_, zero, _), (_, one, _) = (states for states, *_ in results)
    for (start, end, after), _, rows in results:
        assert sorted(rows[0][1] + rows[1][1]) == sorted(TRAINED)
        assert [dtype for dtype, _ in rows] == [torch.float32] * 2
        for name in after:
            mean = (zero[name].float() + one[name].float()) / 2
            if name in (*TRAINED, "used.weight"):
                want = start[name].float() - 0.7 * 1.9 * (start[name].float() - mean)
                want = want.to(after[name].dtype)
                torch.testing.assert_close(after[name], want, msg=name)
            elif name in AVERAGED:
                torch.testing.assert_close(after[name], mean, msg=name)
            else:
                assert torch.equal(after[name], end[name]), name
    # Numbers of 16 bits travel as 32, the tied weight once, and two buffers of five numbers.
    numbers = 15 + 5 + 5 + 5 + 3 + 20 + 3 + 10
    assert sum(sent for _, sent, _ in results) == 2 * 4 * numbers


def test_sixteen_bit_weights_have_outer_ones_of_32_bits_that_remember_small_moves():
    """An outer step here is a sixteenth of what bfloat16 can tell apart: rounded to that each time,
    the weight would stay where it is."""

    def work(world):
        model = Number(1.0, torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        how = {"outer_lr": 0.0625, "outer_momentum": 0.0}
        diloco = DiLoCo(model, optimizer, world, 1, **how)
        for _ in range(40):
            model.value.grad = torch.full_like(model.value, 2.0**-7)
            optimizer.step()
        return model.value.item(), outer(diloco)["value"].dtype

    for value, dtype in launch(work, ranks=2):
        assert dtype is torch.float32
        assert value < 1


# Failures


class TwoDtypes(nn.Module):
    """Two rows, so that of two messages the first may have arrived when the second fails."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(7, 3), nn.Linear(7, 3)

    def double(self):
        self.wide.double()
        return self

    def forward(self, x):
        return self.wide(x) + self.narrow(x.float())


@contextlib.contextmanager
def failing(at, name="all_reduce"):
    """Inside, exchange number `at` ends in an error on this rank."""
    real, calls = getattr(module, name), itertools.count()

    def exchange(*args, **kwargs):
        if next(calls) == at:
            raise ArithmeticError("lost on the way")
        return real(*args, **kwargs)

    setattr(module, name, exchange)
    try:
        yield
    finally:
        setattr(module, name, real)


def trainer(world, sync_every, **options):
    """A model, its DiLoCo, a function that takes steps, and the weights after each inner step."""
    model, lives = build(TwoDtypes), []
    optimizer = adamw(model)
    optimizer.register_step_post_hook(lambda *_: lives.append(weights(model)))
    diloco = DiLoCo(model, optimizer, world, sync_every, **options)

    def steps(first, last):
        for step in range(first, last + 1):
            inner_step(model, optimizer, world.rank, step)

    return model, diloco, steps, lives


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("at", [0, 1])
def test_a_failed_exchange_changes_nothing_and_a_flush_makes_up_for_it(at, delay):
    def work(world):
        # A whole round before, so that there is a momentum.
        model, diloco, steps, lives = trainer(world, 2, delay=delay)
        steps(1, 2)
        diloco.flush()
        before = state(model, diloco)
        with failing(at):
            steps(3, 3 + delay)
            with pytest.raises(ArithmeticError):
                steps(4 + delay, 4 + delay)
        assert_same_state(state(model, diloco), (lives[-1], *before[1:]))
        diloco.flush()
        other, undisturbed, steps, _ = trainer(world, 2)
        steps(1, 2)
        undisturbed.sync_every = 100
        steps(3, 4 + delay)
        undisturbed.flush()
        assert_same_state(state(model, diloco), state(other, undisturbed))
        return weights(model)

    assert_all_equal(launch(work, ranks=2))


@pytest.mark.parametrize("fragments", [1, 2])
def test_after_a_failed_exchange_the_next_sync_sends_what_it_would_have_too(fragments):
    def work(world):
        model, diloco, steps, _ = trainer(world, 2, fragments=fragments)
        steps(1, 1)
        with failing(0), pytest.raises(ArithmeticError):
            steps(2, 2)
        sent = []
        for step in (3, 4):
            with bill() as b:
                steps(step, step)
            sent.append(b.bytes > 0)
        if fragments == 1:
            other, _, steps, _ = trainer(world, 4)
            steps(1, 4)
            assert_equal(weights(model), weights(other))
        return sent, diloco.rounds

    assert launch(work, ranks=2) == [([fragments == 2, True], 2)] * 2


def test_outer_weights_share_no_memory_with_live_ones():
    def work(world):
        model, diloco, steps, _ = trainer(world, 2)
        for _ in range(2):
            live = {p.untyped_storage().data_ptr() for p in model.parameters()}
            for row in diloco.rows:
                apart = {t.untyped_storage().data_ptr() for t in (row.outer, row.momentum)}
                assert len(apart) == 2 and not apart & live
            steps(1, 2)
        return True

    assert launch(work, ranks=2) == [True] * 2


# Streaming


STREAMS = [
    {"fragments": 2},
    {"fragments": 3},
    {"fragments": 1, "delay": 2},
    {"fragments": 3, "delay": 1, "mixing": 0.5},
    # Two fragments are on their way at once.
    {"fragments": 3, "delay": 3, "mixing": 0.25, "nesterov": False},
    {"fragments": 2, "delay": 5},
]


def names_of(fragments):
    return [[name for name, _ in part] for part in cut(list(mlp().named_parameters()), fragments)]


@pytest.mark.parametrize("steps", [12, 13, 16])
def test_streaming_takes_the_steps_of_the_simulation(steps):
    def work(world):
        return [run(world, steps, 6, flush=flush, **o) for o in STREAMS for flush in (False, True)]

    results = iter(zip(*launch(work, ranks=2), strict=True))
    for options in STREAMS:
        streams = dict(options)
        streams["parts"] = names_of(streams.pop("fragments"))
        for flush in (False, True):
            wants = simulate(2, steps, 6, flush=flush, **streams)
            for island, (got, want) in enumerate(zip(next(results), wants, strict=True)):
                for what, mine, theirs in zip(("live", "outer"), got, want, strict=False):
                    where = f"{options}, flush {flush}, island {island}, {what}"
                    assert_same(mine, {name: theirs[name] for name in mine}, where)


def test_fragments_are_runs_of_the_parameters_of_about_equal_size():
    named = list(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).named_parameters())
    for count in (1, 2, 3, 6):
        parts = cut(named, count)
        assert [p for part in parts for p in part] == named
        assert [sum(p.numel() for _, p in part) for part in parts] == [120 // count] * count


def test_each_fragment_is_sent_once_in_a_round_and_less_at_a_time():
    def work(world):
        counts = []
        for fragments in (1, 2, 3):
            model = build()
            optimizer = adamw(model)
            DiLoCo(model, optimizer, world, 6, fragments=fragments)
            for step in range(1, 13):
                with bill() as sent:
                    inner_step(model, optimizer, world.rank, step)
                counts.append(sent.bytes)
        return counts

    both = list(map(sum, zip(*launch(work, ranks=2), strict=True)))
    size = {name: p.nbytes for name, p in build().named_parameters()}
    peaks = []
    for fragments in (1, 2, 3):
        sent, both = both[:12], both[12:]
        sizes = [sum(size[name] for name in part) for part in names_of(fragments)]
        want = [0] * 12
        for number, nbytes in enumerate(sizes, start=1):
            want[6 // fragments * number - 1] = want[6 // fragments * number + 5] = 2 * nbytes
        assert sent == want
        assert sum(sent) == 2 * 2 * sum(size.values())
        peaks.append(max(sent))
    assert peaks[2] < peaks[0] and peaks[1] < peaks[0]


def test_with_a_delay_a_slow_exchange_lies_behind_inner_steps():
    def work(world, delay):
        model = build()
        optimizer = adamw(model)
        diloco = DiLoCo(model, optimizer, world, 2, delay=delay)
        with timeline() as line, bill() as sent:
            for step in range(1, 4):
                with line.section(f"step {step}"):
                    optimizer.zero_grad()
                    x, y = batch(world.rank, step)
                    nn.functional.mse_loss(model(x), y).backward()
                    while step == 3 and not sent.messages:
                        # As long as it takes the other thread to begin.
                        nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        diloco.flush()
        return line

    cluster = Cluster(2, 1, inter=Link(1, 20_000))
    for line in launch(work, 1, ranks=2, cluster=cluster):
        exchange = [span for span in line.operations if span.track]
        assert exchange and not [span for span in line.operations if not span.track]
        begin, end = min(s.start for s in exchange), max(s.end for s in exchange)
        behind = [s.name for s in line.sections if s.start < end and begin < s.end]
        assert behind == ["step 3"]
    for line in launch(work, 0, ranks=2, cluster=cluster):
        assert line.tracks() == [0]


# Whole numbers on the wire


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_leave_all_islands_equal_near_the_exact_run_and_send_the_stated_bytes(bits):
    def work(world):
        model = build()
        optimizer = adamw(model)
        DiLoCo(model, optimizer, world, 3, bits=bits)
        sent, after = [], []
        for step in range(1, 7):
            with bill() as b:
                inner_step(model, optimizer, world.rank, step)
            sent.append(b.bytes)
            if step % 3 == 0:
                after.append(weights(model))
        return sent, after

    results = launch(work, ranks=3)
    for islands in zip(*(after for _, after in results), strict=True):
        assert_all_equal(islands)
    (exact, *_), *_ = simulate(3, 6, 3)
    start, got = weights(build()), results[0][1][-1]
    apart = max((got[name] - exact[name]).abs().max() for name in exact)
    moved = max((start[name] - exact[name]).abs().max() for name in exact)
    assert 0 < apart < moved / (50 if bits == 8 else 2)
    numel = sum(p.numel() for p in mlp().parameters())
    cuts = [numel * place // 3 for place in range(4)]
    pieces = [Codes(bits, torch.float64).nbytes(b - a) for a, b in itertools.pairwise(cuts)]
    for rank, (sent, _) in enumerate(results):
        own = 2 * sum(pieces) - pieces[rank] - pieces[(rank + 1) % 3]
        assert sent == [0, 0, own] * 2


def test_error_feedback_comes_closer_over_many_rounds():
    """Moves of very different sizes, the same in each round: without feedback the small ones are
    rounded to nothing for ever."""

    def run_with(world, **options):
        model = nn.Module()
        model.value = nn.Parameter(torch.zeros(256, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, optimizer, world, 1, **LOCAL, **options):
            for _ in range(40):
                model.value.grad = torch.logspace(-2, 0, 256, dtype=torch.float64)
                optimizer.step()
        return model.value.detach()

    def work(world):
        feedback = {"bits": 4, "error_feedback": True}
        return [run_with(world, **options) for options in ({}, {"bits": 4}, feedback)]

    results = launch(work, ranks=2)
    assert all(map(torch.equal, *results))
    exact, without, fed_back = results[0]
    assert (fed_back - exact).abs().max() < (without - exact).abs().max() / 5


def test_a_failed_exchange_leaves_what_rounding_has_left_out():
    def work(world):
        _, diloco, steps, _ = trainer(world, 2, bits=4, error_feedback=True)
        steps(1, 2)
        before = [row.residual.clone() for row in diloco.rows]
        assert all(residual.any() for residual in before)
        with failing(1, "quantised_all_reduce"), pytest.raises(ArithmeticError):
            steps(3, 4)
        return all(map(torch.equal, before, [row.residual for row in diloco.rows]))

    assert launch(work, ranks=2) == [True] * 2


# Bytes


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_sends_its_share_of_the_parameters_once_in_a_round(size):
    def work(world):
        counts = []
        for numel in (24, 23):
            model = nn.Module()
            model.value = nn.Parameter(torch.zeros(numel, dtype=torch.float64))
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            DiLoCo(model, optimizer, world, 3)
            with bill() as sent:
                for _ in range(9):
                    model.value.grad = torch.ones_like(model.value)
                    optimizer.step()
            counts.append(sent.bytes)
        return counts

    results = launch(work, ranks=size)
    assert [even for even, _ in results] == [3 * 2 * (size - 1) * 24 * 8 // size] * size
    assert sum(odd for _, odd in results) == 3 * 2 * (size - 1) * 23 * 8
    for rank, (_, odd) in enumerate(results):
        mine = 23 * (rank + 1) // size - 23 * rank // size
        assert odd == 3 * (23 + (size - 2) * mine) * 8


# Gossip


def test_pairs_are_a_matching_drawn_anew_each_time_and_every_one_comes_up():
    for size in (2, 3, 4, 5, 6):
        drawn = [pairs(size, seed=1, number=number) for number in range(200)]
        for found in drawn:
            places = [place for pair in found for place in pair]
            assert len(found) == size // 2 and len(set(places)) == 2 * len(found)
            assert set(places) <= set(range(size))
        ways = math.prod(range(size - 1 + size % 2, 0, -2))
        assert len(set(map(frozenset, drawn))) == ways, size
        # Nothing but seed and number decides.
        assert drawn == [pairs(size, seed=1, number=number) for number in range(200)]
        assert size == 2 or drawn != [pairs(size, seed=2, number=number) for number in range(200)]


def test_a_meeting_leaves_a_third_of_the_variance_of_four_on_average():
    before = [Fraction(w) for w in (3, -1, 10, 5)]
    ways = {frozenset(pairs(4, 0, number)) for number in range(100)}
    assert len(ways) == 3

    def variance(values):
        mean = sum(values) / len(values)
        return sum((v - mean) ** 2 for v in values) / len(values)

    left = []
    for way in ways:
        met = list(before)
        for one, other in way:
            met[one] = met[other] = (before[one] + before[other]) / 2
        left.append(variance(met))
    assert sum(left) / 3 == variance(before) / 3


def gossiping(world):
    """For each step the weights before and after what DiLoCo did, and the bytes sent; the weights
    after the flush."""
    model, history = build(), []
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: history.append(weights(model)))
    diloco = DiLoCo(model, optimizer, world, 2, **LOCAL, gossip=True, seed=3)
    for step in range(1, 7):
        with bill() as sent:
            inner_step(model, optimizer, world.rank, step)
        history[-1] = history[-1], weights(model), sent.bytes
    diloco.flush()
    return history, weights(model)


@pytest.mark.parametrize("size", [3, 4])
def test_islands_meet_in_pairs_keep_their_mean_and_are_equal_after_a_flush(size):
    nbytes = sum(p.nbytes for p in build().parameters())
    results = launch(gossiping, ranks=size)
    for step in range(6):
        before, after, sent = zip(*(history[step] for history, _ in results), strict=True)
        met = pairs(size, 3, step // 2) if step % 2 else []
        partner = dict(met) | {other: one for one, other in met}
        for island in range(size):
            other = before[partner.get(island, island)]
            want = {name: (w + other[name]) / 2 for name, w in before[island].items()}
            assert_same(after[island], want, f"step {step}, island {island}")
            assert sent[island] == (0 if island not in partner else pytest.approx(nbytes, abs=8))
        assert sum(sent) == 2 * len(met) * nbytes
        assert_same(mean_of(after), mean_of(before))
    ends = [end for _, end in results]
    assert_all_equal(ends)
    assert_same(ends[0], mean_of(after))


def mean_of(islands):
    return {name: torch.stack([w[name] for w in islands]).mean(0) for name in islands[0]}


def test_in_gossip_each_island_first_takes_an_outer_step_of_its_own():
    def work(world):
        return run(world, 4, 2, flush=False, gossip=True)[0]

    # Two islands always meet.
    models = [build() for _ in range(2)]
    optimizers = [adamw(model) for model in models]
    slow = [[nn.Parameter(p.detach().clone()) for p in model.parameters()] for model in models]
    sgds = [torch.optim.SGD(own, 0.7, 0.9, nesterov=True) for own in slow]
    for first in (1, 3):
        for island, model in enumerate(models):
            for step in (first, first + 1):
                inner_step(model, optimizers[island], island, step)
            for parameter, live in zip(slow[island], model.parameters(), strict=True):
                parameter.grad = parameter.detach() - live.detach()
            sgds[island].step()
        with torch.no_grad():
            for same in zip(*slow, *(model.parameters() for model in models), strict=True):
                mean = (same[0] + same[1]) / 2
                for tensor in same:
                    tensor.copy_(mean)
    for got in launch(work, ranks=2):
        assert_same(got, weights(models[0]))


# What is refused


def refused(world, error, words, model=None, sync_every=6, **options):
    with pytest.raises(error) as caught:
        DiLoCo(model or build(), adamw(build()), world, sync_every, **options)
    for word in words:
        assert word in str(caught.value), f"{options}: {word!r} is not in {caught.value}"


def test_options_that_cannot_be_are_refused_with_their_numbers():
    def work(world):
        for value in (0, -1, True, 2.5, "3", None):
            refused(world, ValueError, [f"sync_every={value!r}", "at least 1"], sync_every=value)
        for every, words in {5: "3 or 6", 2: ": 3 steps", 7: "6 or 9"}.items():
            words = [f"sync_every={every}", "fragments=3", words]
            refused(world, ValueError, words, sync_every=every, fragments=3)
        for value in (0, -2, True, 1.5):
            refused(world, ValueError, [f"fragments={value!r}", "at least 1"], fragments=value)
        for value in (-1, True, 1.5):
            refused(world, ValueError, [f"delay={value!r}", "at least 0"], delay=value)
        for value in (6, 9):
            refused(world, ValueError, [f"delay={value}", "sync_every=6", "at most 5"], delay=value)
        refused(world, ValueError, ["mixing=0.5", "delay=0"], mixing=0.5)
        for value in (-0.1, 1, True, "x", float("nan")):
            refused(world, ValueError, [f"mixing={value!r}", "below 1"], mixing=value, delay=1)
            refused(world, ValueError, [f"outer_momentum={value!r}"], outer_momentum=value)
        for value in (0, -1, True, float("inf"), float("nan"), "1"):
            refused(world, ValueError, [f"outer_lr={value!r}", "above 0"], outer_lr=value)
        for value in (3, 16, True, 0):
            refused(world, ValueError, [f"bits={value!r}", "8, 4"], bits=value)
        refused(world, ValueError, ["error_feedback=True", "bits=8 or 4"], error_feedback=True)
        refused(world, ValueError, ["moments='mean'", "keep, average, reset"], moments="mean")
        refused(world, ValueError, ["nesterov=1"], nesterov=1)
        refused(world, ValueError, ["gossip", "delay=2", "bits=None"], gossip=True, delay=2)
        refused(world, ValueError, ["gossip", "delay=0", "bits=8"], gossip=True, bits=8)
        refused(world, ValueError, ["seed=-1", "at least 0"], seed=-1)
        refused(world, TypeError, ["torch.nn.Module", "got 3"], model=3)
        refused(None, TypeError, ["expected a Group, got None"])

    launch(work, ranks=2)


def test_an_optimizer_of_other_or_fewer_parameters_is_refused():
    def work(world):
        model = build()
        with pytest.raises(ValueError, match=r"shape \(13, 7\) that is not this model's"):
            DiLoCo(model, adamw(build()), world, 2)
        fewer = torch.optim.SGD(list(model.parameters())[:-1], lr=0.1)
        with pytest.raises(ValueError, match="4.bias requires a gradient and the inner optimizer"):
            DiLoCo(model, fewer, world, 2)
        with pytest.raises(TypeError, match="torch.optim.Optimizer, got"):
            DiLoCo(model, model.parameters(), world, 2)
        model[4].bias.requires_grad_(False)
        DiLoCo(model, fewer, world, 2)

    launch(work, ranks=2)


def test_islands_that_disagree_are_refused_on_all_of_them():
    def work(world):
        with pytest.raises(ValueError, match="rank 0.*rank 1"):
            model = nn.Linear(3, 4 + world.rank)
            DiLoCo(model, adamw(model), world, 2)
        model = build()
        different = [
            {"sync_every": 2 + world.rank},
            {"outer_lr": 0.7 + 0.1 * world.rank},
            {"moments": ("keep", "reset")[world.rank]},
            {"seed": world.rank},
        ]
        for options in different:
            (name,) = options
            with pytest.raises(ValueError, match=f"DiLoCo different options: {name}=.* rank 1"):
                DiLoCo(model, adamw(model), world, **{"sync_every": 2} | options)

    launch(work, ranks=2)


def test_ranks_that_hold_parts_of_one_model_or_average_already_are_no_islands():
    def work(world):
        mesh = Mesh(world, island=2, inside=2)
        sharded = ZeRO(build(), mesh["inside"], 3)
        with pytest.raises(ValueError, match=r"0.weight is cut over ranks \[0, 1\]|\[2, 3\]"):
            DiLoCo(sharded, adamw(sharded), mesh["inside"], 2)
        DiLoCo(sharded, adamw(sharded), mesh["island"], 2)
        averaged = DDP(build(), mesh["inside"])
        with pytest.raises(ValueError, match="DDP"):
            DiLoCo(averaged, adamw(averaged), mesh["inside"], 2)
        DiLoCo(averaged, adamw(averaged), mesh["island"], 2)

    launch(work, ranks=4)
