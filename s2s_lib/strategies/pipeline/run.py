"""A schedule, run: one executor for all of them.

    who holds what    each rank its stages: their weights, gradients and optimizer state, and the
                      activations of the micro-batches in flight
    who sends what    for each micro-batch and each boundary between ranks, the activations forward
                      and their gradients backward; once a batch an all_gather of 72 bytes a rank;
                      an all_reduce of the gradients of tied weights

What a stage returns is the one argument of the next, as in `nn.Sequential`: a tensor, or tensors in
tuples, lists and dicts. The executor walks through the rank's program (program.py) and knows four
things to do: F, B, I and W of one micro-batch through one stage (batch.py).

torch.distributed.pipelining does more: stages on different devices, compiled stages, gradients
reduced over replicas as actions of the schedule. And a rank may begin a batch before the last one
has ended the batch before; here all begin together, so that bad input is found before anything
moves.
"""

import contextlib
import json
import zlib
from collections.abc import Callable

import torch
from torch import nn

from s2s_lib.collectives.functions import all_gather
from s2s_lib.ranks.connection import current
from s2s_lib.ranks.group import Group, check_group
from s2s_lib.strategies.grads import spread_over
from s2s_lib.strategies.pipeline import values
from s2s_lib.strategies.pipeline.accelerator import Accelerator
from s2s_lib.strategies.pipeline.actions import Schedule, check_schedule
from s2s_lib.strategies.pipeline.agree import (
    EVALUATE,
    OUTPUT,
    REFUSED,
    STEP,
    Beginning,
    agree_on_schedule,
    check_same_batch,
)
from s2s_lib.strategies.pipeline.batch import Batch
from s2s_lib.strategies.pipeline.halves import Halves
from s2s_lib.strategies.pipeline.mail import Mail, walk
from s2s_lib.strategies.pipeline.partition.stage import Stage
from s2s_lib.strategies.pipeline.program import program
from s2s_lib.strategies.pipeline.ties import Ties
from s2s_lib.strategies.replicas import exchange

# Of how many kinds of batch the shapes of the messages are kept.
REMEMBERED = 64


