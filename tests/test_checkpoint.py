"""Three steps, a checkpoint and three steps are six steps, whatever the layout before and after.

At one layout bit for bit, at another to 1e-9, with dropout and a learning rate that falls: a moment
that moves with its neighbour's offset, a step count lost, a rate from the group's default, masks
that begin anew, a shard that stage 1 does not gather again, each differs in the steps after it.
What is saved before the first step is what one process draws, so a part in a wrong place is seen
without loading it. A rank that writes what another writes too, or none does, fails the count.
"""

import itertools
import json
import threading
import tracemalloc

import pytest
import torch
from checkpoint_training import (
    SEED,
    TIED,
    UNTIED,
    adamw,
    assert_same,
    batch,
    built,
    config_of,
    contents,
    fused,
    gpt,
    sgd,
    steps,
)
from safetensors.torch import load_file, save_file

from s2s_lib import GPT, launch, next_token_loss
from s2s_lib.training import checkpoint, disk
from s2s_lib.training.pieces import pieces_of

CLOSE = 1e-9


def train_and_save(world, folder, configs, make=gpt, optimizer=adamw):
    """At each layout: save before the first step, after three and after six."""
    seen = {}
    for layout, config in configs.items():
        if (made := built(world, config, make, optimizer)) is None:
            continue
        seen[layout] = []
        for count in (0, 3, 3):
            seen[layout] += steps(*made, count)
            progress = {"step": made[0].number, "rate": 0.1, "name": layout}
            checkpoint.save(folder / layout, *made, progress, keep=9).wait()
    return seen


def load_and_go_on(world, folder, pairs, configs, make=gpt, optimizer=adamw):
    """Of each pair, load what the first layout saved after three steps at the second; take three
    more, from weights and moments that were others before; save that."""
    seen = {}
    for before, after in pairs:
        if (made := built(world, configs[after], make, optimizer)) is None:
            continue
        made[0].number = 7
        steps(*made, 1)
        for name, buffer in made[0].named_buffers():
            buffer += 0 if name.endswith("ones") else 1
        progress = checkpoint.load(folder / before / "step-000003", *made)
        assert progress == {"step": 3, "rate": 0.1, "name": before}
        seen[before, after] = steps(*made, 3)
        progress["step"] = 6
        checkpoint.save(folder / f"{before} -> {after}", *made, progress).wait()
    return seen


def check_all(folder, configs, pairs, **options):
    ranks = max(config.ranks for config in configs.values())
    saved = launch(train_and_save, folder, configs, *options.values(), ranks=ranks)
    gone_on = launch(load_and_go_on, folder, pairs, configs, *options.values(), ranks=ranks)
    want = contents(folder / "one process" / "step-000006")
    for before, after in pairs:
        mine = saved[0][before][:3] + gone_on[0][before, after]
        ends = contents(folder / f"{before} -> {after}" / "step-000006")
        straight = contents(folder / after / "step-000006")
        if before == after:
            assert mine == saved[0][after]
            assert_same(ends, straight, f"{before} again")
        straight["progress"] = want["progress"] = ends["progress"]
        assert_same(ends, want, f"{before} -> {after}", CLOSE)
        together = zip(mine, saved[0]["one process"], strict=True)
        assert (
            max(abs(a - b) for ours, one in together for a, b in zip(ours, one, strict=True))
            < CLOSE
        )


@pytest.mark.parametrize("layouts", [UNTIED, TIED], ids=["untied", "tied"])
def test_three_steps_and_three_more_are_six_at_the_same_layout_and_at_others(layouts, tmp_path):
    model = {"dropout": 0.1, "tied": layouts is TIED}
    configs = {name: config_of(settings, model) for name, settings in layouts.items()}
    names = list(layouts)
    # Each layout after itself, and after another.
    pairs = [(a, names[(i + shift) % len(names)]) for shift in (0, 3) for i, a in enumerate(names)]
    check_all(tmp_path, configs, pairs)
    torch.manual_seed(SEED)
    plain = GPT(configs["one process"].gpt()).to(torch.float64)
    for layout in layouts:
        weights = checkpoint.export(tmp_path / layout / "step-000000")
        assert_same(weights, plain.state_dict(), layout)
        assert plain.load_state_dict(weights)
        assert (weights["head.weight"] is weights["embed.weight"]) == (layouts is TIED)
    assert checkpoint.read_progress(tmp_path / "one process")["step"] == 6


