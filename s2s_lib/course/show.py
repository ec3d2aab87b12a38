"""What a lesson shows besides pictures: the library's own source, and the table of the course.

Both are Markdown, so they read in a notebook that is not trusted yet, on a site and on GitHub; and
a lesson whose stored source is no longer the library's fails as a test, with the difference.
"""

import inspect
import sys
import textwrap
from dataclasses import dataclass, replace

from s2s_lib.meters.units import human_bytes


def show(*objects) -> None:
    """Show the source of functions, classes or methods; printed where there is no notebook."""
    for thing in objects:
        source = source_of(thing)
        fence = "````" if "```" in source else "```"
        _display(f"{fence}python\n{source}\n{fence}", plain=source)


def source_of(thing) -> str:
    """The source of a function, class or method, moved to the left margin."""
    try:
        return textwrap.dedent(inspect.getsource(thing)).rstrip()
    except (TypeError, OSError) as error:
        raise ValueError(
            f"no Python source to show for {thing!r}; show() takes functions, classes and methods "
            "that are written in Python, in a file or in a cell"
        ) from error


def _display(markdown, plain):
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        ipython.display.display(ipython.display.Markdown(markdown))
    else:
        print(plain)


@dataclass(frozen=True)
class Row:
    """What a rank holds, and what it sends in a step, in bytes."""

    strategy: str
    weights: float
    gradients: float
    optimizer: float
    sent_per_step: float

    @property
    def held(self) -> float:
        return self.weights + self.gradients + self.optimizer


def row_one_process(parameters: int) -> Row:
    """Training alone: for each of P parameters 4 bytes, as many of gradient, 8 of AdamW state."""
    return Row("one process", 4 * parameters, 4 * parameters, 8 * parameters, 0)


def row_ddp(parameters: int, ranks: int) -> Row:
    """Each of W ranks holds what one process does; an all_reduce sends 2(W-1)/W of the gradients.

    That is the mean over the ranks, and each rank's own number where W divides every bucket.
    """
    alone = row_one_process(parameters)
    sent = 2 * (ranks - 1) / ranks * alone.gradients
    return Row(f"DDP, {ranks} ranks", alone.weights, alone.gradients, alone.optimizer, sent)


def row_zero(parameters: int, ranks: int, stage: int) -> Row:
    """ZeRO at stage 0 to 3: of W ranks each holds 1/W of the optimizer state (from stage 1 on), of
    the gradients (2) and of the weights (3). It sends (W-1)/W of the weights' bytes to reduce
    gradients and as much for each gather of the weights: one a step, at stage 3 two. (Stage 0
    averages whole gradients, which costs the same as stages 1 and 2.)
    """
    alone = row_one_process(parameters)
    weights, gradients, optimizer = (ranks if stage >= first else 1 for first in (3, 2, 1))
    sent = (3 if stage == 3 else 2) * (ranks - 1) / ranks * alone.weights
    return Row(
        f"ZeRO-{stage}, {ranks} ranks",
        alone.weights / weights,
        alone.gradients / gradients,
        alone.optimizer / optimizer,
        sent,
    )


def row_hybrid(parameters: int, shard: int, replicate: int) -> Row:
    """ZeRO-3 inside a node of `shard` ranks, `replicate` nodes: a shard of everything is held.

    Sent per rank: as ZeRO-3 inside the node, and 2(R-1)/R of a shard of gradients between nodes.
    """
    inside = row_zero(parameters, shard, stage=3)
    between = 2 * (replicate - 1) / replicate * inside.gradients
    return replace(
        inside,
        strategy=f"hybrid shard, {replicate} x {shard} ranks",
        sent_per_step=inside.sent_per_step + between,
    )


def row_pipeline(parameters: int, ranks: int, tokens: int, hidden: int) -> Row:
    """P stages of equal size, one a rank: 1/P of everything is held.

    For each of the batch's `tokens` (all of them, not one rank's) `hidden` numbers of 4 bytes cross
    each of the P-1 boundaries forward, and as many come back: 2(P-1)/P of that is the mean over
    the ranks; one in the middle sends twice, the two ends once. Other schedules hold the same.
    """
    alone = row_one_process(parameters)
    sent = 2 * (ranks - 1) / ranks * 4 * tokens * hidden
    held = (part / ranks for part in (alone.weights, alone.gradients, alone.optimizer))
    return Row(f"pipeline, {ranks} ranks", *held, sent)


def row_tensor(
    parameters: int, ranks: int, tokens: int, hidden: int, sums: int, whole: int = 0
) -> Row:
    """Tensor parallelism: all but `whole` of the parameters are cut, so 1/W of them is held.

    In a step each of W ranks sends 2(W-1)/W of `sums` activations, of `hidden` numbers of 4 bytes
    for each of the batch's `tokens`: 4 for a layer and, where the vocabulary is cut, 2 for the
    model. The loss's three numbers a token are left out.
    """
    held = row_one_process((parameters - whole) / ranks + whole)
    sent = sums * 2 * (ranks - 1) / ranks * 4 * tokens * hidden
    return replace(held, strategy=f"tensor, {ranks} ranks", sent_per_step=sent)


def row_mesh(
    parameters: int, dp: int, pp: int, tp: int, tokens: int, hidden: int, sums: float, whole=0
) -> Row:
    """dp replicas of a model in pp stages, each in tp parts: a rank holds 1/(pp tp) of everything.

    Each axis sends what its strategy sends alone, on what the others leave: tensor parallelism
    `sums` activations of a stage and of a replica's 1/dp of the batch's `tokens`, the pipeline the
    same tokens between stages (each of the tp ranks all of them), data parallelism the gradients
    of a part of a stage. `whole` of a stage's parameters are not cut over tp. Means over the ranks.
    """
    part = row_tensor(parameters / pp, tp, tokens / dp, hidden, sums, whole)
    between = row_pipeline(parameters, pp, tokens / dp, hidden).sent_per_step
    average = row_ddp(part.weights / 4, dp).sent_per_step
    return replace(
        part,
        strategy=f"mesh {dp} x {pp} x {tp}, {dp * pp * tp} ranks",
        sent_per_step=part.sent_per_step + between + average,
    )


def row_diloco(parameters: int, islands: int, sync_every: int) -> Row:
    """Each of W islands holds what one process does, and outer weights and their momentum, which
    count as optimizer state. It sends what DDP does once in `sync_every` steps: here a step's part.
    """
    alone = row_ddp(parameters, islands)
    return replace(
        alone,
        strategy=f"DiLoCo, {islands} islands, H = {sync_every}",
        optimizer=alone.optimizer + 2 * alone.weights,
        sent_per_step=alone.sent_per_step / sync_every,
    )


class Table:
    """A Markdown table that a notebook shows as the last line of a cell."""

    def __init__(self, header, rows):
        self.lines = [self._line(header), "|:--|" + "--:|" * (len(header) - 1)]
        self.lines += [self._line(row) for row in rows]

    @staticmethod
    def _line(cells):
        return "| " + " | ".join(cells) + " |"

    def __repr__(self):
        return "\n".join(self.lines)

    _repr_markdown_ = __repr__


def who_holds_what(rows: list[Row]) -> Table:
    """The table that grows through the course: a line for each strategy, bytes of each rank."""
    header = ["each rank", "weights", "gradients", "optimizer", "held in all", "sent per step"]
    lines = []
    for row in rows:
        numbers = row.weights, row.gradients, row.optimizer, row.held, row.sent_per_step
        lines.append([row.strategy, *(human_bytes(number) for number in numbers)])
    return Table(header, lines)
