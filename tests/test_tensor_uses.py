"""Tensor parallelism in the hands of people: under DDP, ZeRO and pipelines, checkpointed.

What one process does with the plain module is the judge throughout, in float64 to 1e-10: losses,
norms before clipping, and whole weights after some steps of AdamW. A gradient averaged over ranks
with other parts, a norm that counts a part twice or a whole one W times, a sum of norms' gradients
that a backward in halves forgot, a region that kept the gradient of another backward:
each ends in other weights. What is alive, and what ran beside what, is counted and not timed.
"""

import gc
import os
import signal
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from s2s_lib import (
    DDP,
    GPT,
    GPT_PLAN,
    Cluster,
    Column,
    ColumnParallelLinear,
    GPTConfig,
    Link,
    Mesh,
    Pipeline,
    RankError,
    Vocab,
    ZeRO,
    bill,
    clip_grad_norm_,
    full_state_dict,
    launch,
    memory,
    next_token_loss,
    schedule,
    split,
    tensor_parallel,
    timeline,
    vocab_parallel_cross_entropy,
)
from s2s_lib.strategies.grads import is_cut
from s2s_lib.strategies.tensor.plan import matches

CLOSE = {"rtol": 0, "atol": 1e-10}
VOCAB, TOKENS, WIDTH = 17, 8, 16
# With sequence parallelism and without.
BOTH = (False, True)


# What is trained: the course's GPT, and a model with biases, fused layers and dropout


def gpt(seed=0, dtype=torch.float64, **changes):
    shape = {"layers": 2, "hidden": WIDTH, "heads": 4, "vocab": VOCAB, "seq": TOKENS}
    torch.manual_seed(seed)
    return GPT(GPTConfig(**shape | changes)).to(dtype)


class Attention(nn.Module):
    """Fused k and v, and with `q_norm` a norm of each head inside the cut region."""

    def __init__(self, drop, q_norm):
        super().__init__()
        self.head_dim = 4
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)
        self.q_norm = nn.LayerNorm(self.head_dim) if q_norm else nn.Identity()
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        k, v = self.kv(x).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (self.q(x), k, v))
        weights = self.drop((self.q_norm(q) @ k.transpose(-1, -2)).softmax(-1))
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return self.down(self.drop(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, drop, q_norm):
        super().__init__()
        self.attn_norm, self.attn = nn.LayerNorm(WIDTH), Attention(drop, q_norm)
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), MLP(drop)
        self.attn_drop, self.mlp_drop = nn.Dropout(drop), nn.Dropout(drop)

    def forward(self, x):
        x = x + self.attn_drop(self.attn(self.attn_norm(x)))
        return x + self.mlp_drop(self.mlp(self.mlp_norm(x)))


class Net(nn.Module):
    """Tokens to logits; `run(block, x)` says how blocks are run."""

    def __init__(self, drop=0.0, q_norm=False, run=None):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.embed_drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList(Block(drop, q_norm) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.run = run

    def forward(self, tokens):
        x = self.embed_drop(self.embed(tokens))
        for block in self.blocks:
            x = self.run(block, x) if self.run else block(x)
        return self.head(self.norm(x))


NET_PLAN = {
    "embed": "vocab",
    "blocks.*.attn.q": "column",
    "blocks.*.attn.kv": Column(blocks=2),
    "blocks.*.attn.o": "row",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "head": "vocab",
}


def net(seed=0, dtype=torch.float64, **settings):
    torch.manual_seed(seed)
    return Net(**settings).to(dtype)


def recomputed(block, x):
    return checkpoint(block, x, use_reentrant=False)


MLP_PLAN = {"0": "column", "2": "row"}


def mlp(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).to(dtype)


def plan_of(module):
    return GPT_PLAN if isinstance(module, GPT) else NET_PLAN


def cut(module, group, **settings):
    return tensor_parallel(module, group, plan_of(module), **settings)


def batch(step=0, rows=4):
    random = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCAB, (rows, TOKENS + 1), generator=random)
    return tokens[:, :-1], tokens[:, 1:]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train(model, group=None, replicas=None, steps=5, optimizer=None, parts=1):
    """The norms before clipping. `group` cuts the model and `replicas` share the batch, of which
    `parts` micro-batches are accumulated."""
    optimizer, norms = optimizer or adamw(model), []
    for step in range(steps):
        rows = batch(step)
        if replicas:
            rows = [t.chunk(replicas.size)[replicas.rank] for t in rows]
        optimizer.zero_grad()
        for i, (x, y) in enumerate(zip(*(t.chunk(parts) for t in rows), strict=True)):
            if i < parts - 1:
                with model.no_sync():
                    (loss_of(model(x), y, group) / parts).backward()
            else:
                (loss_of(model(x), y, group) / parts).backward()
        norms.append(float(clip_grad_norm_(model, 0.05)))
        optimizer.step()
    return norms