def test_fused_weights_frozen_ones_and_buffers_are_the_same_after_another_cut(tmp_path):
    layouts = ["one process", "tp 2, sequence", "dp 2, tp 2, zero 3, tp outside", "dp 2, zero 1"]
    off = {"sequence_parallel": False}
    configs = {name: config_of(UNTIED[name] | off) for name in layouts}
    pairs = list(itertools.pairwise([*layouts, layouts[0]])) + [(n, n) for n in layouts]
    check_all(tmp_path, configs, pairs, make=fused, optimizer=sgd)
    names = fused(None).to(torch.float64).state_dict()
    for layout in layouts:
        weights = checkpoint.export(tmp_path / layout / "step-000000")
        assert_same(weights, names, layout)


def there_and_back(world, folder, configs):
    """Load at each layout in turn what was saved at the one before."""
    for number, config in enumerate(configs):
        made = built(world, config, fused)
        if made is None:
            continue
        if number:
            checkpoint.load(folder / str(number - 1), *made)
        else:
            steps(*made, 2)
        checkpoint.save(folder / str(number), *made, {}).wait()


def test_a_round_trip_over_other_cuts_changes_no_bit(tmp_path):
    tp = {"tensor_parallel_size": 2}
    four = {"data_parallel_size": 2, "zero_stage": 3, **tp}
    configs = [config_of(settings) for settings in (tp, {}, tp, four, {}, four)]
    launch(there_and_back, tmp_path, configs, ranks=4)
    first = contents(tmp_path / "0" / "step-000002")
    assert len(first) > 100
    for number in range(1, len(configs)):
        assert_same(contents(tmp_path / str(number) / "step-000002"), first, number)
    # And the parts themselves, as they lie in the files.
    for one, other in ((0, 2), (3, 5)):
        for file in (tmp_path / str(one) / "step-000002").glob("*.safetensors"):
            again = load_file(tmp_path / str(other) / "step-000002" / file.name)
            assert_same(again, load_file(file), file)


def count_owned(world, configs, make):
    """Of each layout: name and owned elements, in this rank."""
    seen = []
    for config in configs:
        made = built(world, config, make)
        pieces = pieces_of(made[0]) if made else []
        assert all(piece.tensor.numel() == piece.where.last - piece.where.first for piece in pieces)
        seen.append([(p.name, p.tensor.numel(), p.shape) for p in pieces if p.owned])
    return seen


def test_each_element_is_owned_by_one_rank(tmp_path):
    for tied, layouts in ((False, UNTIED), (True, TIED)):
        configs = [config_of(settings, {"tied": tied}) for settings in layouts.values()]
        told = launch(count_owned, configs, gpt, ranks=4)
        model = gpt(configs[0])
        for number, layout in enumerate(layouts):
            owned = {}
            for name, count, shape in (piece for rank in told for piece in rank[number]):
                assert shape == list(model.get_parameter(name).shape)
                owned[name] = owned.get(name, 0) + count
            assert owned == {n: p.numel() for n, p in model.named_parameters()}, layout


def masters(world, folder, settings, go_on):
    made = built(world, config_of(settings, precision="bfloat16"))
    if go_on:
        checkpoint.load(folder, *made)
        return steps(*made, 2)
    steps(*made, 2)
    checkpoint.save(folder, *made, {}).wait()
    return steps(*made, 2)


