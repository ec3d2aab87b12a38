"""What the tests of the mesh train, at which layouts, and the one process that judges them.

`Layout` is one way to lay a training run out over ranks; `matrix(ranks)` lists all of them, in
which each setting is seen with each other. `trained` takes some steps at a layout and `alone` takes
them with the plain GPT in a plain loop with torch's own clipping. `assert_same` compares what every
rank saw, and puts the weights together by its own arithmetic: which rank stands where in the mesh,
which rows or columns of a weight tensor parallelism gives it, and which piece of those ZeRO leaves
it. So a rank that sits in a wrong place, and a part that is a wrong one, are seen.
"""

import functools
import itertools
import json
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import nn

from s2s_lib import GPT, GPTConfig, clip_grad_norm_, launch, next_token_loss
from s2s_lib.course.plans import GPT_PLAN
from s2s_lib.course.reference import one_thread
from s2s_lib.strategies.tensor.plan import matches
from s2s_lib.training.config import ConfigError, load_config
from s2s_lib.training.parallel import parallelize

# 8 heads, 32 words, 8 tokens, 24 numbers inside the MLP: all cut over 8 ranks.
SHAPE = {"hidden": 16, "heads": 8, "vocab": 32, "seq": 8, "mlp_hidden": 24}
ROWS, STEPS, CLIP = 8, 3, 0.1
TOLERANCE = 1e-9
ORDERS = ["-".join(order) for order in itertools.permutations(("dp", "pp", "tp"))]
SCHEDULES = ("gpipe", "one_f_one_b", "interleaved")
# Their backward comes in halves, which ZeRO refuses.
ZERO_BUBBLE = ("zb_h1", "zbv")


