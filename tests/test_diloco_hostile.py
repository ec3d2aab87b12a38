"""DiLoCo where models, optimizers and moments of time are not the usual ones, each beside a plain
simulation in one process, or beside itself."""

import contextlib
import copy
import math
import sys
import warnings

import cloudpickle
import pytest
import torch
from torch import nn

from s2s_lib import DiLoCo, Mesh, ZeRO, all_reduce, background, bill, launch
from s2s_lib.strategies.diloco.gossip import pairs

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def linear(seed=0, shape=(5, 3), dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Linear(*shape).to(dtype)


def walk(model, optimizer, steps, seed):
    """Steps on data that belongs to this seed; what all must do alike."""
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    for _ in range(steps):
        x = torch.randn(4, 5, generator=generator, dtype=torch.float64).to(first.dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


class Outer:
    """An outer step in plain torch, for islands that are all in this process."""

    def __init__(self, start, lr=0.7, momentum=0.9, nesterov=True):
        self.weights = [nn.Parameter(p.clone()) for p in start]
        self.sgd = torch.optim.SGD(self.weights, lr, momentum, nesterov=nesterov)

    def step(self, islands):
        """`islands`: for each the list of its live parameters, which become the outer ones."""
        for weight, *live in zip(self.weights, *islands, strict=True):
            weight.grad = weight.detach() - torch.stack([p.detach() for p in live]).mean(0)
        self.sgd.step()
        for live in islands:
            for parameter, weight in zip(live, self.weights, strict=True):
                parameter.data.copy_(weight.detach())


def assert_equal(got, expected, atol=1e-12):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


# Optimizers


def test_moments_can_be_reset_for_an_optimizer_that_makes_its_state_when_it_is_built():
    """Adagrad makes its sums in its constructor and never again: a state that is taken away
    altogether, rather than made as at the beginning, leaves the next step with a KeyError."""

    def run(world):
        model = linear()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, world, 2, moments="reset"):
            walk(model, optimizer, 4, world.rank)
        return weights(model)

    got = launch(run, ranks=2)
    models = [linear() for _ in range(2)]
    outer = Outer(models[0].parameters())
    for round_ in range(2):
        for rank, model in enumerate(models):
            generator = torch.Generator().manual_seed(rank)
            data = [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(4)]
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
            for x in data[2 * round_ : 2 * round_ + 2]:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        outer.step([list(model.parameters()) for model in models])
    for rank in range(2):
        assert_equal(got[rank], outer.weights)


@pytest.mark.parametrize("kind", ["fused", "foreach", "stateless", "groups", "lbfgs"])
def test_any_way_to_step_equals_one_process(kind):
    """A hook that counts closures, or sees one group, or needs state before the first step."""

    def make(model):
        parameters = list(model.parameters())
        match kind:
            case "fused":
                return torch.optim.AdamW(parameters, lr=0.05, fused=True)
            case "foreach":
                return torch.optim.Adam(parameters, lr=0.05, foreach=True, amsgrad=True)
            case "stateless":
                return torch.optim.SGD(parameters, lr=0.05, foreach=True)
            case "groups":
                groups = [{"params": [parameters[1]], "lr": 0.3}, {"params": [parameters[0]]}]
                return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        return torch.optim.LBFGS(parameters, lr=0.3, max_iter=3)

    def go(model, optimizer, seed, part):
        generator = torch.Generator().manual_seed(seed)
        data = [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(5)]
        for x in data[part]:

            def closure(x=x):
                optimizer.zero_grad()
                loss = (model(x) - 1).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

    def run(world):
        model = linear()
        optimizer = make(model)
        with DiLoCo(model, optimizer, world.subgroup([2, 0, 1]), 2):
            go(model, optimizer, world.rank, slice(0, 5))
        return weights(model)

    got = launch(run, ranks=3)
    models = [linear() for _ in range(3)]
    optimizers = [make(model) for model in models]
    outer = Outer(models[0].parameters())
    for part in (slice(0, 2), slice(2, 4), slice(4, 5)):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            go(model, optimizer, rank, part)
        outer.step([list(model.parameters()) for model in models])
    for rank in range(3):
        assert_equal(got[rank], outer.weights, 1e-10)


# Models


class Odd(nn.Module):
    """Parameters of all sorts: 0-dim, empty, complex, transposed, shared, and of 16 bits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.turned = nn.Parameter(torch.randn(3, 4, dtype=torch.float64).t())
        self.short = nn.Parameter(torch.randn(5).bfloat16())
        self.again = self.turned

    def pull(self, target):
        parts = [p.abs().double() if p.is_complex() else p.double() for p in self.parameters()]
        return sum(((part - target) ** 2).sum() for part in parts)


@pytest.mark.parametrize("fragments", [1, 9])
def test_parameters_of_all_sorts_equal_one_process(fragments):
    """A row that takes a complex number for two, a transposed weight in its memory's order, or a
    shared one twice; more fragments than parameters."""

    def go(model, optimizer, rank, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model.pull(rank + 2.0).backward()
            optimizer.step()

    def run(world):
        model = Odd()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        DiLoCo(model, optimizer, world, 9, 1.0, 0.0, False, fragments=fragments)
        go(model, optimizer, world.rank, 9)
        return weights(model)

    got = launch(run, ranks=2)
    if fragments > 1:
        # All synced once each, so what is synced last is the same on all.
        assert_equal(got[0][-1:], got[1][-1:])
        return
    models = [Odd() for _ in range(2)]
    for rank, model in enumerate(models):
        go(model, torch.optim.SGD(model.parameters(), lr=0.05), rank, 9)
    for rank in range(2):
        for mine, *theirs in zip(got[rank], *(m.parameters() for m in models), strict=True):
            wide = torch.promote_types(mine.dtype, torch.float32)
            mean = torch.stack([t.detach().to(wide) for t in theirs]).mean(0).to(mine.dtype)
            rtol = 1e-2 if mine.dtype == torch.bfloat16 else 0
            torch.testing.assert_close(mine, mean, rtol=rtol, atol=1e-12)


def test_complex_weights_are_rounded_too_or_refused_at_once():
    """Codes stand for real numbers: refused only when the first sync is due, a run has lost all
    the hours before, and is told of a function that it never called."""

    def run(world):
        model = nn.Module()
        model.wave = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            DiLoCo(model, optimizer, world, 2, bits=8)
        except (TypeError, ValueError) as error:
            assert "wave" in str(error) and "bits" in str(error)
            return "refused"
        for _ in range(2):
            model.wave.grad = torch.ones_like(model.wave)
            optimizer.step()
        return "done"

    assert set(launch(run, ranks=2)) <= {"refused", "done"}


def test_a_parameter_that_is_unfrozen_later_is_synced_or_told():
    """What to sync is chosen once: a layer that is thawed after some rounds, as in fine-tuning,
    would be trained by each island for itself, and flush() would not make islands the same."""

    def run(world):
        model = nn.Sequential(linear(), linear(1, (3, 2)))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = DiLoCo(model, optimizer, world, 2)
        walk(model, optimizer, 2, world.rank)
        model[0].requires_grad_(True)
        try:
            walk(model, optimizer, 2, world.rank + 10)
            diloco.flush()
        except RuntimeError as error:
            assert "0.weight" in str(error)
            return "told"
        return weights(model)

    first, second = launch(run, ranks=2)
    if first != "told":
        assert_equal(first, second, 0)


def test_a_mask_of_lowest_numbers_stays_finite():
    """The mean of two buffers of float32's lowest number, as attention masks have it, is that
    number: a sum taken first is -inf, and a softmax over it nan."""

    def run(world):
        model = linear()
        model.register_buffer("mask", torch.full((2,), torch.finfo(torch.float32).min))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, optimizer, world, 1):
            walk(model, optimizer, 1, world.rank)
        return model.mask

    for mask in launch(run, ranks=2):
        assert torch.isfinite(mask).all(), mask


# Saving


def test_islands_that_met_in_pairs_are_the_same_after_a_load_and_flush():
    """That islands have met in pairs since all were the same is not in the counts: loaded between
    two rounds, flush() finds nothing to do and leaves them apart."""

    def run(world):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = DiLoCo(model, optimizer, world, 2, gossip=True)
        walk(model, optimizer, 2, world.rank)
        with diloco.in_state():
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), diloco.counts))
        diloco.flush()
        model2 = linear()
        optimizer2 = torch.optim.SGD(model2.parameters(), lr=0.1)
        diloco2 = DiLoCo(model2, optimizer2, world, 2, gossip=True)
        with diloco2.in_state():
            model2.load_state_dict(saved[0])
            optimizer2.load_state_dict(saved[1])
        diloco2.counts = saved[2]
        diloco2.flush()
        return weights(model), weights(model2)

    got = launch(run, ranks=3)
    for on, loaded in got:
        assert_equal(on, got[0][0], 0)
        assert_equal(loaded, on, 0)


@pytest.mark.parametrize("save", [False, True])
def test_islands_of_islands_equal_one_process(save):
    """Two DiLoCos on one optimizer, a fast one in each region and a slow one between: what both
    lend to the optimizer's state has the same names, and the one lent first comes back as live
    weights without momentum."""

    def run(world):
        mesh = Mesh(world, far=2, near=2)
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        near = DiLoCo(model, optimizer, mesh["near"], 2)
        far = DiLoCo(model, optimizer, mesh["far"], 4)
        walk(model, optimizer, 4, world.rank)
        walk(model, optimizer, 2, world.rank + 10)
        if save:
            # To be refused would do, too.
            with contextlib.suppress(RuntimeError, ValueError):
                with near.in_state(), far.in_state():
                    optimizer.state_dict()
        walk(model, optimizer, 2, world.rank + 20)
        return weights(model)

    got = launch(run, ranks=4)
    models = [linear() for _ in range(4)]
    nears = [Outer(models[0].parameters()) for _ in range(2)]
    far = Outer(models[0].parameters())

    def near_step():
        for n, near in enumerate(nears):
            near.step([list(m.parameters()) for m in models[2 * n : 2 * n + 2]])

    def parts(seed, cut):
        for rank, model in enumerate(models):
            generator = torch.Generator().manual_seed(rank + seed)
            xs = [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(4)]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x in xs[cut]:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    parts(0, slice(0, 2))
    near_step()
    parts(0, slice(2, 4))
    near_step()
    far.step([list(m.parameters()) for m in models])
    parts(10, slice(0, 2))
    near_step()
    parts(20, slice(0, 2))
    near_step()
    far.step([list(m.parameters()) for m in models])
    for rank in range(4):
        assert_equal(got[rank], far.weights)


# Streaming


def simulated_streaming(size, steps, every, fragments, delay, mixing):
    models = [linear() for _ in range(size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    generators = [torch.Generator().manual_seed(r) for r in range(size)]
    names = range(2)
    parts = [list(names)[2 * i // fragments : 2 * (i + 1) // fragments] for i in range(fragments)]
    outer = [p.detach().clone() for p in models[0].parameters()]
    momentum = [torch.zeros_like(p) for p in outer]
    travelling = {}

    def finish(number, keep):
        for i in parts[number]:
            gradient = travelling[number][1][i]
            momentum[i] = 0.9 * momentum[i] + gradient
            outer[i] = outer[i] - 0.7 * (gradient + 0.9 * momentum[i])
            for model in models:
                live = list(model.parameters())[i]
                live.data.copy_(keep * live.detach() + (1 - keep) * outer[i])
        del travelling[number]

    def send(number, step):
        gradient = {
            i: torch.stack([outer[i] - list(m.parameters())[i].detach() for m in models]).mean(0)
            for i in parts[number]
        }
        travelling[number] = step, gradient

    for step in range(1, steps + 1):
        for model, optimizer, generator in zip(models, optimizers, generators, strict=True):
            x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        place = (step - 1) % every + 1
        for number in range(fragments):
            if place == every // fragments * (number + 1):
                send(number, step)
            if number in travelling and step - travelling[number][0] == delay:
                finish(number, mixing)
    return models


@pytest.mark.parametrize(
    "every, fragments, delay, mixing",
    [(4, 2, 3, 0.5), (4, 4, 3, 0.25), (1, 1, 0, 0.0), (6, 2, 5, 0.0)],
)
def test_streaming_with_the_longest_delay_equals_one_process(every, fragments, delay, mixing):
    """A fragment that is back one step too late is sent while it is under way; beside it the
    program's own lanes, and the group has another order."""

    def run(world):
        group = world.subgroup([1, 2, 0])
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        DiLoCo(model, optimizer, group, every, fragments=fragments, delay=delay, mixing=mixing)
        generator = torch.Generator().manual_seed(world.rank)
        for step in range(11):
            own = [background(all_reduce, torch.ones(3) * step, world, lane=n) for n in (0, 4)]
            x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            assert all(task.wait()[0] == 3 * step for task in own)
        return weights(model)

    got = launch(run, ranks=3)
    models = simulated_streaming(3, 11, every, fragments, delay, mixing)
    for rank in range(3):
        assert_equal(got[rank], models[rank].parameters())


@pytest.mark.parametrize(
    "options",
    [{"delay": 3, "mixing": 0.5}, {"bits": 4, "error_feedback": True}, {"gossip": True}],
)
def test_flush_makes_all_the_same_in_every_state(options):
    """Before a step, twice, with a fragment under way, in the middle of a round, after one."""

    def run(world):
        found = []
        for steps in (0, 1, 3, 4, 5, 7):
            model = linear()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            diloco = DiLoCo(model, optimizer, world, 4, fragments=2, **options)
            walk(model, optimizer, steps, world.rank)
            diloco.flush()
            once = weights(model)
            with bill() as sent:
                diloco.flush()
            assert sum(sent.by("link").values()) == 0
            assert diloco.at_rest and diloco.counts[1:] == [0, 0, 0, 0], diloco.counts
            assert all(torch.equal(a, b) for a, b in zip(once, weights(model), strict=True))
            found.append(once)
        return found

    got = launch(run, ranks=3)
    for mine in got:
        for state, first in zip(mine, got[0], strict=True):
            assert_equal(state, first, 0)


def test_numbers_of_8_bits_are_refused_when_they_are_no_whole_number():
    """8.0 equals 8, and is no count of bits: told when DiLoCo is built, not as a TypeError of
    torch.empty after the first round."""

    def run(world):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            DiLoCo(model, optimizer, world, 1, bits=8.0)
        except ValueError as error:
            return "bits=8.0" in str(error)
        walk(model, optimizer, 1, world.rank)
        return True

    assert all(launch(run, ranks=2))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_gossip_equals_one_process(size):
    """Who meets whom differs between ranks, or momentum is averaged too."""

    def run(world):
        warnings.simplefilter("ignore")
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = DiLoCo(model, optimizer, world, 2, gossip=True, seed=4)
        walk(model, optimizer, 6, world.rank)
        apart = weights(model)
        diloco.flush()
        return apart, weights(model)

    got = launch(run, ranks=size)
    models = [linear() for _ in range(size)]
    outers = [Outer(m.parameters()) for m in models]
    data = []
    for rank in range(size):
        generator = torch.Generator().manual_seed(rank)
        data.append([torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(6)])
    for number in range(3):
        for rank, model in enumerate(models):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x in data[rank][2 * number : 2 * number + 2]:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            outers[rank].step([list(model.parameters())])
        for a, b in pairs(size, 4, number):
            for p, q in zip(outers[a].weights, outers[b].weights, strict=True):
                mean = (p.detach() + q.detach()) / 2
                p.data.copy_(mean)
                q.data.copy_(mean)
        for outer, model in zip(outers, models, strict=True):
            for p, q in zip(model.parameters(), outer.weights, strict=True):
                p.data.copy_(q.detach())
    for rank in range(size):
        assert_equal(got[rank][0], models[rank].parameters())
        both = zip(*(model.parameters() for model in models), strict=True)
        mean = [torch.stack([p.detach() for p in same]).mean(0) for same in both]
        assert_equal(got[rank][1], mean)


def test_an_island_of_hybrid_zero_equals_one_process():
    """Shards inside nodes, replicas between them, islands outermost; the outer step sees shards."""

    def run(world):
        mesh = Mesh(world, island=2, replicate=2, shard=2)
        model = linear()
        zero = ZeRO(model, mesh["shard"], 2, mesh["replicate"])
        optimizer = torch.optim.Adam(zero.parameters(), lr=0.05)
        with DiLoCo(zero, optimizer, mesh["island"], 2, fragments=2):
            generator = torch.Generator().manual_seed(mesh.coordinate["island"])
            for _ in range(5):
                x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
                optimizer.zero_grad()
                zero(x).square().mean().backward()
                optimizer.step()
        return list(zero.full_state_dict().values())

    def plain(world):
        model = linear()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        with DiLoCo(model, optimizer, world, 2, fragments=2):
            walk(model, optimizer, 5, world.rank)
        return weights(model)

    whole, cut = launch(plain, ranks=2), launch(run, ranks=8)
    for mine in cut:
        assert_equal(mine, whole[0], 1e-10)


def test_two_models_of_one_program_do_not_mix():
    """A generator and a critic with an optimizer each, one streaming: their messages must not be
    taken for each other's."""

    def run(world):
        g, c = linear(1), linear(2)
        og = torch.optim.SGD(g.parameters(), lr=0.1)
        oc = torch.optim.Adam(c.parameters(), lr=0.01)
        with DiLoCo(g, og, world, 4, delay=3, bits=8) as a, DiLoCo(c, oc, world, 3, delay=1):
            for n in range(10):
                walk(g, og, 1, world.rank + n)
                walk(c, oc, 2, world.rank + n)
            assert a is not None
        return weights(g) + weights(c)

    def alone(world):
        g = linear(1)
        og = torch.optim.SGD(g.parameters(), lr=0.1)
        with DiLoCo(g, og, world, 4, delay=3, bits=8):
            for n in range(10):
                walk(g, og, 1, world.rank + n)
        return weights(g)

    both, one = launch(run, ranks=2), launch(alone, ranks=2)
    for rank in range(2):
        assert_equal(both[rank][:2], one[rank], 0)
    assert_equal(both[0], both[1], 0)


def test_an_island_that_diverges_is_told_to_all_and_a_copy_of_the_model_is_free():
    """Wild numbers through codes, and a deepcopy that would be synced with the model."""

    def run(world):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = DiLoCo(model, optimizer, world, 1, bits=4, error_feedback=True)
        twin = copy.deepcopy(model)
        before = weights(twin)
        if world.rank:
            model.weight.data[0, 0] = math.inf
        outer = [row.outer.clone() for row in diloco.rows]
        with pytest.raises(FloatingPointError, match="not finite after its 1 steps"):
            walk(model, optimizer, 1, world.rank)
        assert all(torch.equal(a, b) for a, b in zip(before, weights(twin), strict=True))
        return all(torch.equal(a, row.outer) for a, row in zip(outer, diloco.rows, strict=True))

    assert launch(run, ranks=2) == [True, True]