def loss_of(logits, y, group=None):
    if group:
        return vocab_parallel_cross_entropy(logits, y, group)
    return next_token_loss(logits, y)


def alone(make, **settings):
    """Norms and weights of one process, with torch's own clipping."""
    model = make(**settings)
    optimizer, norms = adamw(model), []
    for step in range(5):
        x, y = batch(step)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
    return norms, model.state_dict()


def assert_same(got, want, what=""):
    """Norms, and whole weights by name."""
    assert got[0] == pytest.approx(want[0], rel=0, abs=1e-10), what
    torch.testing.assert_close(dict(got[1]), dict(want[1]), **CLOSE, msg=lambda m: f"{what}: {m}")


def whole_gradients(module):
    """Those of one process have these names and shapes: each part's place is known by its cut."""
    weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    try:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(parameter.grad)
        return full_state_dict(module)
    finally:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(weights[name])


# With replicas


REPLICATED = {"DDP": DDP} | {
    f"ZeRO-{stage}": lambda m, g, stage=stage: ZeRO(m, g, stage) for stage in range(4)
}


def full_weights(model):
    if isinstance(model, DDP):
        return full_state_dict(model.module)
    with model.gathered() as module:
        return full_state_dict(module)


@pytest.mark.parametrize("make", [gpt, net])
def test_replicas_of_a_cut_model_take_the_steps_of_one_process(make):
    def work(world):
        results = {}
        for sequence in BOTH:
            # Parts on neighbouring ranks, and on ranks apart.
            mesh = Mesh(world, tp=2, dp=2) if sequence else Mesh(world, dp=2, tp=2)
            for name, wrap in REPLICATED.items():
                inner = cut(make(seed=world.rank), mesh["tp"], sequence_parallel=sequence)
                # Each pair has the weights of its own first rank, and all then those of rank 0.
                model = wrap(inner, mesh["dp"])
                norms = train(model, mesh["tp"], mesh["dp"])
                results[name, sequence] = norms, full_weights(model)
                if name == "DDP":
                    whole = [p.detach() for p in inner.parameters() if not is_cut(p)]
                    results["not cut", sequence] = whole
        return results

    results = launch(work, ranks=4)
    want = alone(make)
    for result in results:
        for what, got in result.items():
            if what[0] == "not cut":
                # Stepped alike bit for bit, or it would drift.
                assert len(got) >= 5
                assert all(torch.equal(a, b) for a, b in zip(got, results[0][what], strict=True))
            else:
                assert_same(got, want, str(what))


def test_copies_of_a_shard_of_a_part_take_the_steps_of_one_process_too():
    """A hybrid of one shard and two copies, over a cut model."""

    def work(world):
        mesh = Mesh(world, replicate=2, shard=1, tp=2)
        model = ZeRO(cut(gpt(), mesh["tp"]), mesh["shard"], 3, replicate=mesh["replicate"])
        return train(model, mesh["tp"], mesh["replicate"]), full_weights(model)

    want = alone(gpt)
    for got in launch(work, ranks=4):
        assert_same(got, want)


@pytest.mark.parametrize("name", ["DDP", "ZeRO-2", "ZeRO-3"])
def test_accumulated_micro_batches_count_once_and_are_sent_once(name):
    def work(world):
        mesh = Mesh(world, dp=2, tp=2)
        results = []
        for sequence in BOTH:
            model = REPLICATED[name](cut(gpt(), mesh["tp"], sequence_parallel=sequence), mesh["dp"])
            train(model, mesh["tp"], mesh["dp"], steps=1)
            with bill() as once:
                train(model, mesh["tp"], mesh["dp"], steps=1)
            with bill() as twice:
                train(model, mesh["tp"], mesh["dp"], steps=1, parts=2)
            model = REPLICATED[name](cut(gpt(), mesh["tp"], sequence_parallel=sequence), mesh["dp"])
            norms = train(model, mesh["tp"], mesh["dp"], parts=2)
            sent = [b.by("group")[mesh["dp"].ranks] for b in (once, twice)]
            results.append(((norms, full_weights(model)), sent))
        return results

    want = alone(gpt)
    for result in launch(work, ranks=4):
        for got, (once, twice) in result:
            assert_same(got, want)
            assert name == "ZeRO-3" or once == twice