@dataclass(frozen=True)
class Layout:
    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    hybrid: int | None = None
    sequence: bool = False
    schedule: str = "one_f_one_b"
    tied: bool = False
    recompute: bool = False
    order: str = "dp-pp-tp"
    dropout: float = 0.0
    precision: str = "float64"

    def __str__(self):
        said = [f"dp{self.dp}", f"tp{self.tp}", f"pp{self.pp}"]
        said += [f"zero{self.zero}"] if self.zero else []
        said += [self.schedule] if self.pp > 1 else []
        for field in fields(self)[4:]:
            value = getattr(self, field.name)
            if value != field.default and field.name != "schedule":
                said.append(field.name if value is True else f"{field.name}:{value}")
        return " ".join(said)

    @property
    def ranks(self):
        return self.dp * self.tp * self.pp

    @property
    def stages(self):
        return self.pp * (2 if self.schedule in ("interleaved", "zbv") else 1)

    @property
    def layers(self):
        return max(2, self.stages)

    @property
    def micro(self):
        """How many micro-batches a replica makes of its rows."""
        return min(4 if self.pp > 1 else 2, ROWS // self.dp)

    def settings(self) -> dict:
        """What a YAML file would say."""
        model = SHAPE | {"layers": self.layers, "tied": self.tied, "dropout": self.dropout}
        return {
            "data_parallel_size": self.dp,
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "zero_stage": self.zero,
            "hybrid_shard_size": self.hybrid,
            "sequence_parallel": self.sequence,
            "pipeline_schedule": self.schedule,
            "activation_checkpointing": self.recompute,
            "mesh_order": self.order.split("-"),
            "precision": self.precision,
            "global_batch": ROWS,
            "gradient_accumulation": self.micro,
            "model": model,
        }

    def config(self):
        """The settings as the library reads them from a file; ConfigError for what cannot be."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "layout.yaml"
            path.write_text(json.dumps(self.settings()))
            return load_config(path)

    def place(self, number) -> dict:
        """Axis -> index of the rank of this number in the world; the last axis varies fastest."""
        place = {}
        for axis in reversed(self.order.split("-")):
            number, place[axis] = divmod(number, getattr(self, axis))
        return place


# All layouts


def matrix(ranks: int, **more) -> list[Layout]:
    """Every (dp, tp, pp) of so many ranks x ZeRO stage and, from four replicas on, hybrid shard x
    sequence parallel x schedule x what else is given, a list each. Some of them are refused."""
    layouts = []
    for dp, tp, pp in itertools.product(range(1, ranks + 1), repeat=3):
        if dp * tp * pp == ranks:
            cuts = {
                "zero": range(4) if dp > 1 else [0],
                "hybrid": [None, 2] if dp > 2 else [None],
                "sequence": [False, True] if tp > 1 else [False],
                "schedule": (*SCHEDULES, *ZERO_BUBBLE) if pp > 1 else ["one_f_one_b"],
            }
            choices = cuts | more
            for chosen in itertools.product(*choices.values()):
                layouts.append(Layout(dp, tp, pp, **dict(zip(choices, chosen, strict=True))))
    return [layout for layout in layouts if layout.zero or not layout.hybrid]


def cannot_be(layout: Layout) -> bool:
    """A weight in two stages would be cut in two different ways, or averaged twice where one rank
    has both; halves of a backward would find the weights gone."""
    if layout.pp == 1:
        return False
    halves = layout.zero and layout.schedule in ZERO_BUBBLE
    return bool(halves or layout.tied and (layout.zero or layout.schedule == "zbv"))


def spread(layouts: list[Layout]) -> list[Layout]:
    """A few of the layouts in which every pair of settings that is in any of them still is: one
    after the other the layout with most of the pairs that are left."""
    pairs = {layout: pairs_of(layout) for layout in layouts}
    left, chosen = set().union(*pairs.values()), []
    while left:
        chosen.append(max(layouts, key=lambda layout: len(pairs[layout] & left)))
        left -= pairs[chosen[-1]]
    return chosen


def pairs_of(layout) -> set:
    settings = asdict(layout)
    settings |= {axis: settings[axis] > 1 for axis in ("dp", "tp", "pp")}
    if layout.pp == 1:
        # Where all micro-batches go through one stage, the order is nobody's.
        settings["schedule"] = None
    return set(itertools.combinations(settings.items(), 2))


# The training


def batch(step):
    """Tokens and targets [ROWS, 8] of the whole global batch."""
    random = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(SHAPE["vocab"], (ROWS, SHAPE["seq"] + 1), generator=random)
    return tokens[:, :-1], tokens[:, 1:]


def rows_of(group, step):
    return [t.chunk(group.size)[group.rank] for t in batch(step)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def plain_steps(model, steps=STEPS, begin=lambda step: None):
    """Losses, norms, the loss after the last step, and weights of one process: a plain loop and
    torch's clipping. `begin` is told each step's number, and None before what is evaluated."""
    model.double()
    optimizer, losses, norms = adamw(model), [], []
    with one_thread():
        for step in range(steps):
            begin(step)
            x, y = batch(step)
            optimizer.zero_grad()
            loss = next_token_loss(model(x), y)
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            losses.append(float(loss.detach()))
        begin(None)
        x, y = batch(steps)
        losses.append(float(next_token_loss(model(x), y).detach()))
    assert min(norms, default=1) > CLIP, "clipping never acted"
    return losses, norms, dict(model.named_parameters())


def plain(layers=2, tied=False, **more):
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=layers, tied=tied, **SHAPE, **more))


@functools.cache
def alone(layers=2, tied=False, steps=STEPS):
    """`plain_steps` of the plain GPT."""
    return plain_steps(plain(layers, tied), steps)


def built(layout, world, model=None, **more):
    """The GPT of the layout, as shapes without memory, made parallel."""
    if model is None:
        with torch.device("meta"):
            model = GPT(layout.config().gpt())
    return parallelize(model, layout.config(), world, **more)


def trained(world, layout, parallel=None, steps=STEPS):
    """What this rank saw, and what it has at rest of each parameter."""
    parallel = parallel or built(layout, world)
    optimizer, losses, norms = adamw(parallel), [], []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(parallel.step(*rows_of(parallel.dp, step)))
        norms.append(clip_grad_norm_(parallel, CLIP))
        optimizer.step()
    losses.append(parallel.evaluate(*rows_of(parallel.dp, steps)))
    weights = {
        name.rpartition("module.")[2]: p.detach().clone() for name, p in parallel.named_parameters()
    }
    return list(map(float, losses)), list(map(float, norms)), weights


# The comparison


def assert_same(layout, results, want, plan=GPT_PLAN, close=TOLERANCE):
    """`results` are those of `trained` on all ranks, in the order of the world that was laid out;
    `want` those of `alone`."""
    losses, norms, weights = want
    for rank, (got_losses, got_norms, _) in enumerate(results):
        for what, got, expected in (("losses", got_losses, losses), ("norms", got_norms, norms)):
            apart = max(abs(a - b) for a, b in zip(got, expected, strict=True))
            assert apart <= close, f"{layout}: {what} on rank {rank} are {got} and not {expected}"
        assert (got_losses, got_norms) == results[0][:2], f"{layout}: rank {rank} has another loss"
    assert_weights(layout, [weights for *_, weights in results], weights, plan, close)


def assert_weights(layout, parts, want, plan, close):
    """Each rank's part of each parameter is the part that its place in the mesh says."""
    stages = {}
    for number, held in enumerate(parts):
        place = layout.place(number)
        for name, part in held.items():
            of_stage = stages.setdefault((name, place["pp"]), {})
            of_stage.setdefault(place["tp"], {})[place["dp"]] = part
    # A tied weight has two names, and in a pipeline may be in two stages.
    missing = want.keys() - {name for name, _ in stages}
    assert not missing, f"{layout}: no rank has {sorted(missing)}"
    for (name, pp), by_tp in stages.items():
        whole = want["embed.weight" if name not in want else name].detach()
        dim = cut_along(name, plan) if layout.tp > 1 else None
        assert len(by_tp) == layout.tp, f"{layout}: {name}"
        for tp, replicas in by_tp.items():
            expected = whole if dim is None else whole.chunk(layout.tp, dim)[tp]
            shard = (layout.hybrid or layout.dp) if layout.zero else 1
            assert sorted(replicas) == list(range(layout.dp)), f"{layout}: {name}"
            for first in range(0, layout.dp, shard):
                pieces = [replicas[dp].flatten() for dp in range(first, first + shard)]
                got = torch.cat(pieces)
                where = f"{layout}: {name} of stage rank {pp}, part {tp}, copy {first // shard}"
                assert got.numel() == expected.numel(), where
                apart = float((got - expected.flatten()).abs().max())
                assert apart <= close, f"{where} is {apart:.1e} away"


def cut_along(name, plan):
    module = name.removesuffix(".weight").removesuffix(".bias")
    style = next((style for pattern, style in plan.items() if matches(module, pattern)), None)
    if style == "row":
        return None if name.endswith(".bias") else 1
    return None if style is None else 0


def trained_at(world, layouts, steps=STEPS):
    """`trained` at one layout after the other."""
    results = []
    for layout in layouts:
        try:
            results.append(trained(world, layout, steps=steps))
        except Exception as error:
            raise RuntimeError(f"at {layout}: {type(error).__name__}: {error}") from error
    return results


def assert_parity(*layouts: Layout, steps=STEPS):
    """Layouts of as many ranks each take the steps of one process."""
    results = launch(trained_at, layouts, steps, ranks=layouts[0].ranks, timeout=180)
    for layout, *of_ranks in zip(layouts, *results, strict=True):
        assert_same(layout, of_ranks, alone(layout.layers, layout.tied, steps))


def refusal(layout: Layout) -> str | None:
    """The words with which the configuration refuses the layout, or None."""
    try:
        layout.config()
    except ConfigError as error:
        return str(error)
    return None
