"""Saving and going on: what all ranks do together.

    who holds what    each file the pieces that its rank owns (pieces.py), in the optimizer's
                      precision; the manifest where they are (disk.py)
    who sends what    words: what each wrote, or what went wrong; never a weight

So saving needs no memory for anybody else's shard, and each element is written once. Loading is by
name and by place in the whole tensor, of which a rank reads what it needs, at any other layout:
other sizes of the axes or another order, another stage of ZeRO, another schedule.

What one rank decides or suffers, all hear of before any goes on: an error is the same on all ranks,
and none waits for one that has given up. All ranks must see the same folder.

torch.distributed.checkpoint does this for DTensors, and shares out what replicas write.
"""

import contextlib
import json
import os
import weakref
from pathlib import Path

import torch

from s2s_lib.collectives import background as lanes
from s2s_lib.ranks.connection import current
from s2s_lib.training import disk
from s2s_lib.training.agree import refuse_misfits, told
from s2s_lib.training.disk import checkpoints, latest, read_progress
from s2s_lib.training.lock import locked
from s2s_lib.training.manifest import FORMAT, read_manifest
from s2s_lib.training.optimizer_state import groups_of, joined, misfits, restore, state_of
from s2s_lib.training.parallel import Parallel
from s2s_lib.training.pieces import Piece, index, pieces_of
from s2s_lib.training.plain import export, start_from
from s2s_lib.training.reader import Reader

__all__ = ["checkpoints", "export", "latest", "load", "read_progress", "save", "start_from"]

# On which background thread: gradients and weights travel on others.
SAVING = 3
# The save of each Parallel that may be under way.
_under_way = weakref.WeakKeyDictionary()


# Saving


