"""A checkpoint on disk: there whole, or not at all.

    step-000010/manifest.json             which tensors there are, and in which file each piece is
    step-000010/rank-00003.safetensors    what rank 3 owned: weight/NAME and optimizer/KEY/NAME
    step-000015.tmp/                      being written, or left by a process that was killed

In the files each piece is one row of numbers; the true shapes are in the manifest. A checkpoint
gets its name when all that is in it has reached the disk: a file system renames a folder wholly or
not at all. And it loses its name before anything in it is deleted. Nothing is pickled, so reading
a checkpoint cannot run code.

Everything here is local to one process; checkpoint.py has what all ranks do together.
"""

import contextlib
import json
import math
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

FORMAT = 1
MANIFEST = "manifest.json"
# What is in it.
KEYS = ("step", "saved", "progress", "layout", "aliases", "optimizer", "tensors")
# A checkpoint that is being replaced by one of the same step is `.old` for a moment.
NAME = re.compile(r"step-\d+(\.old)?")


# Finding


def latest(folder: str | os.PathLike) -> Path | None:
    """The checkpoint in this folder that was saved last, or None."""
    return max(checkpoints(folder), default=(0, None))[1]


def checkpoints(folder) -> list[tuple[float, Path]]:
    """The checkpoints in a folder, each after its place in the order of saving, which need not be
    that of steps. One with a broken manifest counts as the last, so that loading tells of it."""
    found = []
    for path in Path(folder).glob("step-*"):
        if NAME.fullmatch(path.name) and (path / MANIFEST).exists():
            try:
                found.append((read_manifest(path)["saved"], path))
            except ValueError:
                found.append((math.inf, path))
    return sorted(found)


def find(folder: str | os.PathLike) -> Path:
    """The checkpoint that this is, or the latest in it; ValueError if there is none."""
    path = Path(folder)
    if (path / MANIFEST).exists():
        return path
    if (found := latest(path)) is None:
        raise ValueError(
            f"no checkpoint in {path} (seen from {Path.cwd()}): give the folder that was given to "
            "save, or one of the step-... folders in it"
        )
    return found


def read_manifest(path: Path) -> dict:
    """ValueError, with its name, for a file that is none."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        number = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is no manifest of a checkpoint ({type(error).__name__}: {error}): give the "
            "path of another checkpoint"
        ) from error
    if number != FORMAT:
        raise ValueError(f"{file} has format {number}, this version reads format {FORMAT}")
    if missing := [key for key in KEYS if key not in manifest]:
        raise ValueError(f"{file} is not whole, it has no {missing[0]}: give another checkpoint")
    return manifest


def read_progress(folder: str | os.PathLike) -> dict:
    """What `save` was given as `progress`; of the latest checkpoint where there are several."""
    return read_manifest(find(folder))["progress"]


# Writing, in order. A path is that of the checkpoint once it is there.


def unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def begin(path: Path):
    """Clear away what was left half done; make the folder to write into."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob("step-*.tmp"):
        shutil.rmtree(left)
    unfinished(path).mkdir()


def write_shard(file: Path, tensors: dict[str, torch.Tensor]) -> int:
    """Write a file, and wait until it is on the disk; its size in bytes."""
    save_file(tensors, file)
    sync(file)
    return file.stat().st_size


def check_size(file: Path, size: int | None):
    """OSError unless this process sees the file that another says it wrote, if it did."""
    if size is not None and not (file.exists() and file.stat().st_size == size):
        raise OSError(
            f"{file} is not the file of {size} bytes that its rank wrote: all ranks need one "
            "folder, on a file system that they share"
        )


def commit(path: Path, manifest: dict, keep: int):
    """Write the manifest, give the checkpoint its name, and remove all but the last `keep`."""
    tmp, old, folder = unfinished(path), path.with_name(f"{path.name}.old"), path.parent
    manifest["saved"] = 1 + max([n for n, _ in checkpoints(folder) if n < math.inf], default=0)
    write_manifest(tmp, manifest)
    if path.exists():
        remove(old)
        os.rename(path, old)
    os.rename(tmp, path)
    sync(folder)
    # The new one is good, whatever happens to those before it.
    with contextlib.suppress(OSError):
        remove(old)
        prune(folder, keep)


def write_manifest(path: Path, manifest: dict):
    (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    sync(path / MANIFEST)
    sync(path)


def prune(folder: Path, keep: int):
    """The last ones, in the order of saving, are kept; a broken one is nobody's to delete."""
    for _, path in [c for c in checkpoints(folder) if c[0] < math.inf][:-keep]:
        remove(path)


def remove(path: Path):
    """Take its name, then delete it."""
    if path.exists():
        os.rename(path, unfinished(path))
        shutil.rmtree(unfinished(path))


def sync(path: Path):
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
