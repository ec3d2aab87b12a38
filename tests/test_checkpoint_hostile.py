"""Folders of checkpoints that people have moved, linked, copied over, edited and shared; weights to
start from that are something else.

A pruning that follows a link deletes what was moved away; one that takes the link's name and then
cannot delete it leaves what no later save gets past. Files that are told apart by name and size
alone let those of another rank or another save in. A manifest that is read without asking what it
says ends in a KeyError that names no file, or changes half a model. A save that does not ask for
the lock first deletes what another job is writing. A copy that converts what it gets makes weights
of whole numbers, and one that begins before all is known to fit leaves a mix.
"""

import json
import os
import shutil

import pytest
import torch
from checkpoint_training import SHAPE, assert_same, built, config_of, steps

from s2s_lib import GPT, RankError, launch
from s2s_lib.training import checkpoint, disk
from s2s_lib.training.lock import LOCK, locked
from s2s_lib.training.manifest import read_manifest

SMALL = {"layers": 1, "hidden": 16, "tied": False}
TP = {"tensor_parallel_size": 4}
ZERO = {"data_parallel_size": 2, "zero_stage": 3}


def save_at(world, folder, settings, numbers, keep=2):
    """A checkpoint at each of these steps; all weights of it are its step, on rank r and r / 8."""
    parallel, optimizer = built(world, config_of(settings, SMALL))
    steps(parallel, optimizer, 1)
    for parallel.number in numbers:
        with torch.no_grad():
            for weight in parallel.parameters():
                weight.fill_(parallel.number + world.rank / 8)
        checkpoint.save(folder, parallel, optimizer, {}, keep)


def values_of(path) -> set[float]:
    return {
        value for weight in checkpoint.export(path).values() for value in weight.unique().tolist()
    }


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


# What is in the way


def test_of_a_checkpoint_that_was_moved_and_linked_only_the_link_is_removed(tmp_path):
    folder, big = tmp_path / "saved", tmp_path / "big disk"
    launch(save_at, folder, {}, [1, 2], ranks=1)
    big.mkdir()
    for name in names_in(folder):
        shutil.move(folder / name, big)
        (folder / name).symlink_to(big / name)
    assert values_of(folder) == {2.0}
    # One is pruned; the other, which has the step of the next, is replaced.
    launch(save_at, folder, {}, [2, 3], ranks=1)
    assert names_in(folder) == ["step-000002", "step-000003"]
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert [values_of(big / name) for name in names_in(big)] == [{1.0}, {2.0}]


def test_what_has_a_checkpoints_name_and_is_none_stops_no_save_and_stays(tmp_path):
    (tmp_path / "step-000001").write_text("a note")
    (tmp_path / "step-000002").symlink_to("a disk that is not there")
    (tmp_path / "step-plan.tmp").mkdir()
    # By their names, these were left half done.
    (tmp_path / "step-000001.tmp").write_text("")
    (tmp_path / "step-000007.tmp").symlink_to(tmp_path / "step-plan.tmp")
    launch(save_at, tmp_path, {}, [1, 2, 3], ranks=1)
    put_aside = ["step-000001.old", "step-000002.old"]
    assert names_in(tmp_path) == sorted([*put_aside, "step-000002", "step-000003", "step-plan.tmp"])
    assert (tmp_path / "step-000001.old").read_text() == "a note"
    assert values_of(tmp_path) == {3.0}


def held_while_saving(world, folder):
    """Whether others are refused while a file is written, in a save that waits and in one that does
    not; what a save says that fails for another reason, and whether the next is let in."""
    parallel, optimizer = built(world, config_of(ZERO, SMALL))
    write_shard, refused = disk.write_shard, []

    def while_others_try(*args):
        with pytest.raises(ValueError, match=f"another job writes into .*process {os.getpid()} on"):
            with locked(folder):
                pass
        refused.append(True)
        return write_shard(*args)

    if world.rank == 0:
        disk.write_shard = while_others_try
    checkpoint.save(folder, parallel, optimizer, {})
    checkpoint.save(folder, parallel, optimizer, {}, background=True).wait()
    disk.write_shard = write_shard
    alien = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(RuntimeError, match="not this model's") as kept:
        checkpoint.save(folder, parallel, alien if world.rank else optimizer, {})
    checkpoint.save(folder, parallel, optimizer, {})
    # Who keeps the error, as a notebook does, keeps what the save had.
    return len(refused) * (kept.tb is not None)