def test_zero_in_mixed_precision_trains_a_cut_model():
    def work(world):
        mesh = Mesh(world, dp=2, tp=2)
        results = []
        for stage in (1, 3):
            for sequence in BOTH:
                inner = cut(gpt(dtype=torch.float32), mesh["tp"], sequence_parallel=sequence)
                model = ZeRO(inner, mesh["dp"], stage, param_dtype=torch.bfloat16)
                results.append(train(model, mesh["tp"], mesh["dp"]))
        return results

    want, _ = alone(gpt)
    results = launch(work, ranks=4)
    assert results == [results[0]] * 4
    for norms in results[0]:
        # bfloat16 has 8 bits: the norm is right to some of the last.
        assert norms == pytest.approx(want, rel=0.03)


# In a pipeline


def part_of_plan(stage):
    names = [name for name, _ in stage.named_modules()]
    return {
        pattern: style
        for pattern, style in GPT_PLAN.items()
        if any(matches(name, pattern) for name in names)
    }


def assert_pipeline(world, name, tied, sequence, steps=3):
    mesh = Mesh(world, pp=2, tp=2)
    pp, tp = mesh["pp"], mesh["tp"]
    plan = schedule.BUILDERS[name](2, 4)
    reference = gpt(layers=4, tied=tied)
    stages = split(gpt(layers=4, tied=tied), plan.stages)
    own = {
        s: tensor_parallel(stages[s], tp, part_of_plan(stages[s]), sequence_parallel=sequence)
        for s in plan.stages_of(pp.rank)
    }
    pipeline = Pipeline(
        list(own.values()),
        pp,
        plan,
        lambda logits, y: vocab_parallel_cross_entropy(logits, y, tp),
        tied=stages[0].tied,
    )
    optimizers = [adamw(pipeline), adamw(reference)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = batch(step)
        loss = next_token_loss(reference(x), y)
        loss.backward()
        got = pipeline.step(x, y)
        assert got is None or abs(got - loss.detach()) < 1e-10
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        torch.testing.assert_close(clip_grad_norm_(pipeline, 0.05), norm, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
    want = reference.state_dict()
    for stage in own.values():
        for key, value in full_state_dict(stage).items():
            torch.testing.assert_close(value, want[key], **CLOSE, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "zb_h1", "zbv"])
def test_stages_may_be_cut_whatever_the_schedule(name):
    def work(world):
        for sequence in BOTH:
            assert_pipeline(world, name, False, sequence)

    launch(work, ranks=4)


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_stages_that_share_a_cut_weight_sum_its_parts(name):
    launch(lambda world: assert_pipeline(world, name, True, False), ranks=4)


# Recomputed, inside and outside


def test_recomputed_blocks_and_a_recomputed_model_have_the_same_gradients():
    def work(world):
        x, y = batch()
        results = {}
        for sequence in BOTH:
            for regather in (False, True)[: 1 + sequence]:
                for run, whole in ((None, False), (recomputed, False), (recomputed, True)):
                    model = cut(
                        net(q_norm=True, run=run),
                        world,
                        sequence_parallel=sequence,
                        regather=regather,
                    )
                    out = recomputed(model, x) if whole else model(x)
                    loss_of(out, y, world).backward()
                    results[sequence, regather, run is None, whole] = whole_gradients(model)
        return results

    plain = net(q_norm=True)
    loss_of(plain(batch()[0]), batch()[1]).backward()
    want = {name: p.grad for name, p in plain.named_parameters()}
    for results in launch(work, ranks=2):
        for what, got in results.items():
            torch.testing.assert_close(got, want, **CLOSE, msg=lambda m, what=what: f"{what}: {m}")


class Selective(nn.Module):
    """Recomputes from its column layers to before its row layer, and no module around them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.inner = nn.LayerNorm(4)
        self.down = nn.Linear(24, WIDTH)

    def hidden(self, x):
        h = F.silu(self.gate(x)) * self.up(x)
        return self.inner(h.unflatten(-1, (-1, 4))).flatten(-2)

    def forward(self, x):
        return x + self.down(recomputed(self.hidden, self.norm(x)))


class Held(nn.Module):
    """Recomputes a module that holds its column layer, and a norm before it."""

    def __init__(self):
        super().__init__()
        self.norm, self.down = nn.LayerNorm(WIDTH), nn.Linear(24, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU())

    def forward(self, x):
        return x + self.down(recomputed(lambda x: self.wide(self.norm(x)), x))


@pytest.mark.parametrize("kind, columns", [(Selective, ("*.gate", "*.up")), (Held, ("*.wide.0",))])
def test_a_part_of_the_inside_may_be_recomputed_alone(kind, columns):
    def steps(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model

    def make():
        torch.manual_seed(0)
        return nn.Sequential(kind(), kind()).double()

    def work(world):
        plan = {**dict.fromkeys(columns, "column"), "*.down": "row"}
        return full_state_dict(steps(tensor_parallel(make(), world, plan)))

    for got in launch(work, ranks=2):
        torch.testing.assert_close(got, dict(steps(make()).state_dict()), **CLOSE)


def test_dropout_recomputation_and_shards_of_parts_go_together():
    """The same masks whatever replicates it and whether blocks are recomputed."""

    def work(world):
        mesh, norms = Mesh(world, dp=2, tp=2), []
        for sequence in BOTH:
            for name, run in (("DDP", None), ("ZeRO-3", recomputed), ("ZeRO-2", recomputed)):
                inner = cut(net(drop=0.5, run=run), mesh["tp"], sequence_parallel=sequence)
                model = REPLICATED[name](inner, mesh["dp"])
                torch.manual_seed(world.rank)
                norms.append(train(model, mesh["tp"], mesh["dp"]))
        return norms

    for norms in launch(work, ranks=4):
        for i, one in enumerate(norms):
            assert one == pytest.approx(norms[i // 3 * 3], rel=1e-10)
        assert norms[0] != pytest.approx(norms[3], rel=1e-3)


def test_a_norm_of_each_head_has_the_gradient_of_all_heads():
    def work(world):
        results = []
        for sequence in BOTH:
            model = cut(net(q_norm=True), world, sequence_parallel=sequence)
            results.append((train(model, world), full_state_dict(model)))
        return results

    want = alone(net, q_norm=True)
    for ranks in (2, 4):
        for results in launch(work, ranks=ranks):
            for got in results:
                assert_same(got, want, f"{ranks} ranks")


class LateNorm(nn.Module):
    """Normalises its whole input after it has called its first column layer with it."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 12), nn.LayerNorm(8)
        self.gate, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        h = self.up(x)
        return self.down(h * torch.sigmoid(self.gate(self.norm(x))))


def test_a_norm_of_a_whole_tensor_after_a_column_layer_counts_once():
    def gradients(model):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        model(x).square().sum().backward()
        return model

    def make():
        torch.manual_seed(0)
        return LateNorm().double()

    def work(world):
        plan = {"up": "column", "gate": "column", "down": "row"}
        return whole_gradients(gradients(tensor_parallel(make(), world, plan)))

    want = {name: p.grad for name, p in gradients(make()).named_parameters()}
    for got in launch(work, ranks=2):
        torch.testing.assert_close(got, want, **CLOSE)


# Forwards and backwards in other numbers and orders


class Recurrent(nn.Module):
    """Runs one block several times, and the other only where it is told to."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Block(0.0, True) for _ in range(2))

    def forward(self, tokens, order):
        x = self.embed(tokens)
        for number in order:
            x = self.blocks[number](x)
        return self.head(x)


def assert_parity(world, make, plan, run, **settings):
    """`run(model, group)` leaves gradients: the same, and on the same parameters, as alone."""
    plain = make()
    model = tensor_parallel(make(), world, plan, **settings)
    told, want = run(model, world), run(plain, None)
    assert told == pytest.approx(want, rel=1e-10)
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (theirs[name].grad is None), name
        if parameter.grad is None:
            parameter.grad, theirs[name].grad = (
                torch.zeros_like(p) for p in (parameter, theirs[name])
            )
    got = whole_gradients(model)
    for name, parameter in theirs.items():
        torch.testing.assert_close(got[name], parameter.grad, **CLOSE, msg=lambda m, n=name: n + m)


def test_blocks_that_run_twice_or_not_at_all_and_several_forwards_at_once():
    def make():
        torch.manual_seed(0)
        return Recurrent().double()

    def twice(model, group):
        loss = loss_of(model(batch()[0], [0, 1, 0, 0]), batch()[1], group)
        loss.backward()
        return loss.item()

    def skipped(model, group):
        losses = [loss_of(model(batch(i)[0], [1]), batch(i)[1], group) for i in range(2)]
        # The first of two forwards comes last in backward.
        for loss in reversed(losses):
            loss.backward()
        return losses[0].item()

    def together(model, group):
        orders = ([0, 1], [1, 0], [])
        losses = [loss_of(model(batch()[0], order), batch()[1], group) for order in orders]
        sum(losses).backward(retain_graph=True)
        losses[1].backward()
        with pytest.raises(RuntimeError, match="second time"):
            losses[1].backward()
        return losses[2].item()

    def work(world):
        for sequence in BOTH:
            for run in (twice, skipped, together):
                assert_parity(world, make, NET_PLAN, run, sequence_parallel=sequence)

    launch(work, ranks=2)


def test_a_teacher_and_a_student_share_the_ranks():
    def run(student, group):
        teacher = net(seed=5) if group is None else cut(net(seed=5), group)
        with torch.no_grad():
            wanted = teacher(batch()[0])
        loss = loss_of(student(batch()[0]), batch()[1], group)
        # On cut logits the sum of squares of all is the sum over ranks: its gradient is cut too.
        (loss + (student(batch()[0]) - wanted).square().sum()).backward()
        return loss.item()

    def work(world):
        assert_parity(world, net, NET_PLAN, run)

    launch(work, ranks=2)


class Adapted(nn.Module):
    """A frozen layer, and a narrow detour around it that is trained."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.a, self.b = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)

    def forward(self, x):
        return self.b(self.a(x)) + self.base(x)


def test_adapters_beside_frozen_layers_are_trained_alone():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(Adapted(8, 12), nn.Tanh(), Adapted(12, 8)).double()

    plan = {"0.base": "column", "0.b": "column", "2.base": "row", "2.a": "row"}
    x = torch.linspace(-1, 1, 48, dtype=torch.float64).view(2, 3, 8)

    def run(model, group):
        out = model(x)
        out.square().sum().backward()
        return out.square().sum().item()

    def work(world):
        assert_parity(world, make, plan, run)
        # The frozen parts get no gradient, and the optimizer's norm counts the others once.
        plain, model = make(), tensor_parallel(make(), world, plan)
        for module in (plain, model):
            run(module, None)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        torch.testing.assert_close(clip_grad_norm_(model, 1.0), norm, **CLOSE)

    launch(work, ranks=2)


def test_logits_may_be_gathered_for_whoever_wants_them_whole():
    def make():
        return net()

    plan = NET_PLAN | {"head": Vocab(gather=True)}

    def run(model, group):
        logits = model(batch()[0])
        loss = next_token_loss(logits, batch()[1])
        loss.backward()
        assert logits.shape[-1] == VOCAB
        return [loss.item(), *logits.argmax(-1).flatten().tolist()]

    def work(world):
        assert_parity(world, make, plan, run)

    launch(work, ranks=2)


@pytest.mark.parametrize("watched", ["check", "slow links", "anomalies", "saved elsewhere"])
def test_it_trains_the_same_when_watched(watched):
    """Every collective compared before it runs; other algorithms, chosen for the links; nan looked
    for after each backward; and what is kept for backward kept in copies."""

    def steps(world):
        model = cut(net(), world, sequence_parallel=True, regather=True)
        return train(model, world), full_state_dict(model)

    def work(world):
        if watched == "anomalies":
            with torch.autograd.detect_anomaly(check_nan=True):
                return steps(world)
        if watched == "saved elsewhere":
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                return steps(world)
        return steps(world)

    cluster = Cluster(2, 2, inter=Link(gbit_s=10, latency_us=50)) if "slow" in watched else None
    settings = {"check": watched == "check", "cluster": cluster}
    want = alone(net)
    for got in launch(work, ranks=4, **settings):
        assert_same(got, want)


# Numbers of other kinds


def test_under_autocast_it_runs_and_comes_close():
    """Backward inside the block and outside of it."""

    def gradients(model, group, inside):
        x, y = batch()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
            loss = loss_of(logits, y, group)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return loss.item(), logits.dtype

    def work(world):
        results = {}
        for make in (gpt, net):
            for sequence in BOTH:
                for inside in (False, True):
                    model = cut(make(dtype=torch.float32), world, sequence_parallel=sequence)
                    told = gradients(model, world, inside)
                    results[make.__name__, sequence, inside] = *told, whole_gradients(model)
        return results

    for results in launch(work, ranks=2):
        for (name, sequence, inside), (loss, dtype, got) in results.items():
            plain = {"gpt": gpt, "net": net}[name](dtype=torch.float32)
            want, its_dtype = gradients(plain, None, inside)
            assert loss == pytest.approx(want, rel=1e-2) and dtype == its_dtype
            for key, parameter in plain.named_parameters():
                error = (got[key] - parameter.grad).norm() / parameter.grad.norm()
                assert error < 0.05, (name, sequence, inside, key)


def test_layers_take_what_autocast_has_made_narrow():
    def work(world):
        model = tensor_parallel(mlp(dtype=torch.float32), world, MLP_PLAN)
        plain = mlp(dtype=torch.float32)
        told = []
        for module in (model, plain):
            x = torch.linspace(-1, 1, 24, dtype=torch.bfloat16).view(3, 8).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = module(x)
            y.float().square().sum().backward()
            told.append((y.detach(), x.grad))
        return told, [whole_gradients(model), {n: p.grad for n, p in plain.named_parameters()}]

    for told, gradients in launch(work, ranks=2):
        for got, want in (told, gradients):
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.02)


