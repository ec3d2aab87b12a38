"""The training loop: what every rank does, from the configuration to the last checkpoint.

One step is what it is in one process: batch, forward and backward, clip, step. Around it the first
rank shows and logs what happened, and every so often all save. What a step does follows from the
configuration and its number alone: its samples, its learning rate, what is dropped. So a run that
goes on from a checkpoint does what it would have done, at any layout (as many islands, and not
from their last step, after which all are made the same).
"""

import contextlib
import itertools
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch

from s2s_lib.course.data import Batches, hold_out, text
from s2s_lib.course.model import GPT
from s2s_lib.meters.bill import bill
from s2s_lib.meters.timeline import Timeline, timeline
from s2s_lib.ranks.group import Group
from s2s_lib.strategies.grads import clip_grad_norm_
from s2s_lib.training import checkpoint
from s2s_lib.training.agree import told
from s2s_lib.training.config import Config
from s2s_lib.training.counting import Since, counted
from s2s_lib.training.islands import (
    counts_of,
    forget_outer,
    make_diloco,
    of_island,
    over_islands,
    to_load,
)
from s2s_lib.training.lock import locked
from s2s_lib.training.parallel import Parallel, parallelize
from s2s_lib.training.plain import open_file
from s2s_lib.training.position import Position, digest_of, position_of, refuse_others
from s2s_lib.training.runs import Journal, run_folder

# Of about how many sequences the evaluation at the end is: as many whole global batches.
EVALUATED = 256


class Run(NamedTuple):
    """What a rank returns: where the run is, the step it began at, the lines logged since, the loss
    on held-out text, and the timeline of the last step."""

    folder: str
    first: int
    log: list[dict]
    evaluation: float | None
    timeline: Timeline | None


def train(world: Group, config: Config, resume: bool = False, bar: bool = False) -> Run:
    """Train as `config` says, on this rank of `world`, up to step `config.steps`.

    With `resume` it goes on from the last good checkpoint of the last run in `config.output`, if
    there is one. `bar` shows a progress bar in the place of lines.

    With islands the losses are means over all of them, taken where a line is logged: so that an
    ordinary step does not wait for a slow link.
    """
    with contextlib.ExitStack() as held:
        folder = first_says(world, lambda: str(hold_folder(config.output, resume, held)))
        return go_through(world, config, Path(folder), resume, bar)


def hold_folder(output: str, resume: bool, held: contextlib.ExitStack) -> Path:
    """The run's folder, which is this job's until `held` ends."""
    folder = run_folder(output, resume)
    held.enter_context(locked(folder))
    return folder


def go_through(world: Group, config: Config, folder: Path, resume: bool, bar: bool) -> Run:
    """All of a run, in its folder."""
    checkpoints = folder / "checkpoints"
    parallel = parallelize(build(config), config, world)
    optimizer = make_optimizer(parallel, config)
    training, held_out = read_text(config)
    batches = batches_of(training, config, parallel.data, config.seed)
    start = Position(0, 0, 0, config.seed, config.gpt().seq, digest_of(world, training))
    position, diloco = begin(world, parallel, optimizer, checkpoints, config, resume, start)
    first, log, saving, of_last = position.step, [], None, None
    since, turn = Since(parallel), Turn(config, diloco)
    # Where no step is left nothing is written: the run stays what it was.
    writes = world.rank == 0 and first < config.steps
    journal = Journal(folder, config, first, bar) if writes else None
    steps = itertools.islice(walk(batches, position, config), max(0, config.steps - first))
    for x, y, reached in steps:
        last = reached.step == config.steps
        started = time.monotonic()
        with bill() as sent, maybe_timeline(last) as line:
            entry = one_step(parallel, optimizer, x, y, config)
            if last and diloco:
                diloco.flush()
        since.add(time.monotonic() - started, sent)
        of_last = line
        if last or reached.step % config.log.every == 0:
            entry["loss"] = over_islands(entry["loss"], parallel)
            entry["tokens_per_second"] = config.global_batch * x.shape[1] / since.seconds
            log.append(entry | counted(world, since, parallel, optimizer, diloco))
            since = Since(parallel)
            if journal:
                journal.write(log[-1])
        if last or turn.has_come(reached.step):
            saving = save(checkpoints, parallel, optimizer, diloco, reached)
    if saving is not None:
        saving.wait()
    if journal:
        journal.close()
    return Run(str(folder), first, log, evaluate(parallel, held_out, config), of_last)


def first_says(world, ask):
    """What the first rank sees on the disk; another may see a moment later, and something else."""
    return told(world, lambda: ask() if world.rank == 0 else None, ValueError, "the output folder")[
        0
    ]


class Turn:
    """When to save: every so many steps; with islands at the first rest after that, and once a
    round at most, so that none is more than one checkpoint ahead of the others."""

    def __init__(self, config, diloco):
        self.every, self.diloco = config.checkpoint.every, diloco
        self.due, self.saved = False, None

    def has_come(self, step) -> bool:
        self.due = self.due or self.every > 0 and step % self.every == 0
        if not self.due:
            return False
        if self.diloco:
            if not self.diloco.at_rest or self.saved == self.diloco.rounds:
                return False
            self.saved = self.diloco.rounds
        self.due = False
        return True


