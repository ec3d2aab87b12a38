"""Column-parallel layers that are called with the same tensor share its entrance, and only then.

Each use of a module with two such layers is tried whole on one process and cut on two ranks; what
it returns (outputs, gradients asked for) and the gradients of all parameters must be the same in
float64 to 1e-10. A region kept too long mixes gradients of one call into another's; one forgotten
too early, or not at all, shows in the number of messages: an entrance owes one sum in backward.
"""

import functools

import pytest
import torch
from tensor_training import CLOSE, OPTIONS, joined
from torch import nn

from s2s_lib import RankError, bill, launch, tensor_parallel


class Two(nn.Module):
    """Two layers of one input width, made to be called by `use`."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 4)
        self.down = nn.Linear(8, 6)

    def forward(self, use, *values):
        return use(self, *values)


def built():
    torch.manual_seed(0)
    return Two().double()


def x_of(seed=1):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(3, 4, 6, generator=random, dtype=torch.float64, requires_grad=True)


def lean(*outputs):
    """A loss for which each output matters in its own way. A cut one is weighed as its part is: by
    a function of its values alone. (Of a sum over the cut dim each rank has a term.)"""
    return sum((i + 1) * (y.tanh() + y.square()).sum() for i, y in enumerate(outputs))


# Uses, with how many sums backward owes. Each returns the gradient of x, or a tuple of tensors.


def one_tensor(m, x):
    lean(m.a(x), m.b(x)).backward()
    return x.grad


def different_tensors(m, x):
    y = x.cos()
    lean(m.a(x), m.b(y)).backward()
    return x.grad


def equal_tensors_that_are_not_the_same(m, x):
    lean(m.a(x), m.b(x.clone())).backward()
    return x.grad


def one_layer_unused(m, x):
    lean(m.b(x)).backward()
    return x.grad


def one_output_unused(m, x):
    m.b(x)
    lean(m.a(x)).backward()
    return x.grad


def one_layer_twice(m, x):
    lean(m.a(x), m.b(x), m.a(x)).backward()
    return x.grad


def one_layer_on_each_of_two(m, x):
    y = x.sin()
    lean(m.a(x), m.a(y), m.b(y), m.b(x)).backward()
    return x.grad


def changed_in_place_between(m, x):
    h = x * 1
    m.a(h)
    lean(m.b(h.mul_(2))).backward()
    return x.grad


def left_from_a_call_without_gradients(m, x):
    with torch.no_grad():
        m.a(x)
    lean(m.b(x), m.a(x)).backward()
    return x.grad


def asked_for_x_alone(m, x):
    return torch.autograd.grad(lean(m.a(x), m.b(x)), x)


def asked_for_one_weight_alone(m, x):
    return torch.autograd.grad(lean(m.a(x), m.b(x)), m.b.weight)


def asked_for_one_bias_and_then_for_x(m, x):
    a, b = m.a(x), m.b(x)
    of_bias = torch.autograd.grad(lean(a), m.a.bias, retain_graph=True)
    return *of_bias, *torch.autograd.grad(lean(b), x)


def asked_twice(m, x):
    loss = lean(m.a(x), m.b(x))
    first = torch.autograd.grad(loss, [x, m.a.weight], retain_graph=True)
    return *first, *torch.autograd.grad(loss, [x, m.b.weight, m.b.bias])


def two_losses_backward_in_turn(m, x):
    h = x.sin()
    a, b = m.a(h), m.b(h)
    lean(b).backward(retain_graph=True)
    lean(a).backward()
    return x.grad


def two_losses_of_what_has_no_gradient(m, x):
    data = x.detach()
    a, b = m.a(data), m.b(data)
    lean(b).backward()
    lean(a).backward()
    return ()


def frozen_layer(m, x):
    m.a.requires_grad_(False)
    lean(m.a(x), m.b(x)).backward()
    return x.grad


def frozen_layers(m, x):
    m.requires_grad_(False)
    lean(m.a(x), m.b(x)).backward()
    return x.grad


def frozen_weights(m, x):
    m.a.weight.requires_grad_(False)
    m.b.weight.requires_grad_(False)
    lean(m.a(x.detach()), m.b(x.detach())).backward()
    return ()


def input_without_a_gradient(m, x):
    data = x.detach()
    lean(m.a(data), m.b(data)).backward()
    return ()


def inference(m, x):
    with torch.inference_mode():
        y = m.a(x * 1)
    return y.clone(), m.b(x).detach()


def output_changed_in_place(m, x):
    lean(m.a(x).relu_(), m.b(x).mul_(2)).backward()
    return x.grad


def strange_strides(m, x):
    y = x.transpose(0, 1)
    lean(m.a(y), m.b(y)).backward()
    return x.grad


def one_row(m, x):
    y = x[0, 0]
    lean(m.a(y), m.b(y)).backward()
    return x.grad


def no_rows(m, x):
    y = x[:0]
    lean(m.a(y), m.b(y)).backward()
    return x.grad


def expanded_gradient(m, x):
    (m.a(x).sum() + m.b(x).mean() * len(m.b.weight) / m.b.out_features).backward()
    return x.grad


def hooks_of_a_weight(m, x):
    m.a.weight.register_hook(lambda grad: grad * 3)
    lean(m.a(x), m.b(x)).backward()
    return x.grad


SUMS = {
    one_tensor: 1,
    different_tensors: 2,
    equal_tensors_that_are_not_the_same: 2,
    one_layer_unused: 1,
    one_output_unused: 1,
    one_layer_twice: 2,
    one_layer_on_each_of_two: 3,
    changed_in_place_between: 1,
    left_from_a_call_without_gradients: 1,
    asked_for_x_alone: 1,
    asked_for_one_weight_alone: None,
    asked_for_one_bias_and_then_for_x: None,
    asked_twice: 2,
    two_losses_backward_in_turn: 2,
    two_losses_of_what_has_no_gradient: 0,
    frozen_layer: 1,
    frozen_layers: 1,
    frozen_weights: 0,
    input_without_a_gradient: 0,
    inference: 0,
    output_changed_in_place: 1,
    strange_strides: 1,
    one_row: 1,
    no_rows: 0,
    expanded_gradient: None,
    hooks_of_a_weight: 1,
}


# With sequence parallel x is [.., tokens, numbers], and what is gathered for all layers is one node
# of the graph.
WITHOUT_SEQUENCE = (strange_strides, one_row, two_losses_of_what_has_no_gradient)


def tried(use, model, x):
    """What a use returns and the parameters' gradients by name, and messages sent; or an error."""
    with bill() as sent:
        try:
            told = model(use, x.detach().requires_grad_())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    told = told if isinstance(told, tuple) else (told,)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {f"returned {i}": t for i, t in enumerate(told)} | grads, sent.messages