def test_modules_in_other_dtypes_keep_them():
    def work(world):
        results = []
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            for sequence in BOTH:
                model = cut(net(dtype=dtype), world, sequence_parallel=sequence)
                loss = loss_of(model(batch()[0]), batch()[1], world)
                loss.backward()
                kinds = {p.dtype for p in model.parameters()} | {
                    p.grad.dtype for p in model.parameters()
                }
                results.append((dtype, loss.item(), kinds))
        return results

    want = loss_of(net()(batch()[0]), batch()[1]).item()
    for results in launch(work, ranks=2):
        for dtype, loss, kinds in results:
            assert kinds == {dtype}
            assert loss == pytest.approx(want, rel=0.02 if dtype is torch.bfloat16 else 1e-5)


# Without gradients, and torch's own short cuts


def test_evaluation_between_steps_leaves_them_as_they_are():
    def work(world):
        results = []
        for sequence in BOTH:
            model = cut(net(), world, sequence_parallel=sequence)
            optimizer, outputs = adamw(model), []
            for step in range(3):
                with torch.no_grad():
                    outputs.append(model.eval()(batch(9)[0]).clone())
                with torch.inference_mode():
                    assert torch.equal(model(batch(9)[0]), outputs[-1])
                # One that nobody differentiates, and one that nobody differentiates on one rank.
                model.train()(batch(8)[0])
                optimizer.zero_grad()
                x, y = batch(step)
                loss_of(model(x), y, world).backward()
                optimizer.step()
            results.append((outputs, full_state_dict(model)))
        return results

    plain = net()
    optimizer, outputs = adamw(plain), []
    for step in range(3):
        outputs.append(plain(batch(9)[0]).detach())
        optimizer.zero_grad()
        loss_of(plain(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
    results = launch(work, ranks=2)
    for parts in zip(*results, strict=True):
        for got, want in zip(zip(*(p[0] for p in parts), strict=True), outputs, strict=True):
            torch.testing.assert_close(torch.cat(got, -1), want, **CLOSE)
        for _, state in parts:
            torch.testing.assert_close(state, dict(plain.state_dict()), **CLOSE)


def test_an_encoder_layer_of_torch_may_be_cut_in_its_mlp_and_evaluated():
    """In eval mode it has a fast path of its own, which reads weights and calls no layer."""

    def make():
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).double()

    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def outputs(model):
        with torch.no_grad():
            evaluated = model.eval()(x)
        return evaluated, model.train()(x).detach()

    def work(world):
        return outputs(tensor_parallel(make(), world, {"linear1": "column", "linear2": "row"}))

    for got in launch(work, ranks=2):
        torch.testing.assert_close(got, outputs(make()), **CLOSE)


# Optimizers and the meta device


def test_an_optimizer_built_before_steps_the_parts():
    def work(world):
        model = gpt()
        optimizer, objects = adamw(model), list(model.parameters())
        cut(model, world)
        assert [id(p) for p in model.parameters()] == [id(p) for p in objects]
        return train(model, world, optimizer=optimizer), full_state_dict(model)

    want = alone(gpt)
    for got in launch(work, ranks=2):
        assert_same(got, want)


def test_gradients_that_are_there_are_cut_with_their_weights():
    def work(world):
        model, plain = gpt(), gpt()
        for module in (model, plain):
            loss_of(module(batch(1)[0]), batch(1)[1]).backward()
        cut(model, world)
        loss_of(model(batch(2)[0]), batch(2)[1], world).backward()
        loss_of(plain(batch(2)[0]), batch(2)[1]).backward()
        return whole_gradients(model), {n: p.grad for n, p in plain.named_parameters()}

    for got, want in launch(work, ranks=2):
        got.pop("head.weight")
        torch.testing.assert_close(got, want, **CLOSE)


META = {"layers": 6, "hidden": 32, "heads": 4, "vocab": 33, "seq": 8}


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_made_on_the_meta_device_is_the_one_that_its_seed_draws(tied):
    def work(world):
        with torch.device("meta"):
            model = GPT(GPTConfig(**META, tied=tied))
        objects = [id(p) for p in model.parameters()]
        # The first rank's numbers count.
        torch.manual_seed(3 + world.rank)
        with memory(model) as m:
            cut(model, world)
        assert [id(p) for p in model.parameters()] == objects
        assert (model.head.weight is model.embed.weight) == tied
        own = sum(p.numel() for p in model.parameters()) * 4
        return full_state_dict(model), m.peak_total, m.live_total, own

    torch.manual_seed(3)
    plain = GPT(GPTConfig(**META, tied=tied))
    want = plain.state_dict()
    whole = sum(p.numel() for p in plain.parameters()) * 4
    largest = max(p.numel() for p in plain.parameters()) * 4
    for ranks in (1, 2, 4):
        for state, peak, live, own in launch(work, ranks=ranks):
            assert list(state) == list(want)
            assert all(torch.equal(state[name], value) for name, value in want.items())
            # While a layer is cut: whole, on its way, its part.
            assert own <= live <= own + 1000 and peak <= own + 3 * largest
            assert ranks == 1 or peak < 0.8 * whole


# Backward, where it is unusual


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 12), nn.Linear(8, 12)

    def forward(self, x):
        return self.q(x), self.k(x)


