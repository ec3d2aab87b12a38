"""`memory()` against bytes counted by hand.

Small modules whose every storage can be listed on paper. A storage counted twice shows in the tied
weight and in the bucket; one kept alive by the meter itself in "gone after backward"; one that is
missed in the exact chain; a wrong name for a byte in any of them.
"""

import itertools
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from s2s_lib.meters.memory import KINDS, Memory, memory

FLOAT = 4


def bytes_of(**counts):
    return {kind: counts.get(kind, 0) for kind in KINDS}


def chain(layers, width):
    """Linear + ReLU, `layers` times: backward needs each layer's input and each ReLU's output."""
    pairs = [(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*[module for pair in pairs for module in pair])


def test_weights_gradients_and_adam_state_of_a_linear_layer_are_exact():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    weights = (3 * 2 + 2) * FLOAT
    with memory(model, optimizer) as m:
        assert m.live == bytes_of(weights=weights)
        model(torch.ones(5, 3)).sum().backward()
        assert m.live == bytes_of(weights=weights, gradients=weights)
        optimizer.step()
    # Two numbers for each weight, and a step counter for each of the two parameters.
    state = 2 * weights + 2 * FLOAT
    assert m.live == bytes_of(weights=weights, gradients=weights, optimizer=state)
    assert m.live_total == 2 * weights + state


def test_forward_keeps_what_backward_needs_and_backward_frees_it():
    layers, batch, width = 5, 7, 11
    model, one = chain(layers, width), batch * width * FLOAT
    x = torch.randn(batch, width)
    with memory(model) as m:
        out = model(x)
        assert m.live["activations"] == (layers + 1) * one  # x and the output of each ReLU
        # While the last ReLU runs, the output of the last Linear is there too.
        assert m.highest["activations"] == m.peak["activations"] == (layers + 2) * one
        out.sum().backward()
        del out
    assert m.live["activations"] == one  # x, which this test still holds
    assert m.live["temporary"] == 0
    assert m.live["gradients"] == m.live["weights"] == layers * width * width * FLOAT


def test_a_big_batch_peaks_before_backward_and_big_weights_peak_at_its_end():
    for batch, width in [(512, 8), (2, 64)]:
        model, layers = chain(6, width), 6
        with memory(model) as m:
            model(torch.randn(batch, width)).sum().backward()
        one, weight = batch * width * FLOAT, width * width * FLOAT
        if batch > width:
            assert m.peak["gradients"] == 0 and m.peak["activations"] >= layers * one
        else:
            assert m.peak["gradients"] >= (layers - 1) * weight
            assert m.peak["activations"] <= 2 * one
        assert m.highest["gradients"] == layers * weight
        assert m.peak_total == sum(m.peak.values()) >= m.live_total


def test_the_rise_of_a_whole_step_is_what_torchs_own_allocator_log_says():
    model = nn.Sequential(nn.Embedding(50, 32), nn.LayerNorm(32), *chain(3, 32), nn.Linear(32, 50))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(50, (4, 16))

    def step():
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with memory(model, optimizer) as m:
        tokens.add_(0)
        before = m.live_total
        step()
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = [
        e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if "memory" in e.name()
    ]
    assert m.peak_total - before == max(itertools.accumulate(changes)) > 0


def test_checkpointing_lowers_peak_activations():
    batch, width, layers = 64, 16, 4
    one = batch * width * FLOAT
    blocks = nn.Sequential(*[chain(layers, width) for _ in range(layers)])

    def through_checkpoints(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    highest = []
    for forward in blocks, through_checkpoints:
        with memory(blocks) as m:
            forward(torch.randn(batch, width)).sum().backward()
        highest.append(m.highest["activations"])
    plain, saving = highest
    assert plain == (layers * layers + 2) * one
    # One block computed again (its input, each ReLU, one Linear), the inputs of the other blocks.
    assert saving <= (2 * layers + 2) * one


def test_an_optimizers_scratch_is_temporary_and_a_frozen_weight_has_no_gradient():
    model = nn.Linear(8, 8, bias=False)
    frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
    both = nn.Sequential(frozen, model)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    both(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    with memory(both, optimizer) as m:
        optimizer.step()
    one = 8 * 8 * FLOAT
    assert m.live == bytes_of(weights=2 * one, gradients=one, optimizer=2 * one + FLOAT)
    assert one <= m.highest["temporary"] <= 2 * one + 2 * FLOAT
    assert m.highest["activations"] == 0


def test_a_tied_weight_counts_once():
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    with memory(model) as m:
        model(torch.tensor([1, 2])).sum().backward()
    assert m.live["weights"] == m.live["gradients"] == 10 * 4 * FLOAT


def test_gradients_that_are_views_into_a_bucket_count_as_the_bucket():
    model, bucket = nn.Linear(3, 2), torch.zeros(10)
    with memory(model) as m:
        model.weight.grad, model.bias.grad = bucket[:6].view(2, 3), bucket[6:8]
        model(torch.ones(1, 3)).sum().backward()
        assert m.live["gradients"] == 10 * FLOAT
        model.zero_grad(set_to_none=True)
        assert m.live["gradients"] == 10 * FLOAT, "the bucket is still there"
        del bucket
        assert m.live["gradients"] == 0


def test_an_emptied_storage_counts_nothing_until_it_is_filled_again():
    model, flat = nn.Linear(3, 2), torch.zeros(12)
    with memory(model) as m:
        model.weight.data, model.bias.data = flat[:6].view(2, 3), flat[6:8]
        assert m.live == bytes_of(weights=12 * FLOAT)
        flat.untyped_storage().resize_(0)
        assert m.live == bytes_of(weights=0)
        flat.untyped_storage().resize_(12 * FLOAT)
        assert m.live == bytes_of(weights=12 * FLOAT)
    assert m.highest["weights"] == 12 * FLOAT


def test_a_shard_keeps_its_name_while_the_parameter_looks_elsewhere():
    model, shard, full = nn.Linear(4, 2, bias=False), torch.zeros(4), torch.zeros(8)
    with memory(model) as m:
        model.weight.data = shard
        assert m.live["weights"] == 4 * FLOAT
        model.weight.data = full.view(2, 4)
        assert m.live["weights"] == (4 + 8) * FLOAT


def test_buffers_and_the_optimizers_nested_state_have_their_names():
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=2)
    x = torch.randn(4, 3)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with memory(model, optimizer) as m:
        pass
    assert m.live["buffers"] == (3 + 3) * FLOAT + 8  # mean, variance, and a counter
    assert len(optimizer.state[model.weight]["old_dirs"]) == 2
    assert m.live["optimizer"] >= 5 * 6 * FLOAT  # d, and two directions and steps, each 6 numbers


def test_without_a_model_everything_is_activations_or_temporary():
    weight = torch.ones(5, requires_grad=True)
    with memory() as m:
        scratch = torch.ones(3)
        out = (weight * 2).exp()
        assert m.live == bytes_of(activations=(5 + 5) * FLOAT, temporary=3 * FLOAT)
    del scratch, out
    assert m.live_total == 13 * FLOAT, "after the `with`, the numbers stay as they were"


def test_forward_without_grad_keeps_no_activations():
    model, x = chain(4, 8), torch.randn(2, 8)
    with memory(model) as m, torch.no_grad():
        model(x)
    assert m.highest["activations"] == 0
    assert m.live["temporary"] == 2 * 8 * FLOAT  # x


def test_what_a_function_of_our_own_returns_is_an_activation_once_used():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    model = nn.Linear(4, 4, bias=False)
    with memory(model) as m:
        out = Double.apply(model(torch.ones(2, 4))).sin()  # the sine keeps what it was given
        assert m.live == bytes_of(weights=4 * 4 * FLOAT, activations=3 * 2 * 4 * FLOAT)
        del out


def test_sparse_and_nested_tensors_count_as_the_plain_ones_in_them():
    model = nn.Embedding(100, 4, sparse=True)
    with memory(model) as m:
        model(torch.tensor([3, 5])).sum().backward()
        assert m.live["gradients"] == 2 * 4 * FLOAT + 2 * 8  # two rows, two row numbers
        ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        before = m.live_total
        del ragged
        assert before - m.live_total == 5 * FLOAT + 3 * 8


def test_operations_of_other_threads_are_not_seen_until_this_one_uses_their_tensors():
    made = []
    with memory() as m:
        thread = threading.Thread(target=lambda: made.append(torch.ones(100)))
        thread.start()
        thread.join()
        assert m.live_total == m.peak_total == 0
        made[0].add_(1)
        assert m.live_total == 100 * FLOAT


def test_an_error_in_the_block_leaves_no_mode_behind():
    with pytest.raises(ZeroDivisionError), memory() as m:
        kept = torch.ones(4)
        raise ZeroDivisionError
    torch.ones(1000)
    assert m.peak_total == 4 * FLOAT
    assert len(kept) == 4


def test_two_memories_may_be_nested():
    with memory() as outer:
        a = torch.ones(2)
        with memory() as inner:
            b = torch.ones(3)
    assert (outer.live_total, inner.live_total) == (5 * FLOAT, 3 * FLOAT)
    del a, b


def test_what_was_found_can_be_returned_from_a_rank():
    model = nn.Linear(2, 2)
    with memory(model) as m:
        model(torch.ones(1, 2)).sum().backward()
    copy = pickle.loads(pickle.dumps(m))
    assert isinstance(copy, Memory) and repr(copy) == repr(m)
    assert (copy.live, copy.peak, copy.highest) == (m.live, m.peak, m.highest)


def test_the_table_is_the_same_each_time():
    model = nn.Linear(1000, 100)
    with memory(model) as m:
        pass
    assert repr(m).splitlines()[:2] == [
        "bytes               live   at the peak   own highest",
        "weights           400 kB        400 kB        400 kB",
    ]
    assert "| total | 400 kB | 400 kB |  |" in m._repr_markdown_()


def test_an_optimizer_in_the_models_place_is_refused():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(TypeError, match="not a SGD.*memory\\(optimizer="), memory(optimizer):
        pass
