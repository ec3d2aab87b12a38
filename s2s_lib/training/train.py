"""The training loop: what every rank does, from the configuration to the last checkpoint.

One step is what it is in one process: batch, forward and backward, clip, step. Around it the first
rank shows and logs what happened, and every so often all save. What a step does follows from the
configuration and its number alone: its samples, its learning rate, what is dropped. So a run that
goes on from a checkpoint does what it would have done, at any layout.
"""

import contextlib
import itertools
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch

from s2s_lib.collectives.functions import all_reduce
from s2s_lib.course.data import Batches, hold_out, text
from s2s_lib.course.model import GPT
from s2s_lib.meters.bill import bill
from s2s_lib.meters.memory import KINDS, memory
from s2s_lib.meters.timeline import Timeline, timeline
from s2s_lib.ranks.group import Group
from s2s_lib.strategies.grads import clip_grad_norm_
from s2s_lib.training import checkpoint
from s2s_lib.training.config import Config
from s2s_lib.training.parallel import Parallel, parallelize
from s2s_lib.training.runs import Journal, run_folder, told_by_first

LINKS = ("intra", "inter", "wire")
# Of how many global batches, at most, the evaluation at the end is.
EVALUATED = 8


class Run(NamedTuple):
    """What a rank returns: where the run is, the step it began at, what was logged of each step
    since, the loss on held-out text, and the timeline of the last step."""

    folder: str
    first: int
    log: list[dict]
    evaluation: float | None
    timeline: Timeline | None


class Position(NamedTuple):
    """How far a run has come: steps, and samples of this epoch that were used."""

    step: int = 0
    epoch: int = 0
    sample: int = 0
    seed: int = 0


def train(world: Group, config: Config, resume: bool = False, bar: bool = False) -> Run:
    """Train as `config` says, on this rank of `world`, up to step `config.steps`.

    With `resume` it goes on from the last good checkpoint of the last run in `config.output`, if
    there is one. `bar` shows a progress bar in the place of a line for each step.
    """
    folder = Path(told_by_first(world, lambda: str(run_folder(config.output, resume))))
    checkpoints = folder / "checkpoints"
    parallel = parallelize(build(config), config, world)
    optimizer = make_optimizer(parallel, config)
    position = begin(world, parallel, optimizer, checkpoints, config, resume)
    training, held_out = hold_out(text(config.data.path), config.data.hold_out)
    batches = batches_of(training, config, parallel.dp)
    first, log, of_last = position.step, [], None
    journal = Journal(folder, config, first, bar) if world.rank == 0 else None
    steps = itertools.islice(walk(batches, position, config), max(0, config.steps - first))
    for x, y, reached in steps:
        last = reached.step == config.steps
        started = time.monotonic()
        with bill() as sent, maybe_timeline(last) as line:
            entry = one_step(parallel, optimizer, x, y, config)
        seconds, of_last = time.monotonic() - started, line
        if last or reached.step % config.log.every == 0:
            entry["tokens_per_second"] = config.global_batch * x.shape[1] / seconds
            log.append(entry | counted(world, sent, parallel, optimizer))
            if journal:
                journal.write(log[-1])
        if last or config.checkpoint.every and reached.step % config.checkpoint.every == 0:
            options = {"keep": config.checkpoint.keep, "background": config.checkpoint.background}
            saving = checkpoint.save(checkpoints, parallel, optimizer, reached._asdict(), **options)
    if log:
        saving.wait()
    if journal:
        journal.close()
    return Run(str(folder), first, log, evaluate(parallel, held_out, config), of_last)


def maybe_timeline(wanted):
    return timeline() if wanted else contextlib.nullcontext()


def build(config: Config) -> GPT:
    """The plain model, as shapes without memory: `parallelize` draws what a rank has."""
    with torch.device("meta"):
        return GPT(config.gpt())