def test_a_backward_knows_nothing_of_the_one_before_through_the_same_graph():
    def asked(model):
        x = torch.ones(3, 8, dtype=torch.float64, requires_grad=True)
        a, b = model(x)
        (bias,) = torch.autograd.grad(a.sum(), model.q.bias, retain_graph=True)
        (of_b,) = torch.autograd.grad(b.sum(), x, retain_graph=True)
        (of_both,) = torch.autograd.grad((a.square().sum(), b.sum()), x)
        return bias, of_b, of_both

    def work(world):
        torch.manual_seed(0)
        model, plain = Pair().double(), Pair().double()
        plain.load_state_dict(model.state_dict())
        tensor_parallel(model, world, {"[qk]": "column"})
        (bias, *got), (_, *want) = asked(model), asked(plain)
        torch.testing.assert_close(got, want, **CLOSE)
        return bias

    for bias in launch(work, ranks=2):
        torch.testing.assert_close(bias, torch.full((6,), 3.0, dtype=torch.float64))


def test_the_sum_of_the_input_gradient_goes_on_while_weight_gradients_are_computed():
    """Overlap: the share of a column layer's backward that is computed beside the background's
    all_reduce. The gradient of the weight is half of it; one after the other it would be none."""

    def overlap(line):
        sums = [s for t in line.tracks() if t for s in line.spans(t) if s.name == "all_reduce"]
        assert sums and not [s for s in line.spans(0) if s.name == "all_reduce"]
        start, end = sums[0].start, sums[-1].end
        computed = [s for s in line.spans(0) if s.kind == "compute"]
        beside = sum(max(0, min(s.end, end) - max(s.start, start)) for s in computed)
        return beside / sum(s.seconds for s in computed)

    def work(world):
        layer = ColumnParallelLinear(512, 2048, world, bias=False)
        x = torch.ones(1024, 512, requires_grad=True)
        shares = []
        for _ in range(4):
            out, grad = layer(x), torch.ones(1024, 1024)
            with timeline() as line:
                out.backward(grad)
            shares.append(overlap(line))
        return max(shares)

    # 2 MB take about as long as the gradient of the weight.
    slow = Cluster(1, 2, intra=Link(gbit_s=0.3))
    for share in launch(work, ranks=2, cluster=slow):
        assert share > 0.2


