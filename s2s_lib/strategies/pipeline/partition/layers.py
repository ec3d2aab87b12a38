"""The layers of a model: the places between which it may be cut.

A **layer** is one call of a module that the trace does not enter, and the operations after it up
to the next such call; what comes before the first call belongs to the first layer. Stages begin
at layers, so what is entered decides how fine a cut can be:

    coarsely   the model itself; each nn.Sequential; each class of the user's own that has a
               Sequential, ModuleList or ModuleDict somewhere inside. But a member of such a
               container (a transformer block) only if it has a container of the user's own
               classes inside: a block stays whole
    finely     each class of the user's own that has modules inside; taken where the coarse
               layers are fewer than the stages

What torch.nn defines is never entered, nor is a module with hooks: they would run once, now.
"""

from typing import NamedTuple

from torch import fx, nn

from s2s_lib.strategies.pipeline.partition.trace import trace

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Layer(NamedTuple):
    """A module's call and the operations after it, up to the next module's call."""

    name: str
    nodes: tuple[fx.Node, ...]


class Trace(NamedTuple):
    """What a model does, and where it may be cut."""

    graph: fx.Graph
    layers: list[Layer]


def trace_layers(model: nn.Module, inputs: list[str], at_least: int) -> Trace:
    """The coarse layers of `model`, or the fine ones where those are fewer than `at_least`.

    `inputs` names the arguments of forward that are given; the others keep their defaults. Raises
    ValueError if the model's own forward cannot be traced, and if there are too few layers.
    """
    if has_hooks(model):
        raise ValueError(
            f"the {type(model).__name__} has hooks of its own, which no stage would run: remove "
            "them, or register them on a module inside it"
        )
    for entered in (coarsely_entered(model), finely_entered(model)):
        graph, not_followed = trace(model, inputs, entered)
        layers = layers_of(graph, model)
        if len(layers) >= at_least:
            return Trace(graph, layers)
    raise ValueError(too_few(model, layers, at_least, not_followed))


def too_few(model, layers, stages, not_followed):
    names = [layer.name for layer in layers]
    if len(names) > 12:
        names = [*names[:5], "...", *names[-5:]]
    hooked = [
        f"{name} ({type(module).__name__}) has hooks"
        for name, module in model.named_modules()
        if has_hooks(module)
    ]
    inside = "".join(f"\nnot followed inside: {why}" for why in [*not_followed.values(), *hooked])
    count = f"{len(layers)} layer{'s' * (len(layers) != 1)}"
    return (
        f"cannot cut the {count} of the {type(model).__name__} ({', '.join(names)}) into {stages} "
        f"stages: use at most {len(layers)}{inside}"
    )


def layers_of(graph, model) -> list[Layer]:
    """Each layer has one module's call; what comes before the first goes with the first."""
    groups = [[]]
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if node.op == "call_module" and any(n.op == "call_module" for n in groups[-1]):
            groups.append([])
        groups[-1].append(node)
    return [Layer(layer_name(nodes, model), tuple(nodes)) for nodes in groups]


def layer_name(nodes, model):
    return next((n.target for n in nodes if n.op == "call_module"), type(model).__name__)


def coarsely_entered(model) -> dict[nn.Module, str]:
    members = {
        child for module in model.modules() if is_container(module) for child in module.children()
    }

    def enter(module):
        if module is model:
            return True
        if type(module) is nn.Sequential:
            return followable(module)
        inside = (
            holds_stack(module) if module in members else any(map(is_container, module.modules()))
        )
        return followable(module) and inside

    return {module: name for name, module in model.named_modules() if enter(module)}


def finely_entered(model) -> dict[nn.Module, str]:
    return {
        module: name
        for name, module in model.named_modules()
        if module is model or (followable(module) and any(True for _ in module.children()))
    }


def holds_stack(module):
    """Whether a container of the user's own classes is somewhere inside."""
    return any(
        is_container(inner) and not all(map(is_torch_nn, inner.children()))
        for inner in module.modules()
    )


def followable(module):
    return not has_hooks(module) and (not is_torch_nn(module) or type(module) is nn.Sequential)


def is_container(module):
    return isinstance(module, CONTAINERS)


def is_torch_nn(module):
    return type(module).__module__.startswith(("torch.nn.", "torch.ao.nn."))


def has_hooks(module):
    return any(getattr(module, kind) for kind in HOOKS)
