"""Who reads what: every sample once, on one rank, in an order that the seed and the epoch decide.

Tokens are distinct numbers here, so a sample is known by its first token. A sampler that pads
fails the counts of 5 samples, one that shuffles per rank fails the disjointness, one that orders
by rank fails the sameness of a global batch.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch

from s2s_lib.course.data import Batches, evaluation, hold_out, text


def numbered(samples, seq=4, extra=0):
    """Tokens 0, 1, 2, ... that make this many samples and `extra` tokens of another."""
    return torch.arange(samples * seq + 1 + extra)


def firsts(batches):
    return [int(first) for x, _ in batches for first in x[:, 0]]


def test_the_default_text_is_the_standard_library_and_comes_out_the_same_twice():
    tokens = text()
    assert tokens.dtype == torch.uint8 and tokens.dim() == 1
    assert len(tokens) > 1_000_000
    assert b"def " in tokens.numpy().tobytes()
    assert torch.equal(tokens, text())


def test_the_default_text_holds_nothing_that_is_specific_to_the_machine():
    assert b"build_time_vars = {" not in text().numpy().tobytes()


def test_any_file_is_read_as_the_bytes_that_it_has(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("na\u00efve".encode("latin-1") + b"\xff\x00")
    assert text(file).tolist() == list(b"na\xefve\xff\x00")
    assert text(str(file)).tolist() == text(file).tolist()


def test_a_folder_is_its_text_files_in_the_order_of_their_paths(tmp_path):
    for name, content in {
        "b.txt": b"B",
        "a/z.txt": b"Z",
        "a/a.txt": b"A",
        ".hidden": b"no",
        ".git/x": b"no",
        "a/.git/y": b"no",
        "image.png": b"no\0",
        "empty": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert bytes(text(tmp_path).tolist()) == b"AZB"


def test_a_folder_below_a_hidden_one_is_read(tmp_path):
    folder = tmp_path / ".cache" / "texts"
    folder.mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"A")
    assert bytes(text(folder).tolist()) == b"A"


def test_no_text_is_an_error_with_the_path(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "binary").write_bytes(b"\0")
    for name, problem in {
        "missing.txt": "no file or folder",
        "empty.txt": "no text in",
        "folder": "no text in",
    }.items():
        with pytest.raises(ValueError, match=problem) as error:
            text(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)


def test_an_unreadable_file_is_an_error_with_the_path(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    file = tmp_path / "secret.txt"
    file.write_bytes(b"x")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match="cannot read .*secret.txt: Permission denied"):
        text(file)


def test_hold_out_cuts_the_text_in_two_without_overlap():
    train, held = hold_out(torch.arange(10), share=0.3)
    assert train.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert held.tolist() == [7, 8, 9]


@pytest.mark.parametrize("share", [0, 1, -0.1, 0.001, 0.999])
def test_hold_out_refuses_to_leave_one_side_empty(share):
    with pytest.raises(ValueError, match=f"share={share} of 10 tokens"):
        hold_out(torch.arange(10), share)


def test_targets_are_the_inputs_one_token_later_and_each_is_predicted_once():
    batches = list(Batches(numbered(6), seq=4, batch_size=2).epoch(0))
    assert all(torch.equal(y, x + 1) for x, y in batches)
    assert all(x.shape == (2, 4) and x.dtype == torch.int64 for x, _ in batches)
    assert all(t.is_contiguous() for pair in batches for t in pair)
    predicted = Counter(int(t) for _, y in batches for t in y.flatten())
    assert predicted == Counter(range(1, 25))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("extra", [0, 1, 3])
def test_shards_of_an_epoch_are_disjoint_and_cover_all_that_fills_a_global_batch(size, extra):
    tokens = numbered(25, extra=extra)
    ranks = [Batches(tokens, 4, 2, rank, size) for rank in range(size)]
    for epoch in range(2):
        seen = Counter(first for batches in ranks for first in firsts(batches.epoch(epoch)))
        assert set(seen.values()) == {1}
        assert seen.keys() <= {4 * sample for sample in range(25)}
        assert len(seen) == 25 - ranks[0].dropped
        assert ranks[0].dropped == 25 % (2 * size)
    assert len({len(list(batches.epoch(0))) for batches in ranks}) == 1
    assert len(ranks[0]) == 25 // (2 * size)


def test_the_order_changes_with_the_epoch_and_the_seed_and_nothing_else():
    batches = Batches(numbered(20), 4, 2, seed=3)
    torch.manual_seed(0)
    first = firsts(batches.epoch(0))
    torch.manual_seed(1)
    assert firsts(batches.epoch(0)) == first
    assert firsts(batches.epoch(1)) != first
    assert firsts(Batches(numbered(20), 4, 2, seed=4).epoch(0)) != first
    assert sorted(firsts(batches.epoch(1))) == sorted(first)
    assert first != sorted(first)


def test_making_batches_leaves_the_global_random_state_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(Batches(numbered(6), 4, 2).epoch(0))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_the_global_batch_of_a_step_is_the_same_for_any_number_of_ranks(size):
    tokens = numbered(25)
    alone = list(Batches(tokens, 4, 6).epoch(1))
    ranks = [list(Batches(tokens, 4, 6 // size, rank, size).epoch(1)) for rank in range(size)]
    for step, (x, y) in enumerate(alone):
        assert torch.equal(torch.cat([batches[step][0] for batches in ranks]), x)
        assert torch.equal(torch.cat([batches[step][1] for batches in ranks]), y)


def test_an_epoch_goes_on_from_any_step():
    batches = Batches(numbered(25), 4, 2, rank=1, size=3)
    whole = firsts(batches.epoch(2))
    assert len(batches) == 4
    for start in range(5):
        assert firsts(batches.epoch(2, start=start)) == whole[2 * start :]
    with pytest.raises(ValueError, match="start=5: an epoch has steps 0 to 3"):
        batches.epoch(2, start=5)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_five_evaluation_samples_count_five_on_any_number_of_ranks(size, batch_size):
    tokens = numbered(5, extra=2)
    parts = [list(evaluation(tokens, 4, batch_size, rank, size)) for rank in range(size)]
    assert sorted(first for part in parts for first in firsts(part)) == [0, 4, 8, 12, 16]
    assert all(torch.equal(y, x + 1) and 0 < len(x) <= batch_size for p in parts for x, y in p)


def test_a_metric_of_sum_over_count_does_not_depend_on_the_number_of_ranks():
    tokens = numbered(5)
    metrics = set()
    for size in (1, 2, 3, 4):
        batches = [b for rank in range(size) for b in evaluation(tokens, 4, 2, rank, size)]
        metrics.add(sum(int(y.sum()) for _, y in batches) / sum(y.numel() for _, y in batches))
    assert len(metrics) == 1


def test_a_batch_larger_than_the_data_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="global batch of 3 x 2 = 6 samples.* the 5 that 21 token"):
        Batches(numbered(5), 4, 3, rank=0, size=2)
    with pytest.raises(ValueError, match="batch_size=0"):
        Batches(numbered(5), 4, 0)


@pytest.mark.parametrize("make", [Batches, evaluation])
def test_ranks_rows_and_tokens_that_do_not_fit_are_refused_at_once(make):
    with pytest.raises(ValueError, match="rank 2 of 2: .* size - 1 = 1"):
        make(numbered(5), 4, 1, 2, 2)
    with pytest.raises(ValueError, match="rank -1 of 2"):
        make(numbered(5), 4, 1, -1, 2)
    with pytest.raises(ValueError, match="seq=21 needs .* there are 21"):
        make(numbered(5), 21, 1)
    with pytest.raises(ValueError, match="seq=0"):
        make(numbered(5), 0, 1)
    with pytest.raises(ValueError, match="float32 of shape"):
        make(torch.rand(9), 4, 1)
    with pytest.raises(ValueError, match=r"shape \(3, 3\)"):
        make(torch.zeros(3, 3, dtype=torch.int64), 1, 1)