@pytest.mark.parametrize("end", ["raised ArithmeticError: burst", "was killed by SIGKILL"])
def test_a_rank_lost_in_the_middle_of_backward_ends_the_launch(end):
    def work(world):
        def burst(_):
            if world.rank == 1:
                if "killed" in end:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ArithmeticError("burst")

        model = cut(gpt(), world)
        model.blocks[0].mlp.register_forward_hook(
            lambda m, i, out: out.register_hook(burst) and None
        )
        loss_of(model(batch()[0]), batch()[1], world).backward()

    with pytest.raises(RankError, match=f"rank 1 of 2 {end}"):
        launch(work, ranks=2, timeout=20)


def test_a_backward_that_raised_on_all_ranks_is_repeated():
    def work(world):
        armed = [True]

        def burst(_):
            if armed:
                armed.clear()
                raise ArithmeticError("burst")

        model = cut(net(q_norm=True), world, sequence_parallel=True)
        model.blocks[0].mlp.register_forward_hook(
            lambda m, i, out: out.register_hook(burst) and None
        )
        with pytest.raises(ArithmeticError):
            loss_of(model(batch()[0]), batch()[1], world).backward()
        return train(model, world), full_state_dict(model)

    want = alone(net, q_norm=True)
    for got in launch(work, ranks=2):
        assert_same(got, want)