def test_a_save_holds_its_folder_until_it_is_written_and_no_longer(tmp_path):
    assert launch(held_while_saving, tmp_path, ranks=2) == [2, 0]


def test_a_save_into_a_folder_that_another_job_holds_is_refused_and_leaves_its_files(tmp_path):
    with locked(tmp_path):
        (tmp_path / "step-000001.tmp").mkdir()
        with pytest.raises(RankError, match=f"another job .* {os.getpid()} on .* of its own"):
            launch(save_at, tmp_path, ZERO, [1], ranks=2)
        assert names_in(tmp_path) == ["step-000001.tmp"]
    launch(save_at, tmp_path, ZERO, [1], ranks=2)
    assert names_in(tmp_path) == ["step-000001"]


# What is not what was saved


def try_to_load(world, settings, folders):
    """What is said of each; and that nothing was changed by it."""
    parallel, optimizer = built(world, config_of(settings, SMALL))
    steps(parallel, optimizer, 1)
    before = [tensor.detach().clone() for tensor in parallel.parameters()]
    said = []
    for folder in folders:
        with pytest.raises(ValueError) as error:
            checkpoint.load(folder, parallel, optimizer)
        said.append(str(error.value))
    assert all(map(torch.equal, before, parallel.parameters()))
    assert parallel.number == 1 and len(optimizer.state) == len(before)
    return said


def test_files_that_are_not_of_this_checkpoint_are_told_by_name(tmp_path):
    for saved in ("saved", "again"):
        launch(save_at, tmp_path / saved, TP, [1, 2], ranks=4)

    def copy(name):
        return shutil.copytree(tmp_path / "saved/step-000002", tmp_path / name)

    one, two = "rank-00001.safetensors", "rank-00002.safetensors"
    shutil.copy(tmp_path / "saved/step-000001" / two, copy("of another step"))
    shutil.copy(tmp_path / "again/step-000002" / two, copy("of another save"))
    exchanged = copy("exchanged")
    for file, other in ((one, two), (two, one)):
        shutil.copy(tmp_path / "saved/step-000002" / file, exchanged / other)
    cases = [tmp_path / name for name in ("of another step", "of another save", "exchanged")]
    said = launch(try_to_load, TP, cases, ranks=4)
    assert said[0] == said[1] == said[2] == said[3]
    for case, words in zip(cases, said[0], strict=True):
        assert "rank-0000" in words and "is broken: it says that it is" in words
        with pytest.raises(ValueError, match="it says that it is .* --resume, load and"):
            checkpoint.export(case)
    # The way out.
    shutil.move(tmp_path / "of another step", tmp_path / "saved/step-000002.x")
    shutil.rmtree(tmp_path / "saved/step-000002")
    assert values_of(tmp_path / "saved") == {1 + rank / 8 for rank in range(4)}


def places(value, path=()):
    """Each place in a tree of JSON."""
    yield path
    inside = enumerate(value) if isinstance(value, list) else ()
    for key, child in value.items() if isinstance(value, dict) else inside:
        yield from places(child, (*path, key))


def edited(manifest, path, new):
    """With `new` at this place, or, if that is Ellipsis, without it."""
    manifest = json.loads(json.dumps(manifest))
    owner = manifest
    for key in path[:-1]:
        owner = owner[key]
    if new is ...:
        del owner[path[-1]]
    else:
        owner[path[-1]] = new
    return manifest


def test_an_edited_manifest_is_refused_by_its_name_or_means_the_same(tmp_path):
    """One value at a time, by everything that JSON has, and left out."""
    launch(save_at, tmp_path, {}, [1], ranks=1)
    path = disk.latest(tmp_path)
    manifest, right = read_manifest(path), checkpoint.export(tmp_path)
    # One tensor for all.
    few = [p for p in places(manifest) if p[:1] != ("tensors",) or p[1:2] in ((), ("head.weight",))]
    refused = set()
    for place in few[1:]:
        for new in (..., None, "x", -1, 0.5, 10**30, True, [], {}, [[]], {"x": None}):
            (path / "manifest.json").write_text(json.dumps(edited(manifest, place, new)))
            try:
                got = checkpoint.export(path)
            except ValueError as error:
                assert str(path) in str(error), (place, new, error)
                refused.add(place)
                assert disk.latest(tmp_path) == path
            else:
                shared = {name: right[name] for name in got if name in right}
                assert_same({name: got[name] for name in shared}, shared, (place, new))
    assert {place[0] for place in refused} == manifest.keys()


