"""A model cut into contiguous stages of equal cost, from outside: the model does not know.

    stages = split(model, 4)                       # a list of four modules, and a report
    logits = functools.reduce(lambda value, stage: stage(value), stages, tokens)   # = model(tokens)

How. The model is traced (`trace.py`) into layers (`layers.py`), these are priced and cut where the
dearest stage is cheapest (`costs.py`), and each stage becomes a module (`stage.py`):

    into stage 0          the model's input; a tuple if it has several
    from s to s + 1       each value made in stage s or before and used after it, in the order in
                          which they were made: bare if it is one, a tuple if several
    out of the last       what the model returns, whatever its structure

So a skip connection is carried through the stages between, which costs its bytes at each boundary;
`boundaries` names what crosses. Only tensors do: where a size is needed (`B, T = x.shape`), its
tensor is carried there and the size read again.

A stage's submodules and parameters are the model's own objects under the model's own names
(`blocks.2.attn.q.weight`), so splitting costs no memory, hooks on them keep working, and a state
dict of a stage is a part of the model's. What two stages use, both have: `tied` lists such
parameters, since in two processes they are two tensors, to be kept equal. `print(stages[1])` shows
what a stage does.

Two things differ between one process and several. An operation in place on what a stage received
changes only that stage's copy, so a tensor that is carried along beside a view of it may not be
changed in place. And the buffers of a module that runs in two stages (a shared BatchNorm) are moved
by each stage separately.
"""

import operator

from torch import fx, nn

from s2s_lib.strategies.pipeline.partition.costs import (
    Meter,
    balance,
    check_measure,
    layer_costs,
    run,
    stage_cost,
)
from s2s_lib.strategies.pipeline.partition.layers import Trace, trace_layers
from s2s_lib.strategies.pipeline.partition.stage import Stage
from s2s_lib.strategies.pipeline.partition.stages import Row, Stages
from s2s_lib.strategies.pipeline.partition.trace import (
    BY_HAND,
    input_names,
    left_as_it_was,
    user_line,
)


def split(model: nn.Module, stages: int, by: str = "params", example=None) -> Stages:
    """`model` as `stages` contiguous modules of about equal cost; composed, they are the model.

    `by`: "params", "flops" or "time", of which the last two need `example`, what the model takes: a
    tensor, or a tuple with one value for each input. An example also says which inputs with
    defaults are given, and has values that are not tensors found here instead of at run time.

    Works on the meta device (by="time" does not); the model, its buffers and flags and the state
    of the random numbers are left as they were. Forward and gradients are the model's bit for bit.

    Raises ValueError for a model whose forward torch.fx cannot follow (with the line), more stages
    than layers, a missing or wrong example, and a number that would have to cross a boundary.
    """
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise ValueError(f"stages={stages!r}: give a whole number of at least 1")
    check_measure(by, example)
    with left_as_it_was(model):
        traced = trace_layers(model, input_names(model, example), stages)
        meter = Meter(model, traced.graph)
        if example is not None:
            run(meter, example)
        costs = layer_costs(model, traced, by, example, meter)
        cuts = balance(costs, stages)
        flow = Flow(traced, cuts)
        flow.refuse_plain_values(meter.others)
        modules = [flow.module(s, model) for s in range(stages)]
    prices = [stage_cost(costs, layers) for layers in cuts]
    rows = [
        Row(
            tuple(traced.layers[i].name for i in layers),
            sum(parameter.numel() for parameter in module.parameters()),
            price,
            price / (sum(prices) or 1),
        )
        for layers, module, price in zip(cuts, modules, prices, strict=True)
    ]
    boundaries = [tuple(node.name for node in crossing) for crossing in flow.into[1:]]
    return Stages(modules, model, by, rows, boundaries)


class Flow:
    """Who makes which value and who needs it, once the cuts are known."""

    def __init__(self, traced: Trace, cuts: list[range]):
        graph = traced.graph
        self.nodes = [[n for i in layers for n in traced.layers[i].nodes] for layers in cuts]
        self.result = graph.output_node()
        inputs = list(graph.find_nodes(op="placeholder"))
        self.made = dict.fromkeys(inputs, -1)
        self.made |= {node: s for s, nodes in enumerate(self.nodes) for node in nodes}
        home = self.made | {self.result: len(cuts) - 1}
        sizes, self.needed = size_nodes(graph), {}
        for node in reversed(self.made):
            uses = [self.needed[u] for u in node.users if u in sizes]
            self.needed[node] = max([home[u] for u in node.users] + uses, default=-1)
        # A stage is given every input of the model, used or not, and else only what it or a later
        # one needs.
        self.into = [inputs] + [
            [n for n, made in self.made.items() if made < s <= self.needed[n] and n not in sizes]
            for s in range(1, len(cuts))
        ]

    def refuse_plain_values(self, others: dict[fx.Node, list[str]]):
        for node in dict.fromkeys(node for crossing in self.into[1:] for node in crossing):
            if others.get(node):
                raise ValueError(
                    f"{node.name} holds {' and '.join(dict.fromkeys(others[node]))}, no tensor: "
                    f"{origin(node, self.made[node])}, used in stage {self.needed[node]}, and only "
                    "tensors cross from stage to stage. Compute it from a tensor in the layer that "
                    f"uses it, or choose another number of stages. {BY_HAND}"
                )

    def module(self, s: int, model: nn.Module) -> Stage:
        """Stage s: from its one argument to what the next one takes, or the model returns."""
        graph, new = fx.Graph(), {}

        def copy(node):
            # Attributes and sizes do not cross: each stage reads its own.
            if node not in new:
                new[node] = graph.node_copy(node, copy)
            return new[node]

        new.update(unpack(graph, self.into[s]))
        for node in self.nodes[s]:
            new[node] = graph.node_copy(node, copy)
        if s + 1 < len(self.nodes):
            result = tuple(new[node] for node in self.into[s + 1])
            graph.output(result[0] if len(result) == 1 else result)
        else:
            graph.output(fx.node.map_arg(self.result.args[0], copy))
        return Stage(graph, model)


def size_nodes(graph) -> set[fx.Node]:
    """The nodes that read what a tensor is (`x.shape`, `x.size(0)`) or compute with such alone.

    They hold numbers, which cannot cross; but any stage that has the tensor can read them again.
    """
    found = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_method":
            reads = node.target in ("size", "dim", "ndimension", "numel", "nelement")
        elif node.op == "call_function" and node.target is getattr:
            reads = node.args[1] in ("shape", "ndim", "dtype", "device")
        else:
            reads = is_arithmetic(node) and inputs and found.issuperset(inputs)
        if reads:
            found.add(node)
    return found


def is_arithmetic(node):
    module = getattr(node.target, "__module__", None)
    return node.op == "call_function" and module == operator.add.__module__


def unpack(graph, nodes):
    """Nodes of the model -> their stand-ins at the start of a stage."""
    if len(nodes) == 1:
        return {nodes[0]: graph.placeholder(nodes[0].name)}
    values = graph.placeholder("values")
    return {
        node: graph.create_node("call_function", operator.getitem, (values, i), name=node.name)
        for i, node in enumerate(nodes)
    }


def origin(node, stage):
    line = user_line(node.stack_trace or "")
    return f"made in stage {stage}" + (f" by `{line}`" if line else "")
