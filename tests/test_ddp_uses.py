"""DDP in the hands of people: uneven batches, failures, several models, optimizers, copies.

What must not happen is silence: a rank that goes on alone, weights that drift apart, gradients of
a backward that failed. Where something cannot work there is an error on every rank, or the launch
ends at its timeout with the table of who waits for whom.
"""

import copy
import os
import pickle
import signal

import pytest
import torch
from torch import nn

from s2s_lib import DDP, Cluster, Link, RankError, all_gather, all_reduce, bill, launch

CLOSE = {"rtol": 0, "atol": 1e-10}


def build(*sizes, seed=0, norm=False):
    """A chain of layers; `norm` adds a BatchNorm after the first."""
    torch.manual_seed(seed)
    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(sizes[1]))
    return nn.Sequential(*layers).double()


def data(*key, shape=(4, 3)):
    random = torch.Generator().manual_seed(hash(key) % 2**31)
    return torch.randn(shape, generator=random, dtype=torch.float64)


def loss_of(model, x):
    return model(x).square().mean()


def descend(model, lr=0.05):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad


def weights(model):
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers()]]


def grads(model):
    return [p.grad for p in model.parameters()]


def assert_all_close(some, others):
    for a, b in zip(some, others, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def same_on_all(tensors, world):
    """Bit for bit the same numbers on every rank."""
    row = torch.cat([t.detach().double().reshape(-1) for t in tensors])
    return all(torch.equal(row, other) for other in all_gather(row[None], world))


# Buffers


def test_two_forwards_and_one_backward_work_with_batch_norm():
    def work(world):
        ours, plain = (build(3, 5, 1, norm=True) for _ in range(2))
        ours = DDP(ours, world)
        buffers = []
        for step in range(3):
            ours.zero_grad()
            pair = []
            for part in range(2):
                pair.append(ours(data(step, part, world.rank)))
                buffers.append([b.clone() for b in ours.buffers()])
            (pair[0] * pair[1]).mean().backward()
            # The statistics of a batch are this rank's own, so the plain copy sees each batch.
            plain.zero_grad()
            for rank in range(world.size):
                outs = [plain(data(step, part, rank)) for part in range(2)]
                ((outs[0] * outs[1]).mean() / world.size).backward()
            assert_all_close(grads(ours), grads(plain))
        return buffers

    zero, one, two = launch(work, ranks=3)
    for first, other, another in zip(zero, one, two, strict=True):
        assert all(map(torch.equal, first, other)) and all(map(torch.equal, first, another))
    # Rank 0's own statistics, not the average: those of one process that sees its batches.
    alone = build(3, 5, 1, norm=True)
    for i, buffers in enumerate(zero):
        alone(data(i // 2, i % 2, 0))
        assert_all_close(buffers, list(alone.buffers()))


# Uneven numbers of batches


def test_without_join_the_launch_ends_at_its_timeout_and_tells_who_waits():
    def work(world):
        model = DDP(build(3, 1), world)
        for step in range(3 - world.rank):
            loss_of(model, data(step)).backward()

    with pytest.raises(RankError) as caught:
        launch(work, ranks=2, timeout=1)
    assert "waited for each other longer than 1 s" in caught.value.summary
    table = str(caught.value)
    assert "all_reduce" in table and "its function has returned" in table


UNEVEN = {"rank 0 first": [1, 3, 2], "one has none": [2, 0, 3], "even": [2, 2, 2], "none": [0] * 3}


@pytest.mark.parametrize("norm", [False, True])
def test_join_divides_by_all_ranks_and_leaves_the_same_weights_everywhere(norm):
    def work(world, overlap):
        results = {}
        for name, batches in UNEVEN.items():
            model = DDP(build(3, 5, 1, norm=norm), world, overlap=overlap)
            steps = 0
            for step in model.join(range(batches[world.rank])):
                model.zero_grad()
                loss_of(model, data(step, world.rank)).backward()
                descend(model)
                steps += 1
            assert steps == batches[world.rank]
            assert same_on_all(weights(model), world), name
            results[name] = weights(model)
            # And after it, training goes on as before.
            model.zero_grad()
            loss_of(model, data(9, world.rank)).backward()
            assert same_on_all(grads(model), world)
        return results

    def alone(batches):
        model, size = build(3, 5, 1, norm=norm), len(batches)
        for step in range(max(batches)):
            model.zero_grad()
            ranks = [rank for rank in range(size) if batches[rank] > step]
            before = [b.clone() for b in model.buffers()]
            for rank in reversed(ranks):
                # Buffers move by the batch of the first rank that has one.
                for buffer, value in zip(model.buffers(), before, strict=True):
                    buffer.copy_(value)
                (loss_of(model, data(step, rank)) / size).backward()
            descend(model)
        return weights(model)

    for overlap in (True, False):
        for results in launch(work, overlap, ranks=3, timeout=20):
            for name, batches in UNEVEN.items():
                assert_all_close(results[name], alone(batches))


def test_join_brings_the_optimizer_along_so_that_the_next_epoch_is_right():
    counts = [[3, 1], [2, 2]]

    def work(world):
        model = DDP(build(3, 5, 1), world)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for epoch, batches in enumerate(counts):
            for step in model.join(range(batches[world.rank]), optimizer, schedule):
                optimizer.zero_grad()
                loss_of(model, data(epoch, step, world.rank)).backward()
                optimizer.step()
                schedule.step()
                assert epoch == 0 or same_on_all(model.parameters(), world)
        return weights(model), schedule.get_last_lr()

    model = build(3, 5, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for epoch, batches in enumerate(counts):
        for step in range(max(batches)):
            optimizer.zero_grad()
            for rank in range(2):
                if batches[rank] > step:
                    (loss_of(model, data(epoch, step, rank)) / 2).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
    for result, lr in launch(work, ranks=2):
        assert lr == [0.05 * 0.5**5]
        assert_all_close(result, weights(model))


# Failures


def test_after_an_error_in_backward_on_all_ranks_the_next_step_is_right():
    def work(world):
        ours, plain = DDP(build(3, 4, 5, 1), world, bucket_mb=1e-4), build(3, 4, 5, 1)
        saved = []
        for step in range(5):
            x, spare = ours(data(step, world.rank)), ours(data(50 + step, world.rank))
            ours.zero_grad()
            # From the second step on, buckets of the last layers are on their way by now.
            failing = [ours.module[0].weight, ours.module[1].weight][step % 2]
            hook = failing.register_hook(lambda grad: 1 / 0)
            try:
                x.square().mean().backward()
            except ZeroDivisionError as error:
                saved.append(error)
            hook.remove()
            ours.zero_grad()
            # With a new forward pass, and with one from before the error.
            out = spare if step % 2 else ours(data(50 + step, world.rank))
            out.square().mean().backward()
            plain.zero_grad()
            for rank in range(world.size):
                (loss_of(plain, data(50 + step, rank)) / world.size).backward()
            assert_all_close(grads(ours), grads(plain))
            descend(ours)
            descend(plain)
        assert len(saved) == 5

    launch(work, ranks=3, cluster=Cluster(1, 3, intra=Link(1, 3000)))


def test_half_averaged_gradients_are_refused_until_they_are_zeroed():
    def work(world):
        model = DDP(build(3, 4, 5, 1), world, bucket_mb=1e-4)
        x = data(world.rank)
        loss_of(model, x).backward()
        hook = model.module[0].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, x).backward()
        hook.remove()
        # More often than there are buckets.
        for _ in range(10):
            with pytest.raises(RuntimeError, match="not whole: call zero_grad"):
                loss_of(model, x).backward()
        model.zero_grad()
        loss_of(model, x).backward()
        return same_on_all(grads(model), world)

    assert launch(work, ranks=2) == [True, True]


def test_a_rank_killed_or_failing_in_backward_is_named():
    def work(world, end):
        model = DDP(build(3, 4, 5, 1), world, bucket_mb=1e-4)
        for step in range(3):
            if step == 2 and world.rank == 1:
                model.module[1].weight.register_hook(end)
            loss_of(model, data(step)).backward()

    with pytest.raises(RankError) as caught:
        launch(work, lambda grad: os.kill(os.getpid(), signal.SIGKILL), ranks=3, timeout=20)
    assert caught.value.rank == 1 and "SIGKILL" in caught.value.summary
    with pytest.raises(RankError) as caught:
        launch(work, lambda grad: 1 / 0, ranks=3, timeout=20)
    assert caught.value.rank == 1 and "ZeroDivisionError" in caught.value.summary


def refusals(world):
    """What each of these says on this rank."""
    x, said = data(world.rank), {}

    def attempt(name, error, function):
        with pytest.raises(error) as caught:
            function()
        said[name] = str(caught.value)

    for size in (0, -1, float("nan")):
        attempt(f"bucket_mb {size}", ValueError, lambda size=size: DDP(build(3, 1), world, size))
    model = DDP(build(3, 4, 1), world)
    attempt("create_graph", RuntimeError, lambda: loss_of(model, x).backward(create_graph=True))
    attempt("twice", ValueError, lambda: DDP(model.module, world))
    part = build(3, 4, 1)
    part[0].bias.requires_grad_(False)
    frozen = DDP(part, world)
    frozen.module[0].bias.requires_grad_(True)
    attempt("unfrozen", RuntimeError, lambda: frozen(x))
    table = DDP(nn.Embedding(5, 3, sparse=True), world)
    attempt("sparse", RuntimeError, lambda: table(torch.tensor([world.rank])).sum().backward())
    attempt("deepcopy", TypeError, lambda: copy.deepcopy(model))
    attempt("pickle", TypeError, lambda: pickle.dumps(model))
    return said


def test_what_cannot_work_is_refused_on_every_rank_with_the_way_out():
    zero, one = launch(refusals, ranks=2)
    assert zero == one
    words = {
        "bucket_mb 0": "bucket_mb=0: give MiB above 0",
        "twice": "0.weight is in a DDP or ZeRO already, and would be averaged twice",
        "create_graph": "torch.autograd.grad",
        "unfrozen": "set requires_grad first",
        "sparse": "weight has a sparse gradient; build it with sparse=False",
        "deepcopy": "copy or save its .module",
        "pickle": "copy or save its .module",
    }
    for name, text in words.items():
        assert text in zero[name]


def test_more_gradients_than_in_any_backward_before_are_refused_or_averaged_without_overlap():
    def work(world, overlap):
        layer = build(3, 3)[0]
        model = DDP(Repeated(layer), world, overlap=overlap)
        plain = Repeated(layer.__class__(3, 3).double())
        plain.load_state_dict(model.module.state_dict())
        for times in (1, 2, 4):
            for each in (model, plain):
                each.zero_grad()
            x = data(0, shape=(2, 3)).requires_grad_()
            model(x, times).square().mean().backward()
            plain(x, times).square().mean().backward()
            assert_all_close(grads(model), grads(plain))

    launch(work, False, ranks=2)
    with pytest.raises(RankError, match="build DDP with overlap=False"):
        launch(work, True, ranks=2)


class Repeated(nn.Module):
    """Each use under a reentrant checkpoint adds to the gradient on its own."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, times):
        for _ in range(times):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return x


# Several models, groups, and what is not a training step


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()

    def forward(self, x, skip):
        x = self.b(x) if skip else x.sum(1, keepdim=True)
        return x + self.a(x.expand(-1, 3)).mean()


def test_two_models_in_one_backward_keep_one_order_on_all_ranks():
    def work(world):
        pairs = []
        for wrap in (lambda module: DDP(module, world, bucket_mb=1e-4), lambda module: module):
            pairs.append((wrap(build(3, 4, 3)), wrap(Skipping())))
        for step in range(4):
            for pair, ranks in zip(pairs, ([world.rank], range(world.size)), strict=True):
                generator, critic = pair
                for model in pair:
                    model.zero_grad()
                for rank in ranks:
                    # In the later steps some ranks do not use the critic's second layer.
                    out = critic(generator(data(step, rank)), step < 2 or rank != 1)
                    (out.square().mean() / len(ranks)).backward()
            for ours, plain in zip(*pairs, strict=True):
                assert_all_close(grads(ours), grads(plain))
                descend(ours)
                descend(plain)

    launch(work, ranks=3, timeout=5)


def test_a_frozen_critic_sends_nothing_and_lets_the_generator_overlap():
    def work(world):
        torch.manual_seed(0)
        generator = DDP(build(3, 4, 3), world, bucket_mb=1e-4)
        critic = DDP(build(3, 4, 1), world)
        plain_g, plain_c = copy.deepcopy(generator.module), copy.deepcopy(critic.module)
        gone = []
        generator.module[0].weight.register_hook(
            lambda _: gone.append(generator.buckets[0].sent is not None)
        )
        for step in range(3):
            for model in (generator, critic, plain_g, plain_c):
                model.zero_grad()
            critic.requires_grad_(False)
            plain_c.requires_grad_(False)
            with bill() as sent:
                loss_of(nn.Sequential(generator, critic), data(step, world.rank)).backward()
            assert sent.bytes == sum(p.nbytes for p in generator.parameters())
            critic.requires_grad_(True)
            plain_c.requires_grad_(True)
            fake = generator(data(step, world.rank)).detach()
            (critic(fake) - critic(data(9, step, world.rank))).square().mean().backward()
            for rank in range(2):
                for p in plain_c.parameters():
                    p.requires_grad_(False)
                (loss_of(nn.Sequential(plain_g, plain_c), data(step, rank)) / 2).backward()
                plain_c.requires_grad_(True)
                fake = plain_g(data(step, rank)).detach()
                ((plain_c(fake) - plain_c(data(9, step, rank))).square().mean() / 2).backward()
            for ours, plain in ((generator, plain_g), (critic, plain_c)):
                assert_all_close(grads(ours), grads(plain))
                descend(ours)
                descend(plain)
        return gone

    assert launch(work, ranks=2) == [[False, True, True]] * 2


def test_groups_train_beside_each_other_and_beside_a_rank_that_does_something_else():
    def work(world):
        group = world.subgroup([3, 1]) or world.subgroup([2, 4])
        if group is None:
            return "something else"
        model = DDP(build(3, 4, 1, seed=world.rank), group)
        for step in range(3):
            model.zero_grad()
            loss_of(model, data(step, world.rank)).backward()
            descend(model)
        return weights(model)

    zero, one, two, three, four = launch(work, ranks=5)
    assert zero == "something else"
    for members, results in (([3, 1], (three, one)), ([2, 4], (two, four))):
        plain = build(3, 4, 1, seed=members[0])
        for step in range(3):
            plain.zero_grad()
            for rank in members:
                (loss_of(plain, data(step, rank)) / 2).backward()
            descend(plain)
        for result in results:
            assert_all_close(result, weights(plain))


def test_evaluation_sends_nothing_and_training_goes_on_after_it():
    def work(world):
        model = DDP(build(3, 4, 1), world)
        expected = model.module(data(0))
        with bill() as sent:
            # Only one rank evaluates, in two ways; then one takes a gradient by hand.
            if world.rank == 1:
                model.eval()
                with torch.no_grad():
                    assert torch.equal(model(data(0)), expected)
                with torch.inference_mode():
                    model(data(0))
                model.train()
                x = data(0).requires_grad_()
                torch.autograd.grad(model(x).sum(), x)
                torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert sent.bytes == 0 and all(p.grad is None for p in model.parameters())
        loss_of(model, data(1, world.rank)).backward()
        return same_on_all(grads(model), world)

    assert launch(work, ranks=3) == [True] * 3


def test_a_module_with_nothing_to_train_passes_through():
    def work(world):
        frozen = build(3, 2).requires_grad_(False)
        x = data(0).requires_grad_()
        for module in (nn.Tanh(), frozen):
            model = DDP(module, world)
            with bill() as sent:
                y = model(x)
                y.sum().backward()
            assert torch.equal(y, module(x)) and sent.bytes == 0

    launch(work, ranks=2)


def test_state_dicts_and_modules_travel():
    def work(world):
        model = DDP(build(3, 4, 1, norm=True, seed=world.rank), world)
        loss_of(model, data(world.rank)).backward()
        descend(model)
        plain = build(3, 4, 1, norm=True, seed=5)
        plain.load_state_dict(model.module.state_dict())
        again = DDP(build(3, 4, 1, norm=True, seed=7), world)
        again.load_state_dict(model.state_dict())
        assert torch.equal(plain.eval()(data(0)), model.eval()(data(0)))
        assert torch.equal(again.eval()(data(0)), model(data(0)))
        copied = copy.deepcopy(model.module)
        with bill() as sent:
            loss_of(copied, data(0)).backward()
        assert sent.bytes == 0 and copied[0].weight.grad is not model.module[0].weight.grad
        return model.module

    zero, one = launch(work, ranks=2)
    assert list(zero.state_dict()) == list(build(3, 4, 1, norm=True).state_dict())
    assert_all_close(weights(zero), weights(one))


# Optimizers and what people do to gradients


def clip(model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def scale(model, optimizer):
    for parameter in model.parameters():
        parameter.grad *= 2.0
        parameter.grad = parameter.grad / 4
    optimizer.step()


def plain_step(model, optimizer):
    optimizer.step()


def adamw(parameters, **settings):
    return torch.optim.AdamW(parameters, lr=0.01, **settings)


class Transposed(nn.Module):
    """A weight whose memory runs down the columns: fused optimizers walk through memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64).t())
        self.layer = nn.Linear(4, 1).double()

    def forward(self, x):
        return self.layer((x @ self.weight).tanh())


STEPS = {
    "clipping": (adamw, clip),
    "scaling": (adamw, scale),
    "fused": (lambda parameters: adamw(parameters, fused=True), plain_step),
    "one by one": (lambda parameters: adamw(parameters, foreach=False), plain_step),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True), plain_step),
}