class Pipeline(nn.Module):
    """The stages of this rank, as a part of a model that runs over all ranks of `group`.

    `stages` is the module of this rank's stage; a list of them where the schedule gives a rank
    several; or all of the model's stages, as `split` returns them, of which each rank keeps its
    own. The whole model is none of these: given on every rank it is taken for a stage on each, and
    trains P times as deep wherever its output fits its input. `tied` lists weights that live in
    several stages (default: what `split` has noted on them).

    `step(x, y)` runs forward and backward of one batch; afterwards `.grad` is what one process
    would have, added to what was there. `loss_fn(output, target)` is a mean over the terms of a
    micro-batch, and `count(target)` says how many those are, so that the batch's loss is the mean
    over all of its terms. The default counts the target's rows; where some tokens do not count, or
    micro-batches have rows of different lengths, `count=lambda y: (y != -100).sum()`. A stage may
    be a DDP, or with whole backwards a ZeRO: its replicas exchange once a batch, beside what other
    stages still compute, and each replica's loss is the mean over its own terms.

    Construction: the ranks exchange some hundred bytes; ValueError on all of them if the group has
    another size than the schedule, a rank has other stages than the schedule gives it, or the
    ranks disagree on the schedule. Tied weights take the value they have in the first stage that
    has them. Each batch: an all_gather of 72 bytes a rank; the first of its shapes also tells what
    its messages look like.

    Modules see one micro-batch at a time: batch norm normalises over that alone, and each stage's
    dropout draws from its own rank's random numbers. `evaluate` does not call `.eval()`. What a
    stage gave stays in memory until its backward. Tensors are on the CPU.
    """

    def __init__(
        self,
        stages: nn.Module | list[nn.Module],
        group: Group,
        schedule: Schedule,
        loss_fn: Callable | None = None,
        count: Callable = values.rows,
        tied: list[dict[int, str]] | None = None,
    ):
        super().__init__()
        check_group(group)
        check_schedule(schedule)
        own = schedule.stages_of(group.rank) if group.rank < len(schedule.ranks) else []
        modules = as_list(stages)
        if len(modules) == schedule.stages:
            modules = [modules[number] for number in own]
        tied = found_tied(modules) if tied is None else list(tied)
        module_of = dict(zip(own, modules, strict=False))
        agree_on_schedule(schedule, group, modules, module_of, tied)
        self.group, self.schedule = group, schedule
        self.loss_fn, self.count = loss_fn, count
        self.stages, self.module_of = nn.ModuleList(modules), module_of
        self.ties = Ties(tied, module_of, group, schedule)
        spread_over(self, group, self.ties.copies, self.ties.weights)
        self.training_program = program(schedule, group.rank) if schedule.trains else None
        self.forward_program = program(schedule.forward(), group.rank)
        split = {action.stage for action in schedule.ranks[group.rank] if action.kind == "I"}
        self.halves = {number: Halves(self.module_of[number]) for number in split}
        self.accelerator = Accelerator(current().cluster)
        # What each rank said when a batch began -> descriptions of that batch's messages.
        self.known = {}

    def step(self, x=None, y=None) -> torch.Tensor | None:
        """Forward and backward of one batch; the loss, on the rank of the last stage, else None.

        The rank of the first stage gives `x`, that of the last `y`; what others give is not looked
        at. Each is cut along dim 0 into micro-batches as equal as can be, or is a list of them.
        """
        if self.training_program is None:
            raise ValueError(
                f"{self.schedule.name} has no backward: call the pipeline, or evaluate"
            )
        return self.run(STEP, x, y).loss

    @torch.no_grad()
    def evaluate(self, x=None, y=None) -> torch.Tensor | None:
        """The loss of one batch, forward alone; on the rank of the last stage, else None."""
        return self.run(EVALUATE, x, y).loss

    @torch.no_grad()
    def forward(self, x=None):
        """The output for one batch, without gradient; on the rank of the last stage, else None."""
        outputs = self.run(OUTPUT, x, None).outputs
        return values.join_rows([outputs[micro] for micro in sorted(outputs)]) if outputs else None

    def durations(self) -> dict[str, list[float]]:
        """On a cluster with a gpu: how long it was given for each stage, in seconds, as `simulate`
        takes it. After at least one `step`; all ranks of the group call it."""
        mine = [(stage, kind, s) for (stage, kind), s in self.accelerator.seconds.items()]
        said = [json.loads(part) for part in exchange(json.dumps(mine).encode(), self.group)]
        if not all(said):
            raise ValueError(
                "durations are of an emulated accelerator: launch(..., cluster=Cluster(..., "
                "gpu=GPU(...))), and a step before"
            )
        known = {(stage, kind): s for part in said for stage, kind, s in part}
        numbers = range(self.schedule.stages)
        return {
            "forward": [known.get((stage, "F"), 0.0) for stage in numbers],
            "backward": [
                known.get((stage, "I"), known.get((stage, "B"), 0.0)) for stage in numbers
            ],
            "weight": [known.get((stage, "W"), 0.0) for stage in numbers],
        }

    def run(self, mode, x, y) -> Batch:
        """One batch through the pipeline."""
        try:
            given = self.cut(mode, x, y)
            mine = self.summary(
                mode, *given[:2], by_hand=(isinstance(x, list), isinstance(y, list))
            )
        except Exception as error:
            # The others are told, or they would wait for this rank.
            self.tell(Beginning(REFUSED), error)
            raise
        said = self.tell(mine)
        check_same_batch(said)
        mail = Mail(self.group, self.known.get(said), failures=sum(mine.given_up for mine in said))
        try:
            batch = self.go(mode == STEP, mail, *given)
        except BaseException:
            mail.give_up()
            raise
        self.known.setdefault(said, mail.told)
        if len(self.known) > REMEMBERED:
            # On all ranks the same: they are put in on all in one order.
            del self.known[next(iter(self.known))]
        return batch

    def go(self, training, mail, inputs, targets, shares) -> Batch:
        """Walk through the program with one batch."""
        self.accelerator.begin()
        batch = Batch(self, training, inputs, targets, shares)
        with self.ties.summed() if training else contextlib.nullcontext():
            steps = self.training_program if training else self.forward_program
            for action in walk(steps, mail, batch.here, self.accelerator.wait):
                batch.act(action)
            batch.settle()
        return batch

    def cut(self, mode, x, y):
        """This rank's micro-batches of inputs and of targets, and each target's share of the loss;
        None for what it does not need."""
        inputs = targets = shares = None
        if mode == STEP and not torch.is_grad_enabled():
            raise ValueError("step under no_grad gives no gradients: call evaluate, or leave it")
        self.ties.check()
        if 0 in self.module_of:
            inputs = values.cut(x, self.schedule.microbatches, "x")
            if any(leaf.requires_grad for value in inputs for leaf in values.tensors(value)):
                raise ValueError("x requires a gradient and would get none: give x.detach()")
        if self.schedule.stages - 1 in self.module_of and mode != OUTPUT:
            if self.loss_fn is None:
                raise ValueError("a loss needs Pipeline(stages, group, schedule, loss_fn)")
            targets = values.cut(y, self.schedule.microbatches, "y")
            counts = [float(self.count(target)) for target in targets]
            if min(counts) < 0 or not sum(counts):
                raise ValueError(f"count says {counts}: the loss would be a mean of nothing")
            shares = [count / sum(counts) for count in counts]
        return inputs, targets, shares

    def summary(self, mode, inputs, targets, by_hand) -> Beginning:
        """How this rank begins, for the others; `by_hand`: whether the user cut x, and y."""
        flags = [
            (m.training, [(p.requires_grad, p.dtype) for p in m.parameters()]) for m in self.stages
        ]
        flags.append(torch.is_autocast_enabled("cpu"))
        shapes = [values.flatten(value, "x")[1] for value in inputs or ()]
        number = hash((str(flags), str(shapes))) & 0x7FFFFFFFFFFFFFFF
        cuts = []
        for given, hand in zip((inputs, targets), by_hand, strict=True):
            rows = [values.rows(value) for value in given or ()]
            cuts += [sum(rows), zlib.crc32(str(rows).encode()), hand] if rows else [-1, 0, 0]
        return Beginning(mode, number, *cuts, current().given_up)

    def tell(self, mine: Beginning, error: Exception | None = None) -> tuple[Beginning, ...]:
        """How every rank begins, the same on all of them; RuntimeError with the words of a rank
        that could not."""
        said = all_gather(torch.tensor([mine]), self.group).tolist()
        said = tuple(Beginning(*row) for row in said)
        refused = [rank for rank, beginning in enumerate(said) if beginning.mode == REFUSED]
        if refused:
            words = b"" if error is None else f"{type(error).__name__}: {error}".encode()
            told = exchange(words, self.group)[refused[0]].decode()
            if error is None:
                raise RuntimeError(f"rank {refused[0]} could not begin: {told}")
        return said


def found_tied(modules) -> list[dict[int, str]]:
    """What `split` has noted on its stages, one of which may be inside a DDP or ZeRO."""
    inner = [m if isinstance(m, Stage) else getattr(m, "module", None) for m in modules]
    return next((list(module.tied) for module in inner if isinstance(module, Stage)), [])


def as_list(stages) -> list[nn.Module]:
    """The modules given: one alone, or several in a list."""
    alone = isinstance(stages, nn.Module) and not isinstance(stages, nn.ModuleList)
    return [stages] if alone else list(stages)