# What is alive


class Cross(nn.Module):
    """Its queries come from one tensor, its keys and values from another."""

    def __init__(self):
        super().__init__()
        self.head_dim = 4
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, y):
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for t in (self.q(x), self.k(y), self.v(y))
        )
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_activations_die_with_the_step_and_not_with_the_next_collection():
    def watched(model, run):
        """How many of the tensors that went into or came out of a module are left after `run`."""
        alive = []

        def note(_, inputs, out):
            alive.extend(weakref.ref(t) for t in (*inputs, out))

        hooks = [m.register_forward_hook(note) for m in model.modules() if m is not model]
        gc.collect()
        gc.disable()
        try:
            run()
            return sum(reference() is not None for reference in alive), len(alive)
        finally:
            gc.enable()
            for hook in hooks:
                hook.remove()

    def work(world):
        x, y = batch()
        results = {}
        for sequence in BOTH:
            model = cut(net(q_norm=True, drop=0.1), world, sequence_parallel=sequence)

            def step(model=model):
                loss_of(model(x.clone()), y, world).backward()

            def look(model=model):
                with torch.no_grad():
                    model(x.clone())

            results["step", sequence] = watched(model, step)
            results["evaluation", sequence] = watched(model, look)
        cross = nn.Sequential(Cross().double())
        tensor_parallel(cross, world, {"0.[qkv]": "column", "0.o": "row"})

        def attend():
            one, other = torch.ones(2, 2, 4, WIDTH, dtype=torch.float64).mul(0.5).unbind()
            cross[0](one.requires_grad_(), other.requires_grad_()).sum().backward()

        results["cross"] = watched(cross, attend)
        return results

    for results in launch(work, ranks=2):
        for what, (left, seen) in results.items():
            assert left == 0 and seen > 5, what


def test_a_model_that_is_dropped_is_freed():
    def work(world):
        left = []
        for sequence in BOTH:
            model = cut(net(q_norm=True, drop=0.1), world, sequence_parallel=sequence)
            train(model, world, steps=1)
            seen = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
            del model
            gc.collect()
            left.append(sum(reference() is not None for reference in seen))
        return left

    assert launch(work, ranks=2) == [[0, 0]] * 2