def test_mixed_precision_keeps_the_optimizers_own_numbers(tmp_path):
    for settings in ({"data_parallel_size": 2}, {"data_parallel_size": 2, "zero_stage": 3}):
        folder = tmp_path / str(len(settings))
        straight = launch(masters, folder, settings, False, ranks=2)
        assert launch(masters, folder, settings, True, ranks=2) == straight
        saved = checkpoint.export(folder)
        assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
        rounded = sum(int((t.bfloat16().float() != t).sum()) for t in saved.values())
        assert rounded > sum(t.numel() for t in saved.values()) / 2


def in_the_background(world, folder):
    """Save twice, with and without waiting, and train on at once."""
    made = built(world, config_of(UNTIED["dp 2, zero 1"], {"dropout": 0.1}))
    steps(*made, 2)
    checkpoint.save(folder / "waits", *made, {})
    write_shard, begun, stepped = disk.write_shard, [], threading.Event()

    def slowly(*args):
        # Not before the weights are others.
        begun.append(args)
        stepped.wait()
        return write_shard(*args)

    disk.write_shard = slowly
    saving = checkpoint.save(folder / "runs on", *made, {}, background=True)
    assert not saving.done() and disk.latest(folder / "runs on") is None
    steps(*made, 3)
    stepped.set()
    disk.write_shard = write_shard
    # Waits for the one before.
    another = checkpoint.save(folder / "runs on", *made, {}, background=True)
    assert saving.done() and saving.wait().name == "step-000002"
    another.wait()
    return len(begun) > 0


def test_a_save_in_the_background_holds_the_weights_of_when_it_began(tmp_path):
    assert all(launch(in_the_background, tmp_path, ranks=2))
    waited = contents(tmp_path / "waits" / "step-000002")
    assert_same(contents(tmp_path / "runs on" / "step-000002"), waited, "in the background")
    assert disk.latest(tmp_path / "runs on").name == "step-000005"


WIDE = {"hidden": 128, "tied": False}


def bytes_of(world, folder):
    """Bytes of the files, of what is given to the writer, and of what Python and torch take for
    it while they write; with what this rank holds."""
    made = built(world, config_of(UNTIED["dp 2, tp 2, zero 3, tp outside"], WIDE))
    steps(*made, 1)
    pieces = pieces_of(made[0])
    mine = sum(p.tensor.nbytes for p in pieces if p.owned)
    held = {p.tensor.untyped_storage().data_ptr() for p in pieces}
    held |= {
        t.untyped_storage().data_ptr() for entry in made[1].state.values() for t in entry.values()
    }
    write_shard, seen = disk.write_shard, []

    def measured(file, tensors, said):
        given = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()
        }
        tracemalloc.start()
        size = write_shard(file, tensors, said)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        new = sum(count for pointer, count in given.items() if pointer not in held)
        seen.append({"file": size, "new": new, "python": peak, "mine": mine})
        return size

    disk.write_shard = measured
    checkpoint.save(folder / "waits", *made, {})
    checkpoint.save(folder / "copies", *made, {}, background=True).wait()
    return seen


def test_saving_copies_nothing_or_one_shard_and_each_rank_writes_its_own(tmp_path):
    whole = sum(p.numel() * 8 for p in gpt(config_of({}, WIDE)).parameters())
    told = launch(bytes_of, tmp_path, ranks=4)
    for waits, copies in told:
        assert waits["new"] == 0 and copies["new"] == 3 * copies["mine"] < whole
        assert waits["file"] == copies["file"] < 3 * waits["mine"] + 20_000
        assert max(waits["python"], copies["python"]) < waits["mine"] / 4
    assert sum(rank[0]["mine"] for rank in told) == whole


def start(world, configs, sources):
    """The losses of each layout with the weights of each source."""
    losses = []
    for config in configs:
        if (made := built(world, config)) is not None:
            for source in sources:
                steps(*made, 1)
                checkpoint.start_from(made[0], source)
                rows = [t.chunk(made[0].dp.size)[made[0].dp.rank] for t in batch(0)]
                losses.append(float(made[0].evaluate(*rows)))
    return losses