def save(
    folder: str | os.PathLike,
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    progress: dict,
    keep: int = 2,
    background: bool = False,
) -> lanes.Background:
    """Save as `folder/step-000010`, after step 10, and keep the last `keep` checkpoints. `.wait()`
    on what it returns gives that path.

    Saved are weights, buffers, the optimizer's state and settings, the number of steps taken, and
    `progress`: what JSON can hold, the same on all ranks. Collective, between two steps. Until the
    last rank is done, the checkpoint before it is the latest, whatever is killed when.

    With `background` it returns once each rank has a copy of what it will write, and training may
    go on; else nothing is copied. A save waits for the one before it; wait for the last one before
    the rank's function returns. RuntimeError on all ranks if one of them cannot write: from
    `.wait()`, or, if nobody has waited, from the next save; and at once if another job is saving
    into this folder (lock.py).
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep={keep!r}: give how many checkpoints are to be kept, at least 1")
    world, path = parallel.group, Path(folder) / f"step-{parallel.number:06d}"
    if (before := _under_way.pop(parallel, None)) is not None:
        before.finished.wait()
        if before.error in current().unheard:
            before.wait()
    tensors, mine = {}, {}
    manifest = {
        "format": FORMAT,
        "step": parallel.number,
        "save": os.urandom(8).hex(),
        "progress": progress,
        "layout": parallel.mesh.axes | {"zero_stage": parallel.config.zero_stage},
        "aliases": parallel.aliases,
        "optimizer": {"class": type(optimizer).__name__},
    }

    # The first rank's: from here until all is written.
    lock = contextlib.ExitStack()

    def prepare():
        if world.rank == 0:
            json.dumps(manifest)
            lock.enter_context(locked(path.parent))
            disk.begin(path)
        mine.update(described(pieces_of(parallel), optimizer, tensors, background))
        return manifest["save"]

    try:
        manifest["save"] = told(world, prepare, RuntimeError, f"{path} cannot be saved")[0]
    except BaseException:
        lock.close()
        raise
    saving = lanes.background(write, path, tensors, mine, manifest, keep, world, lock, lane=SAVING)
    _under_way[parallel] = saving
    if not background:
        saving.wait()
    return saving


def described(pieces: list[Piece], optimizer, tensors: dict, copy: bool) -> dict:
    """What this rank tells of what it owns, whose rows are put into `tensors`."""
    found = []
    for piece in pieces:
        # One without elements tells nothing, unless the whole tensor has none.
        if not piece.owned or not (piece.tensor.numel() or 0 in piece.shape):
            continue
        rows, numbers = state_of(optimizer, piece)
        rows = {"weight": piece.tensor} | rows
        for key, tensor in rows.items():
            row = tensor.detach().reshape(-1)
            tensors[f"{key}/{piece.name}"] = row.clone() if copy else row
        what = {
            "shape": piece.shape,
            "dtypes": {key: str(row.dtype)[6:] for key, row in rows.items()},
            "cut": piece.where.cut and vars(piece.where.cut),
            "numbers": numbers,
        }
        found.append([piece.name, what, piece.where[1:]])
    return {"pieces": found, "groups": groups_of(optimizer, pieces)}


def write(path: Path, tensors, mine, manifest, keep, world, lock) -> Path:
    """On every rank: its file; and when all have written theirs, the manifest and the name."""
    tmp, file = disk.unfinished(path), f"rank-{world.rank:05d}.safetensors"

    def write_mine():
        said = disk.marks(file, manifest["step"], manifest["save"])
        size = disk.write_shard(tmp / file, tensors, said) if tensors else None
        return mine | {"file": file, "size": size}

    def commit():
        if world.rank == 0:
            for rank in everyone:
                disk.check_size(tmp / rank["file"], rank["size"])
            manifest["tensors"] = index(everyone)
            groups = [group for rank in everyone for group in rank["groups"]]
            manifest["optimizer"]["groups"] = joined(groups)
            disk.commit(path, manifest, keep)

    with lock:
        try:
            everyone = told(world, write_mine, RuntimeError, f"{path} was not saved")
            told(world, commit, RuntimeError, f"{path} was not saved")
        except RuntimeError:
            if world.rank == 0:
                disk.delete(tmp)
            raise
    return path


# Loading


def load(
    folder: str | os.PathLike,
    parallel: Parallel,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict:
    """Go on from the latest checkpoint in `folder`, or the one that it is; returns its `progress`.

    Weights, buffers and the number of steps become the saved ones, and so do, of an `optimizer`,
    its state and settings. Collective; the first rank says which checkpoint, and each reads the
    pieces that it holds, one tensor at a time. ValueError, the same on all ranks and with nothing
    changed, where a file is missing or broken, or something does not fit: names, shapes, dtypes,
    the optimizer's class and parameters.
    """
    world, pieces = parallel.group, pieces_of(parallel)

    def choose():
        if world.rank == 0:
            path = disk.find(folder)
            return str(path), read_manifest(path)

    path, manifest = told(world, choose, ValueError, f"cannot load from {folder}")[0]
    reader, words = Reader(Path(path), manifest), f"cannot load {path}"
    everyone = told(world, lambda: look(reader, pieces, manifest, optimizer), ValueError, words)
    refuse_misfits(everyone, set(reader.tensors), words)

    def read():
        for piece in pieces:
            piece.fill(reader.read("weight", piece.name, piece.where))
        if optimizer is not None:
            restore(optimizer, pieces, reader, manifest["optimizer"])

    told(world, read, ValueError, words)
    parallel.number = manifest["step"]
    return manifest["progress"]


def look(reader: Reader, pieces, manifest, optimizer) -> dict:
    """The names that this rank holds, and what of them does not fit. Opens the files."""
    wrong = []
    for piece in pieces:
        mine = f"{str(piece.tensor.dtype)[6:]} {piece.shape}"
        if piece.name not in reader.tensors:
            wrong.append(f"{piece.name} is missing")
        elif (there := reader.said(piece.name)) != mine:
            wrong.append(f"{piece.name} is {there} there and {mine} here")
        else:
            for key in reader.keys(piece.name) if optimizer is not None else ["weight"]:
                reader.check(key, piece.name, piece.where)
    if optimizer is not None:
        wrong += misfits(optimizer, pieces, manifest["optimizer"])
    return {"held": [piece.name for piece in pieces], "wrong": wrong}
