"""What each layer costs, and the cut into contiguous stages whose dearest one is the cheapest.

    by="params"   numbers in the parameters the layer uses; needs no example
    by="flops"    floating point operations of a forward on the example, as torch counts them
                  (matrix products, convolutions and attention: nothing else, so an
                  embedding's look-up is free, and so is an LSTM)
    by="time"     the fastest of five forwards on the example, in seconds (other programs only add)

A parameter that several layers use is paid once by each stage that uses it, because that is what
the stage keeps: a tied embedding costs the first stage and the last, but one stage with both only
once. So the cost of a stage is that of the *union* of what its layers use. Only the forward is
measured: most layers' backward costs twice that, attention's two and a half times.

The cut is exact: dynamic programming over (stages, layers), some S L^2 steps for S stages of L
layers.
"""

import math
import time
from collections import defaultdict

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from s2s_lib.strategies.pipeline.flops import counted
from s2s_lib.strategies.pipeline.partition.layers import Trace
from s2s_lib.strategies.pipeline.partition.trace import arguments_of

MEASURES = ("params", "flops", "time")
RUNS = 5


def check_measure(by, example):
    if by not in MEASURES:
        raise ValueError(f"by={by!r}: stages are balanced by {', '.join(map(repr, MEASURES))}")
    if by != "params" and example is None:
        raise ValueError(
            f"by={by!r} runs the model, so give example=: the argument that the model takes, or a "
            'tuple of them; by="params" needs none'
        )
    tensors = [v for v in pytree.tree_leaves(example) if isinstance(v, torch.Tensor)]
    if by == "time" and any(tensor.is_meta for tensor in tensors):
        raise ValueError('by="time" cannot run an example on the meta device; use by="flops"')


class Meter(fx.Interpreter):
    """Runs a traced model node by node.

    `.flops[node]`, and `.others[node]`: types of what it returns that are not tensors.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph):
        super().__init__(model, graph=graph)
        self.flops, self.others = {}, {}

    def run_node(self, node):
        with counted() as counter:
            result = super().run_node(node)
        self.flops[node] = counter.get_total_flops()
        leaves = pytree.tree_leaves(result)
        self.others[node] = [
            type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor | None)
        ]
        return result


class Clock(fx.Interpreter):
    """Runs a traced model node by node; `.seconds[node]` has one entry a run."""

    def __init__(self, model: nn.Module, graph: fx.Graph):
        super().__init__(model, graph=graph)
        self.seconds = defaultdict(list)

    def run_node(self, node):
        start = time.perf_counter()
        result = super().run_node(node)
        leaves = pytree.tree_leaves(result)
        if any(
            isinstance(v, torch.Tensor) and v.device.type not in ("cpu", "meta") for v in leaves
        ):
            torch.accelerator.synchronize()
        self.seconds[node].append(time.perf_counter() - start)
        return result


def run(interpreter: fx.Interpreter, example):
    """One forward on a copy of the example, which may be changed in place."""
    with torch.no_grad():
        interpreter.run(*pytree.tree_map_only(torch.Tensor, torch.clone, arguments_of(example)))


def layer_costs(model: nn.Module, traced: Trace, by: str, example, meter: Meter) -> list[dict]:
    """For each layer: what it uses -> what that costs. Layers that share a key share the cost."""
    if by == "params":
        return [
            {id(parameter): parameter.numel() for parameter in parameters_of(layer.nodes, model)}
            for layer in traced.layers
        ]
    if by == "flops":
        spent = meter.flops
    else:
        clock = Clock(model, traced.graph)
        for _ in range(RUNS):
            run(clock, example)
        spent = {node: min(runs) for node, runs in clock.seconds.items()}
    return [{i: sum(map(spent.get, layer.nodes))} for i, layer in enumerate(traced.layers)]


def parameters_of(nodes, model) -> list[nn.Parameter]:
    """What these nodes use: their modules' parameters and those they read by name, each once."""
    found = {}
    for node in nodes:
        reads = [source for source in node.all_input_nodes if source.op == "get_attr"]
        for source in (node, *reads):
            for parameter in owned(source, model):
                found[id(parameter)] = parameter
    return list(found.values())


def owned(node, model):
    if node.op == "call_module":
        return list(model.get_submodule(node.target).parameters())
    if node.op == "get_attr":
        owner, _, name = node.target.rpartition(".")
        value = getattr(model.get_submodule(owner), name)
        return [value] if isinstance(value, nn.Parameter) else []
    return []


def balance(costs: list[dict], stages: int) -> list[range]:
    """The layers of each stage: the dearest stage as cheap as can be, then the smallest sum of
    squares, then the latest cuts (so an activation stays with the layer before it)."""
    dearest, _ = best_cut(costs, stages, max, math.inf)
    _, cuts = best_cut(costs, stages, lambda total, cost: total + cost * cost, dearest)
    return cuts


def best_cut(costs, stages, join, limit):
    """The least `join` of the stages' costs, none above `limit`, and the cut that has it."""
    layers = len(costs)
    best, starts = [0] + [math.inf] * layers, []
    ending_at = [list(growing(costs, stop)) for stop in range(layers + 1)]
    for stage in range(1, stages + 1):
        before, best, start_of = best, [math.inf] * (layers + 1), [0] * (layers + 1)
        for stop in range(stage, layers - (stages - stage) + 1):
            for start, cost in ending_at[stop]:
                if cost > limit or join(0, cost) >= best[stop]:
                    break
                if join(before[start], cost) < best[stop]:
                    best[stop], start_of[stop] = join(before[start], cost), start
        starts.append(start_of)
    cuts, stop = [], layers
    for start_of in reversed(starts):
        cuts.insert(0, range(start_of[stop], stop))
        stop = start_of[stop]
    return best[layers], cuts


def growing(costs, stop):
    """(start, cost of the layers from start to stop), for start from stop - 1 down to 0."""
    union = {}
    total = 0
    for start in reversed(range(stop)):
        new = costs[start].keys() - union.keys()
        union.update(costs[start])
        total += sum(costs[start][key] for key in new)
        yield start, total


def stage_cost(costs, layers: range):
    union = {}
    for i in layers:
        union.update(costs[i])
    return sum(union.values())