@pytest.mark.parametrize(
    "tied, layouts",
    [
        (False, ["tp 2, sequence", "dp 4, zero 3 in pairs", "dp 2, pp 2, zero 2, interleaved"]),
        (True, ["tp 2, pp 2", "dp 2, tp 2, zero 1"]),
    ],
)
def test_any_layout_starts_from_a_plain_state_dict_or_a_file_of_it(tied, layouts, tmp_path):
    known = TIED if tied else UNTIED
    configs = [config_of(known[layout], {"tied": tied}) for layout in layouts]
    torch.manual_seed(77)
    plain = GPT(configs[0].gpt()).to(torch.float64)
    weights = plain.state_dict()
    x, y = batch(0)
    loss = float(next_token_loss(plain(x), y).detach())
    # A tied weight by its second name alone, as some files have it.
    file = {name: t for name, t in weights.items() if not tied or name != "embed.weight"}
    save_file(file, tmp_path / "plain.safetensors")
    for rank in launch(start, configs, [weights, tmp_path / "plain.safetensors"], ranks=4):
        assert all(abs(got - loss) < CLOSE for got in rank)


def refused(world, config, sources):
    made = built(world, config)
    said = []
    for source in sources:
        with pytest.raises(ValueError) as error:
            checkpoint.start_from(made[0], source)
        said.append(str(error.value))
    return said


def test_weights_that_do_not_fit_are_refused_by_name_on_all_ranks(tmp_path):
    config = config_of(TIED["tp 2, pp 2"], {"tied": True})
    weights = GPT(config.gpt()).state_dict()
    missing = {n: t for n, t in weights.items() if n != "norm.weight"}
    shape = weights | {"blocks.3.attn.q.weight": torch.zeros(32, 16)}
    untied = weights | {"head.weight": torch.zeros(61, 32)}
    (tmp_path / "text").write_text("no weights")
    sources = [
        missing,
        weights | {"more": torch.zeros(2)},
        shape,
        untied,
        weights | {"norm.weight": 3},
    ]
    sources += [tmp_path / "absent", tmp_path / "text"]
    words = [
        "norm.weight is missing",
        "more is unexpected",
        "blocks.3.attn.q.weight is [32, 16] there and [32, 32] here",
        "embed.weight and head.weight are one tensor here and differ there",
        "norm.weight is a int, no plain tensor",
        "absent: rank 0: there is no such file",
        "it is no safetensors file",
    ]
    for said in launch(refused, config, sources, ranks=4):
        assert all(word in message for word, message in zip(words, said, strict=True)), said


def unused(world, folder):
    """A parameter that has not been stepped yet, and groups that a rank has nothing of."""
    config = config_of(UNTIED["dp 2, pp 2, zero 2, interleaved"], {"tied": False})
    parallel, optimizer = built(world, config)
    checkpoint.save(folder, parallel, optimizer, {}).wait()
    steps(parallel, optimizer, 1)
    checkpoint.load(folder, parallel, optimizer)
    return len(optimizer.state), parallel.number


def test_state_that_is_not_there_yet_is_not_there_after_loading(tmp_path):
    assert launch(unused, tmp_path, ranks=4) == [(0, 0)] * 4


def test_files_are_plain_safetensors_and_json_with_the_true_shapes(tmp_path):
    config = config_of(UNTIED["dp 3, zero 2"])
    launch(train_and_save, tmp_path, {"three": config}, ranks=3)
    path = disk.latest(tmp_path / "three")
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        *(f"rank-0000{rank}.safetensors" for rank in range(3)),
    ]
    for name, tensor in manifest["tensors"].items():
        assert tensor["shape"] == list(gpt(config).get_parameter(name).shape)
        assert tensor["numbers"] == {"step": {"dtype": "float32", "value": 6.0}}
        for file, _, first, last in tensor["pieces"]:
            assert len(load_file(path / file)[f"weight/{name}"]) == last - first