@functools.cache
def all_tried(how):
    def work(world):
        found = {}
        for use in SUMS:
            model = tensor_parallel(built(), world, {"[ab]": "column"}, **OPTIONS[how])
            x = x_of() if how == "whole" else x_of().chunk(2, 1)[world.rank]
            found[use.__name__] = tried(use, model, x), tried(use, built(), x_of())
        return found

    return launch(work, ranks=2)


def named(value):
    return getattr(value, "__name__", value)


TRIED = [(u, how) for u in SUMS for how in OPTIONS if how == "whole" or u not in WITHOUT_SEQUENCE]


@pytest.mark.parametrize(("use", "how"), TRIED, ids=named)
def test_layers_that_share_an_input_are_right(use, how):
    parts, (want, _) = zip(*(found[use.__name__] for found in all_tried(how)), strict=True)
    assert not any(isinstance(part, str) for part in parts), parts
    for part, messages in parts:
        assert part.keys() == want[0].keys()
        assert how != "whole" or SUMS[use] in (None, messages)
    for name, whole in want[0].items():
        got = joined([part[name] for part, _ in parts], whole, what=name)
        torch.testing.assert_close(got, whole, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def test_a_weight_changed_between_forward_and_backward_is_refused():
    def work(world):
        model = tensor_parallel(built(), world, {"[ab]": "column"})
        loss = lean(model.a(x_of()))
        with torch.no_grad():
            model.a.weight.mul_(2)
        loss.backward()

    with pytest.raises(RankError, match="modified by an inplace operation"):
        launch(work, ranks=2)