def test_a_manifest_that_was_edited_changes_no_model(tmp_path):
    launch(save_at, tmp_path / "good", ZERO, [1], ranks=2)
    manifest = read_manifest(tmp_path / "good/step-000001")
    head = ("tensors", "head.weight")
    edits = {
        "optimizer": (("optimizer",), None),
        "groups": (("optimizer", "groups", 0, "names"), ...),
        "settings": (("optimizer", "groups", 0, "settings", "lr"), {"value": 1}),
        "numbers": ((*head, "numbers", "step"), {"dtype": "float31", "value": 1.0}),
        "dtypes": ((*head, "dtypes", "optimizer/exp_avg"), "float31"),
        "pieces": ((*head, "pieces"), []),
        "file": ((*head, "pieces", 0, 0), "../step-000001/manifest.json"),
    }
    for name, edit in edits.items():
        shutil.copytree(tmp_path / "good/step-000001", tmp_path / name)
        file = tmp_path / name / "manifest.json"
        file.write_text(json.dumps(edited(manifest, *edit)))
    said = launch(try_to_load, ZERO, [tmp_path / name for name in edits], ranks=2)
    assert said[0] == said[1]
    assert all("manifest.json" in words for words in said[0]), said[0]


# Weights to start from

STATES = {
    "whole numbers": (
        lambda s: {k: (v * 100).long() for k, v in s.items()},
        "blocks.0.attn.q.weight is int64 there and float64 here",
    ),
    "complex": (lambda s: {k: v.to(torch.complex128) for k, v in s.items()}, "is complex128 there"),
    "one is sparse": (
        lambda s: s | {"head.weight": s["head.weight"].to_sparse()},
        "head.weight is a Tensor, no plain tensor with its values",
    ),
    "one has no memory": (
        lambda s: s | {"head.weight": s["head.weight"].to("meta")},
        "head.weight is a",
    ),
    "one is a list": (lambda s: s | {"norm.weight": [1.0] * 16}, "norm.weight is a list, no plain"),
    "one is transposed": (
        lambda s: s | {"blocks.0.attn.q.weight": torch.ones(16, 17)},
        "blocks.0.attn.q.weight is [16, 17] there and [16, 16] here",
    ),
    "names of other types": (
        lambda s: s | {0: s["norm.weight"], "x": s["norm.weight"]},
        "0 is unexpected; x is unexpected",
    ),
    "nested": (
        lambda s: {"model": s, "step": 3},
        "; and 7 more; model is unexpected; step is unexpected",
    ),
    "of another wrapper": (
        lambda s: {f"module.{k}": v for k, v in s.items()},
        "module.blocks.0.attn.k.weight is unexpected",
    ),
    "empty": (lambda s: {}, "is missing"),
    "none": (lambda s: None, "cannot start from None"),
}


def start_from_each(world, states):
    parallel, _ = built(world, config_of(ZERO, SMALL))
    before = [tensor.detach().clone() for tensor in parallel.parameters()]
    said = []
    for state in states:
        with pytest.raises(ValueError) as error:
            checkpoint.start_from(parallel, state)
        said.append(str(error.value))
    return said, all(map(torch.equal, before, parallel.parameters()))


def test_a_state_dict_of_something_else_is_refused_and_changes_nothing(tmp_path):
    weights = GPT(config_of({}, SHAPE | SMALL).gpt()).state_dict()
    states = [change(weights) for change, _ in STATES.values()]
    (said, same), other = launch(start_from_each, states, ranks=2)
    assert (said, same) == other and same
    for words, (name, (_, right)) in zip(said, STATES.items(), strict=True):
        assert right in words, (name, words)


def take_half(world, weights):
    parallel, _ = built(world, config_of(ZERO, SMALL))
    checkpoint.start_from(parallel, {name: tensor.half() for name, tensor in weights.items()})
    return [float(tensor.sum()) for tensor in parallel.parameters()]


def test_narrower_floats_are_taken_for_what_they_are(tmp_path):
    weights = GPT(config_of({}, SMALL).gpt()).state_dict()
    told = launch(take_half, weights, ranks=2)
    sums = [sum(parts) for parts in zip(*told, strict=True)]
    assert sums == pytest.approx([float(t.half().double().sum()) for t in weights.values()])
