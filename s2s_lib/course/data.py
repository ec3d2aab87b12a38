"""Text as bytes, and which rank reads which part of it.

Tokens are bytes: 256 of them, no tokenizer, nothing downloaded. By default they are the modules of
the Python standard library that runs the lesson: a few megabytes of real text on every reader's
disk. That text differs between Python versions, so nothing printed in a lesson may depend on it
(not a loss, not a number of steps); give a file of your own where it must not change.

A **sample** is a window of `seq` tokens and the same window one token later, what the model is to
predict. Windows start `seq` apart, so each token but the first is predicted exactly once:

    tokens   t0 t1 t2 t3 t4 t5 t6      seq = 3: 2 samples
    sample 0 x = t0 t1 t2, y = t1 t2 t3
    sample 1 x = t3 t4 t5, y = t4 t5 t6

Everywhere, `rank` and `size` are the *data-parallel* coordinate and count: `mesh["dp"].rank` and
`.size`. Ranks that share a replica (tensor or pipeline parallel) give the same pair and read the
same samples; a rank's number within its node is never right.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

Batch = tuple[torch.Tensor, torch.Tensor]


def text(source: str | os.PathLike | None = None) -> torch.Tensor:
    """The bytes of a text as a uint8 tensor [tokens].

    `source` is a file (its bytes as they are, whatever the encoding), a folder (every file below
    it without a zero byte, in the order of their paths; names that start with a dot are left out)
    or None: the top-level modules of the standard library. What is missing, unreadable or without
    text raises ValueError with the path.
    """
    if source == "":
        raise ValueError("text('') names no file or folder; for the current folder give '.'")
    path = Path(sysconfig.get_path("stdlib") if source is None else source)
    if os.path.isfile(path):
        contents = [_read(path)]
    elif os.path.isdir(path):
        files = _standard_modules(path) if source is None else _files_below(path)
        contents = [content for content in map(_read, files) if b"\0" not in content]
    else:
        raise ValueError(
            f"no file or folder {path} (looked from {Path.cwd()}); give the path of a text"
        )
    whole = bytearray().join(contents)
    if not whole:
        raise ValueError(f"no text in {path}; give a file or folder that has some")
    return torch.frombuffer(whole, dtype=torch.uint8)


def _standard_modules(folder):
    # The build's own settings are a module too, and differ from machine to machine.
    return sorted(p for p in folder.glob("*.py") if not p.name.startswith("_sysconfigdata"))


def _files_below(folder):
    paths = (path.relative_to(folder) for path in folder.rglob("*"))
    shown = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
    return [folder / path for path in sorted(shown) if os.path.isfile(folder / path)]


def _read(file):
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(
            f"cannot read {file}: {error.strerror}; allow reading it or give another file"
        ) from None


def hold_out(tokens: torch.Tensor, share: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the tokens: those to train on, and the last `share` of them for evaluation."""
    kept = len(tokens) - round(len(tokens) * share) if 0 < share < 1 else 0
    if not 0 < kept < len(tokens):
        raise ValueError(
            f"share={share!r} of {len(tokens)} tokens leaves nothing on one side; "
            "give a share between 0 and 1, and enough text"
        )
    return tokens[:kept], tokens[kept:]


class Batches:
    """One rank's training batches: `for x, y in batches.epoch(e)`, each int64 [batch_size, seq].

    The order of the samples comes from (seed, epoch) alone. Step k of an epoch is one global batch
    of `batch_size * size` samples, of which rank r takes rows r * batch_size and on. So the ranks'
    parts of an epoch are disjoint, and step k has the same samples, in the same order, for every
    `size` with the same `batch_size * size`: one process can repeat what any number of ranks did.

    An epoch has `len(batches)` steps on every rank. The `dropped` samples that do not fill a
    global batch are left out, other ones each epoch. Bad sizes raise ValueError with the numbers.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        seq: int,
        batch_size: int,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
    ):
        _check_place(batch_size, rank, size)
        self.windows = _windows(tokens, seq)
        self.batch_size, self.rank, self.size, self.seed = batch_size, rank, size, seed
        self.samples = len(self.windows)
        self.dropped = self.samples % (batch_size * size)
        if len(self) == 0:
            raise ValueError(
                f"a global batch of {batch_size} x {size} = {batch_size * size} samples is more "
                f"than the {self.samples} that {len(tokens)} tokens make with seq {seq}; "
                "take a smaller batch, a smaller seq or more text"
            )

    def __len__(self):
        return self.samples // (self.batch_size * self.size)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `start` on, as if the ones before had been taken."""
        if not 0 <= start <= len(self):
            raise ValueError(f"start={start}: an epoch has steps 0 to {len(self) - 1}")
        # Own generator: the order does not depend on, or change, what else draws numbers.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        order = torch.randperm(self.samples, generator=generator)
        return (self._batch(order, step) for step in range(start, len(self)))

    def _batch(self, order, step):
        first = (step * self.size + self.rank) * self.batch_size
        return _inputs_and_targets(self.windows, order[first : first + self.batch_size])


def evaluation(
    tokens: torch.Tensor, seq: int, batch_size: int, rank: int = 0, size: int = 1
) -> Iterator[Batch]:
    """This rank's samples rank, rank + size, ...: over all ranks each one exactly once.

    Nothing is padded or repeated, so the last batch may be smaller, and a rank may have a batch
    more than another, or none at all. Keep communication out of the loop: add up the loss and the
    count of targets, then reduce both once; their ratio is the same for every `size`.
    """
    _check_place(batch_size, rank, size)
    windows = _windows(tokens, seq)
    mine = torch.arange(len(windows))[rank::size]
    return (_inputs_and_targets(windows, part) for part in mine.split(batch_size) if len(part))


def _windows(tokens, seq):
    if tokens.dim() != 1 or tokens.is_floating_point():
        raise ValueError(
            f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}; "
            "give whole numbers in one dimension, as text() returns"
        )
    if not 1 <= seq < len(tokens):
        raise ValueError(
            f"seq={seq} needs at least seq + 1 tokens and there are {len(tokens)}; "
            "take a seq of at least 1, and shorter than the text"
        )
    return tokens.unfold(0, seq + 1, seq)


def _check_place(batch_size, rank, size):
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: give at least 1 sample for each rank")
    if not 0 <= rank < size:
        raise ValueError(
            f"rank {rank} of {size}: the data-parallel rank goes from 0 to size - 1 = {size - 1}"
        )


def _inputs_and_targets(windows, indices):
    rows = windows[indices].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
