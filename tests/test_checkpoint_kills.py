"""Whatever ends a save, the checkpoint before it is there and loads; what is broken is said so.

A save is ended before each single thing that it does to the file system, and ranks end themselves
with SIGKILL in the midst of one. A name that comes before the files leaves half a checkpoint as the
latest; pruning before the rename leaves none; deleting before the name is taken leaves half of an
old one; an order by number of steps takes an earlier run's for the latest. An error that one rank
keeps to itself leaves the others waiting, until the launch ends them.
"""

import contextlib
import os
import resource
import shutil
import signal
import sys

import pytest
import torch
from checkpoint_training import UNTIED, adamw, built, config_of, sgd, steps
from safetensors.torch import save_file

from s2s_lib import RankError, launch
from s2s_lib.training import checkpoint, disk
from s2s_lib.training.manifest import FORMAT
from s2s_lib.training.pieces import index
from s2s_lib.training.reader import Reader

MODEL = {"tied": False, "layers": 2}
TWO = UNTIED["dp 2, zero 1"]


class Ended(BaseException):
    """In the place of a kill: nothing catches it."""


class Watch:
    """Counts what Python does to files below a folder, and ends it before number `last`."""

    folder, left, done = None, None, 0

    def __call__(self, event, args):
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
        changes = changes or event == "open" and (args[1] or "r")[0] in "wax"
        if self.folder is None or not changes or str(self.folder) not in str(args[0]):
            # Files in a folder are removed by their names in it.
            if self.folder is None or event not in ("os.remove", "os.rmdir"):
                return
        self.done += 1
        if self.done == self.left:
            raise Ended

    @contextlib.contextmanager
    def ending(self, folder, before):
        self.folder, self.left, self.done = folder, before, 0
        try:
            yield
        finally:
            self.folder = None


watch = Watch()
sys.addaudithook(watch)


def save_one(folder, step, keep=2):
    """What ranks do together, by one process: a checkpoint with its number in it."""
    path = folder / f"step-{step:06d}"
    file, save = "rank-00000.safetensors", "one"
    folder.mkdir(exist_ok=True)
    disk.begin(path)
    tensors = {"weight/w": torch.ones(3)}
    disk.write_shard(disk.unfinished(path) / file, tensors, disk.marks(file, step, save))
    what = {"shape": [3], "dtypes": {"weight": "float32"}, "cut": None, "numbers": {}}
    told = [{"file": file, "pieces": [["w", what, [0, 0, 3]]]}]
    manifest = {"format": FORMAT, "step": step, "save": save, "progress": {"step": step}}
    manifest |= {"layout": {}, "aliases": {}, "optimizer": {"class": "SGD", "groups": []}}
    disk.commit(path, manifest | {"tensors": index(told)}, keep)


def good(folder) -> int:
    """The step of the latest checkpoint, which can be read, as can all the others."""
    for _, path in disk.checkpoints(folder):
        assert torch.equal(
            Reader(path, checkpoint.read_manifest(path)).whole("weight", "w"), torch.ones(3)
        )
    return disk.read_progress(folder)["step"]


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "the same step"])
def test_a_save_that_ends_anywhere_leaves_a_good_one_and_the_next_clears_up(again, tmp_path):
    step = 3 if again else 4
    ends = []
    for before in range(1, 100):
        folder = tmp_path / str(before)
        for earlier in (1, 2, 3):
            save_one(folder, earlier)
        with watch.ending(folder, before), contextlib.suppress(Ended):
            save_one(folder, step)
            ends.append("done")
        ends.append(good(folder))
        if watch.done < before:
            break
        for later in (5, 6):
            save_one(folder, later)
            assert good(folder) == later
        assert sorted(p.name for p in folder.iterdir()) == ["step-000005", "step-000006"]
    assert ends[-2:] == ["done", step] and watch.done >= 8
    assert set(ends[:-2]) == {3, step}