def save(checkpoints, parallel, optimizer, diloco, reached: Position):
    """Each island for itself, since each has moments of its own."""
    how = parallel.config.checkpoint
    options = {"keep": how.keep, "background": how.background}
    if diloco is None:
        return checkpoint.save(checkpoints, parallel, optimizer, reached._asdict(), **options)
    folder = of_island(checkpoints, diloco.group.rank)
    progress = reached._replace(rounds=diloco.counts)._asdict()
    # The others may not have got so far.
    options["keep"] = max(2, how.keep)
    with diloco.in_state():
        return checkpoint.save(folder, parallel, optimizer, progress, **options)


def maybe_timeline(wanted):
    return timeline() if wanted else contextlib.nullcontext()


def look(config: Config):
    """ValueError for a text, or weights to start from, that no rank could use.

    Each rank reads the text for itself, later: here one process finds out, in a moment and in one
    line, what would else end all of them.
    """
    training, _ = read_text(config)
    Batches(training, config.gpt().seq, config.global_batch)
    if source := config.checkpoint.start_from:
        try:
            open_file(source)
        except ValueError as error:
            raise ValueError(f"checkpoint.start_from {source}: {error}") from error


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


def begin(world, parallel, optimizer, checkpoints, config, resume, start):
    """Load what there is to load; where to go on, and the DiLoCo, or None."""
    found = first_says(world, lambda: to_load(checkpoints, config.islands)) if resume else None
    if not found:
        if config.checkpoint.start_from:
            checkpoint.start_from(parallel, config.checkpoint.start_from)
        return start, make_diloco(parallel, optimizer)
    diloco = make_diloco(parallel, optimizer)
    path = found[diloco.group.rank if diloco else 0]
    ours = [dict(group) for group in optimizer.param_groups]
    with diloco.in_state() if diloco else contextlib.nullcontext():
        position = position_of(checkpoint.load(path, parallel, optimizer), checkpoints)
    refuse_others(start, position, checkpoints.parent)
    # Settings are those of the configuration, as the learning rate's are.
    for group, own in zip(optimizer.param_groups, ours, strict=True):
        group.update(own)
    if diloco:
        diloco.counts = counts_of(position.rounds, diloco)
    else:
        forget_outer(optimizer)
    parallel.number = position.step
    return position, diloco


def read_text(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens to train on and for evaluation; ValueError where they do not fit the model."""
    tokens = text(config.data.path)
    most, vocab = int(tokens.max()), config.gpt().vocab
    if most >= vocab:
        raise ValueError(
            f"model.vocab {vocab}: the text has bytes up to {most}, so give at least {most + 1}"
        )
    return hold_out(tokens, config.data.hold_out)


def batches_of(tokens, config: Config, dp: Group, seed: int) -> Batches:
    """This replica's share of each global batch."""
    rows = config.micro_batch_size * config.gradient_accumulation
    return Batches(tokens, config.gpt().seq, rows, dp.rank, dp.size, seed)


def walk(batches: Batches, position: Position, config: Config):
    """This rank's batches from a position on, epoch after epoch, each with the position after it.

    After a change of the global batch an epoch goes on at the next whole batch.
    """
    step, epoch, sample = position[:3]
    while True:
        start = -(-sample // config.global_batch)
        for number, (x, y) in enumerate(batches.epoch(epoch, min(start, len(batches))), start + 1):
            step += 1
            used = number * config.global_batch
            yield x, y, position._replace(step=step, epoch=epoch, sample=used)
        epoch, sample = epoch + 1, 0


def one_step(parallel, optimizer, x, y, config) -> dict:
    """Forward, backward, clip and step; what is worth knowing of it."""
    rate = config.optimizer.lr * rate_of(config, parallel.number)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss = parallel.step(x, y)
    norm = clip_grad_norm_(parallel, config.optimizer.clip or math.inf)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise FloatingPointError(
            f"step {parallel.number}: the loss is {loss:.4g} and the gradient's norm {norm:.4g}: "
            "the step was not taken, and nothing saved. Go on from the last checkpoint (--resume) "
            f"with less than optimizer.lr {config.optimizer.lr:g}, or with a longer warm-up"
        )
    optimizer.step()
    return {"step": parallel.number, "loss": float(loss), "grad_norm": float(norm), "lr": rate}


def rate_of(config: Config, step: int) -> float:
    """The learning rate of step 0, 1, ... as a share of the highest: up in a line over
    `warmup_steps`, then down to `final` in the last step, along half a cosine or a line. A run that
    goes on to another last step is on another line from there."""
    schedule = config.lr_schedule
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return 1.0
    share = (step - schedule.warmup_steps) / max(1, config.steps - 1 - schedule.warmup_steps)
    share = min(share, 1.0)
    down = share if schedule.name == "linear" else (1 - math.cos(math.pi * share)) / 2
    return 1 - (1 - schedule.final) * down


def evaluate(parallel: Parallel, tokens, config: Config) -> float | None:
    """The mean loss over about EVALUATED held-out sequences, which do not depend on the seed; None
    where the text is too short for a global batch of them."""
    try:
        batches = batches_of(tokens, config, parallel.data, seed=0)
    except ValueError:
        return None
    parallel.eval()
    some = itertools.islice(batches.epoch(0), max(1, EVALUATED // config.global_batch))
    losses = [float(parallel.evaluate(x, y)) for x, y in some]
    parallel.train()
    return over_islands(sum(losses) / len(losses), parallel)