def make_optimizer(parallel: Parallel, config: Config) -> torch.optim.Optimizer:
    """AdamW or SGD over this rank's parameters; weights decay, gains of norms do not."""
    options = config.optimizer
    parameters = list(parallel.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum)
    return torch.optim.AdamW(groups, lr=options.lr, betas=tuple(options.betas), eps=options.eps)


def begin(world, parallel, optimizer, checkpoints, config, resume) -> Position:
    """Load what there is to load; where to go on."""
    position = Position(seed=config.seed)
    if resume and told_by_first(world, lambda: checkpoint.latest(checkpoints) is not None):
        position = Position(**checkpoint.load(checkpoints, parallel, optimizer))
        if position.seed != config.seed:
            raise ValueError(
                f"seed: {config.seed}, and the run in {checkpoints.parent} has seed "
                f"{position.seed}: its data would come in another order; give seed: "
                f"{position.seed}, or begin a new run without --resume"
            )
    elif config.checkpoint.start_from:
        checkpoint.start_from(parallel, config.checkpoint.start_from)
    parallel.number = position.step
    return position


def batches_of(tokens, config: Config, dp: Group) -> Batches:
    rows = config.micro_batch_size * config.gradient_accumulation
    return Batches(tokens, config.gpt().seq, rows, dp.rank, dp.size, config.seed)


def walk(batches: Batches, position: Position, config: Config):
    """This rank's batches from a position on, epoch after epoch, each with the position after it.

    After a change of the global batch an epoch goes on at the next whole batch.
    """
    step, epoch, sample, seed = position
    while True:
        start = -(-sample // config.global_batch)
        for number, (x, y) in enumerate(batches.epoch(epoch, min(start, len(batches))), start + 1):
            step += 1
            yield x, y, Position(step, epoch, number * config.global_batch, seed)
        epoch, sample = epoch + 1, 0


def one_step(parallel, optimizer, x, y, config) -> dict:
    """Forward, backward, clip and step; what is worth knowing of it."""
    rate = config.optimizer.lr * rate_of(config, parallel.number)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss = parallel.step(x, y)
    norm = clip_grad_norm_(parallel, config.optimizer.clip or math.inf)
    optimizer.step()
    return {"step": parallel.number, "loss": float(loss), "grad_norm": float(norm), "lr": rate}


def rate_of(config: Config, step: int) -> float:
    """The learning rate of step 0, 1, ... as a share of the highest: up in a line over
    `warmup_steps`, then down to `final` in the last step, along half a cosine or a line."""
    schedule = config.lr_schedule
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return 1.0
    share = (step - schedule.warmup_steps) / max(1, config.steps - 1 - schedule.warmup_steps)
    share = min(share, 1.0)
    down = share if schedule.name == "linear" else (1 - math.cos(math.pi * share)) / 2
    return 1 - (1 - schedule.final) * down


def counted(world: Group, sent, parallel, optimizer) -> dict:
    """Bytes sent in the step by all ranks, by class of link, and the most that a rank holds, by
    kind: two all_reduces of some numbers."""
    by_link = sent.by("link")
    links = torch.tensor([float(by_link.get(link, 0)) for link in LINKS], dtype=torch.float64)
    with memory(parallel, optimizer) as held:
        pass
    kinds = torch.tensor([float(held.live[kind]) for kind in KINDS], dtype=torch.float64)
    links = all_reduce(links, world).tolist()
    kinds = all_reduce(kinds, world, "max").tolist()
    return {
        "sent": {link: int(n) for link, n in zip(LINKS, links, strict=True) if n},
        "held": {kind: int(n) for kind, n in zip(KINDS, kinds, strict=True) if n},
    }


def evaluate(parallel: Parallel, tokens, config: Config) -> float | None:
    """The mean loss over the first held-out batches; None where the text is too short for one."""
    try:
        batches = batches_of(tokens, config, parallel.dp)
    except ValueError:
        return None
    parallel.eval()
    losses = [
        float(parallel.evaluate(x, y)) for x, y in itertools.islice(batches.epoch(0), EVALUATED)
    ]
    parallel.train()
    return sum(losses) / len(losses)