def test_only_the_last_ones_are_kept_and_the_last_saved_is_the_latest(tmp_path):
    for step in (2, 4, 6, 8):
        save_one(tmp_path, step, keep=3)
    names = [path.name for _, path in disk.checkpoints(tmp_path)]
    assert names == ["step-000004", "step-000006", "step-000008"]
    # A run that went back saves an earlier step.
    save_one(tmp_path, 5, keep=2)
    assert [path.name for _, path in disk.checkpoints(tmp_path)] == ["step-000008", "step-000005"]
    assert disk.latest(tmp_path).name == "step-000005"
    # A broken one stops no save and is not deleted.
    (tmp_path / "step-000005" / "manifest.json").write_text("{")
    save_one(tmp_path, 9, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000005", "step-000009"]


# With ranks

# Rank, function of disk.py, and whether it is killed before or after it.
KILLS = [
    (1, "write_shard", "before"),
    (1, "write_shard", "after"),
    (0, "write_shard", "before"),
    (0, "write_manifest", "after"),
    (0, "prune", "before"),
]


def killed(world, folder, rank, name, when):
    made = built(world, config_of(TWO, MODEL))
    steps(*made, 1)
    checkpoint.save(folder, *made, {"step": 1}, keep=1).wait()
    steps(*made, 1)
    real = getattr(disk, name)

    def deadly(*args):
        if when == "after":
            real(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == rank:
        setattr(disk, name, deadly)
    checkpoint.save(folder, *made, {"step": 2}, keep=1).wait()


def go_on(world, folders):
    """From each: the step it was saved at, and what the next one gives."""
    seen = []
    for folder in folders:
        made = built(world, config_of(TWO, MODEL))
        seen.append((checkpoint.load(folder, *made)["step"], steps(*made, 1)))
        checkpoint.save(folder, *made, {}, keep=1).wait()
    return seen


def test_a_rank_killed_in_a_save_leaves_one_to_go_on_from(tmp_path):
    folders = []
    for number, (rank, name, when) in enumerate(KILLS):
        folders.append(tmp_path / str(number))
        with pytest.raises(RankError, match=f"rank {rank} of 2 .*SIGKILL"):
            launch(killed, folders[-1], rank, name, when, ranks=2)
    told = launch(go_on, folders, ranks=2)
    assert [step for step, _ in told[0]] == [1, 1, 1, 1, 2]
    assert len({str(losses) for step, losses in told[0] if step == 1}) == 1
    for folder in folders:
        assert len(list(folder.glob("step-*"))) == 1


def failing(world, folder):
    """Saves that cannot be, each on one rank; then one that can."""
    made = built(world, config_of(TWO, MODEL))
    steps(*made, 1)
    checkpoint.save(folder, *made, {}).wait()
    made[0].number = 2
    said = []

    def refused(save):
        with pytest.raises(RuntimeError) as error:
            save().wait()
        said.append(str(error.value))
        return sorted(path.name for path in folder.glob("step-*"))

    def save(**options):
        return checkpoint.save(folder, *made, {}, **options)

    def no_room(file, *_):
        raise OSError(28, "No space left on device", str(file))

    real, limit = disk.write_shard, resource.getrlimit(resource.RLIMIT_FSIZE)
    disk.write_shard = no_room if world.rank == 1 else real
    left = [refused(save), refused(lambda: save(background=True))]
    disk.write_shard = real
    if world.rank == 1:
        # A file that may grow no further, in the midst of writing.
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    left.append(refused(save))
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    if world.rank == 1:
        # A folder that this rank does not share with the others.
        disk.write_shard = lambda *_: 10
    left.append(refused(save))
    disk.write_shard = real
    left.append(refused(lambda: checkpoint.save(folder, *made, {"t": torch.ones(1)})))
    alien = adamw([torch.nn.Parameter(torch.ones(2))] if world.rank else made[0].parameters())
    left.append(refused(lambda: checkpoint.save(folder, made[0], alien, {})))
    left.append(refused(lambda: checkpoint.save(folder / "step-000001/manifest.json", *made, {})))
    # The error of a save in the background that nobody waited for, told at the next one.
    disk.write_shard = no_room if world.rank == 0 else real
    save(background=True)
    left.append(refused(save))
    disk.write_shard = real
    before = disk.latest(folder).name
    save().wait()
    return said, left, before


def test_a_rank_that_cannot_write_is_an_error_on_all_and_the_last_good_one_stays(tmp_path):
    words = [
        "step-000002 was not saved: rank 1: OSError: [Errno 28] No space left on device",
        "step-000002 was not saved: rank 1: OSError: [Errno 28] No space left on device",
        "rank 1: SafetensorError: Error while serializing: I/O error: File too large",
        "is not the file of 10 bytes that its rank wrote: all ranks need one folder",
        "cannot be saved: rank 0: TypeError: Object of type Tensor is not JSON serializable",
        "rank 1: ValueError: the optimizer has a parameter of shape [2] that is not this model's",
        "rank 0: ",
        "rank 0: OSError: [Errno 28]",
    ]
    for said, left, before in launch(failing, tmp_path, ranks=2):
        for message, word in zip(said, words, strict=True):
            assert word in message
        assert all(
            [n for n in names if not n.endswith(".tmp")] == ["step-000001"] for names in left
        )
        assert before == "step-000001"
    assert disk.latest(tmp_path).name == "step-000002"


def loading(world, cases):
    """What is said of each case, by this rank; and whether the model stayed what it was."""
    made = built(world, config_of(TWO, MODEL))
    steps(*made, 1)
    before = [p.detach().clone() for p in made[0].parameters()]
    said = []
    for folder, change, settings, kind in cases:
        parallel, optimizer = made
        if settings is not None:
            parallel = built(world, config_of(TWO, settings))[0]
            optimizer = adamw(parallel.parameters())
        if kind == "sgd":
            optimizer = sgd(parallel.parameters())
        if kind == "fewer":
            optimizer = adamw([p for p in parallel.parameters() if p.dim() > 1])
        if kind == "one group":
            optimizer = torch.optim.AdamW(parallel.parameters())
        if change is not None:
            real = checkpoint.read_manifest

            def read_and_change(path, real=real, change=change):
                found = real(path)
                (path / change).unlink(missing_ok=True)
                return found

            checkpoint.read_manifest = read_and_change
        with pytest.raises(ValueError) as error:
            checkpoint.load(folder, parallel, optimizer)
        if change is not None:
            checkpoint.read_manifest = real
        said.append(str(error.value))
    same = all(map(torch.equal, before, made[0].parameters()))
    return said, same and made[0].number == 1


def save_once(world, folder):
    made = built(world, config_of(TWO, MODEL))
    steps(*made, 1)
    checkpoint.save(folder, *made, {}).wait()


def test_what_is_missing_broken_or_of_another_model_is_the_same_error_on_all_ranks(tmp_path):
    launch(save_once, tmp_path / "good", ranks=2)
    first, second = "rank-00000.safetensors", "rank-00001.safetensors"

    def copy(name):
        shutil.copytree(tmp_path / "good", tmp_path / name)
        return tmp_path / name / "step-000001"

    for cut in (9, 3000, -8):
        file = copy(f"cut {cut}") / second
        file.write_bytes(file.read_bytes()[:cut])
    file = copy("header") / second
    file.write_bytes(file.read_bytes().replace(b"weight/head.weight", b"weight/heat.weight", 1))
    manifest = copy("no json") / "manifest.json"
    manifest.write_text("{")
    manifest = copy("list") / "manifest.json"
    manifest.write_text("[]")
    manifest = copy("newer") / "manifest.json"
    manifest.write_text('{"format": 3}')
    (copy("no manifest") / "manifest.json").unlink()
    (copy("no file") / first).unlink()
    copy("vanishes")
    good = tmp_path / "good"
    cases = [
        (tmp_path / "nowhere", None, None, None, "no checkpoint in"),
        (tmp_path / "no manifest", None, None, None, "no checkpoint in"),
        (tmp_path / "no json", None, None, None, "manifest.json is no manifest of a checkpoint"),
        (tmp_path / "list", None, None, None, "manifest.json is no manifest of a checkpoint"),
        (tmp_path / "newer", None, None, None, "has format 3, this version reads format 2"),
        (tmp_path / "no file", None, None, None, f"{first} is missing"),
        (tmp_path / "vanishes", second, None, None, f"{second} is missing"),
        (tmp_path / "header", None, None, None, f"{second} is broken: File does not contain"),
        *((tmp_path / f"cut {n}", None, None, None, f"{second} is broken") for n in (9, 3000, -8)),
        (good, None, MODEL | {"layers": 3}, None, "blocks.2.attn.q.weight is missing"),
        (good, None, MODEL | {"layers": 1}, None, "blocks.1.attn.q.weight is unexpected"),
        (
            good,
            None,
            MODEL | {"hidden": 16},
            None,
            "is float64 [61, 32] there and float64 [61, 16]",
        ),
        (good, None, None, "sgd", "the optimizer was AdamW and is SGD"),
        (good, None, None, "fewer", "the optimizer had norm.weight, and now has not"),
        (
            good,
            None,
            None,
            "one group",
            "group 0 of the optimizer has parameters that had different",
        ),
    ]
    told = launch(loading, [case[:4] for case in cases], ranks=2)
    assert [same for _, same in told] == [True, True]
    assert told[0][0] == told[1][0]
    for message, case in zip(told[0][0], cases, strict=True):
        assert case[4] in message, case


def test_an_unfinished_folder_is_not_taken_for_a_checkpoint(tmp_path):
    save_one(tmp_path, 1)
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000002.tmp")
    (tmp_path / "step-000003").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "step-000004")
    assert disk.latest(tmp_path).name == "step-000001"
    assert disk.find(tmp_path / "step-000001") == tmp_path / "step-000001"
    assert disk.latest(tmp_path / "nowhere") is None