def test_optimizers_built_before_or_after_and_clipping_act_as_in_one_process():
    def work(world):
        for name, (make, step) in STEPS.items():
            for before in (True, False):
                module, plain = Transposed(), Transposed()
                optimizer = make(module.parameters()) if before else None
                ours = DDP(module, world)
                optimizer = optimizer or make(ours.parameters())
                reference = make(plain.parameters())
                for i in range(3):
                    optimizer.zero_grad(set_to_none=i == 1)
                    loss_of(ours, data(i, world.rank)).backward()
                    step(ours, optimizer)
                    reference.zero_grad()
                    for rank in range(world.size):
                        (loss_of(plain, data(i, rank)) / world.size).backward()
                    step(plain, reference)
                for got, want in zip(ours.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(got, want, **CLOSE, msg=lambda m, n=name: n + m)
                assert same_on_all(ours.parameters(), world), name
        lbfgs(world)

    def lbfgs(world):
        ours, plain = DDP(build(3, 4, 1), world), build(3, 4, 1)

        def closure():
            ours.zero_grad()
            loss = loss_of(ours, data(0, world.rank))
            loss.backward()
            return all_reduce(loss.detach(), world, op="avg")

        def closure_of_one():
            plain.zero_grad()
            loss = sum(loss_of(plain, data(0, rank)) for rank in range(world.size)) / world.size
            loss.backward()
            return loss

        torch.optim.LBFGS(ours.parameters(), max_iter=5).step(closure)
        torch.optim.LBFGS(plain.parameters(), max_iter=5).step(closure_of_one)
        assert_all_close([p.detach() for p in ours.parameters()], list(plain.parameters()))
        assert same_on_all(ours.parameters(), world)

    launch(work, ranks=2)
