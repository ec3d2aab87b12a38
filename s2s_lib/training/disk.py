"""A checkpoint on disk: there whole, or not at all.

    step-000010/manifest.json             where each tensor is (manifest.py)
    step-000010/rank-00003.safetensors    what rank 3 owned: weight/NAME and optimizer/KEY/NAME
    step-000015.tmp/                      being written, or left by a process that was killed

In the files each piece is one row of numbers; the true shapes are in the manifest. A checkpoint
gets its name when all that is in it has reached the disk: a file system renames a folder wholly or
not at all. And it loses its name before anything in it is deleted. Nothing is pickled, so reading
a checkpoint cannot run code.

People move checkpoints to larger disks and leave links behind: of a link only the link is removed.
And a file that comes from another rank or another save, as copying by hand makes them, says so: in
each are its rank, its step and its save.

Everything here is local to one process; checkpoint.py has what all ranks do together. Who writes
holds the folder (lock.py), so what is unfinished there is nobody's.
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

from s2s_lib.training.manifest import MANIFEST, read_manifest

# A checkpoint that is being replaced by one of the same step is `.old` for a moment.
NAME = re.compile(r"step-\d+(\.old)?")
UNFINISHED = re.compile(NAME.pattern + r"\.tmp")


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


def read_progress(folder: str | os.PathLike) -> dict:
    """What `save` was given as `progress`; of the latest checkpoint where there are several."""
    return read_manifest(find(folder))["progress"]


# Writing, in order. A path is that of the checkpoint once it is there.


def unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def begin(path: Path):
    """Clear away what was left half done; make the folder to write into."""
    for left in path.parent.glob("step-*.tmp"):
        if UNFINISHED.fullmatch(left.name):
            delete(left)
    unfinished(path).mkdir()


def marks(file: str, step: int, save: str) -> dict[str, str]:
    """What a rank's file says of itself."""
    return {"file": file, "step": str(step), "save": save}


def write_shard(file: Path, tensors: dict[str, torch.Tensor], said: dict[str, str]) -> int:
    """Write a file, and wait until it is on the disk; its size in bytes."""
    save_file(tensors, file, said)
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
    if os.path.lexists(path):
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
    """Take a checkpoint's name, then delete it. What is none stays where it is."""
    if (path / MANIFEST).exists():
        os.rename(path, unfinished(path))
        delete(unfinished(path))


def delete(path: Path):
    """Delete a folder with what is in it, a file, or a link without what it leads to. What the
    system does not let go stays: it stops no save of another step."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path):
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
