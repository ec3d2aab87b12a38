"""What a model does, in order: torch.fx runs its `forward` on stand-ins and writes the calls down.

The stand-ins are *proxies*, and each call is a *node* of the graph: an operation, a method, or a
module. A module that is *entered* has its forward followed; any other is one node, whatever
happens inside. `layers.py` says which are entered to begin with; a class that turns out not to be
traceable is then not entered, and only if that is the model itself is there nothing to be done.

Four traps of tracing, and what is done about them:

* `self.training` read by an entered module would be fixed to what it is now. It is traced as a
  value, so `F.dropout(x, training=self.training)` follows `train()` and `eval()` of the stage.
* `torch.arange(8)` or `torch.rand(3)` would become a constant, since no proxy goes in. Such calls
  are written down too.
* `no_grad` and autocast would be lost. A module that switches either inside is not entered.
* Inputs that have a default (`targets=None`) are inputs only if the example has them.

What remains: choices by plain Python values (`if random() < 0.5`) are made once, at the trace, and
`torch.utils.checkpoint` around a module is followed into it, so its memory is not saved.
"""

import contextlib
import inspect
import os
import re
import traceback

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

OURS = (os.path.dirname(torch.__file__) + os.sep, __file__)
BY_HAND = "Or give the stages by hand: a pipeline takes any nn.Modules"


def trace(model, inputs, entered):
    """The graph, and a reason for each class that was first entered but could not be followed."""
    not_followed = {}
    while True:
        tracer = LayerTracer(entered, inputs)
        try:
            return without_idle_reads(tracer.trace(model)), not_followed
        except Exception as error:
            name, failed = tracer.innermost()
            why = explain(error, name, failed)
            if failed is model:
                raise ValueError(
                    f"the {type(model).__name__} cannot be traced: {why}. Move what the line does "
                    f"into a module inside it, which is not followed. {BY_HAND}"
                ) from error
            not_followed[type(failed).__name__] = why
            entered = {
                module: name
                for module, name in entered.items()
                if type(module) is not type(failed) or module is model
            }


def explain(error, name, module):
    """Which line of whose code could not be traced, and what fx says of it."""
    where = f"{name} ({type(module).__name__})" if name else f"{type(module).__name__}.forward"
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(OURS)]
    if users:
        file = os.path.basename(users[-1].filename)
        where += f", line {users[-1].lineno} of {file}: `{users[-1].line}`"
    why = str(error).partition("\n")[0]
    return f"{where}: {type(error).__name__}: {why}"


def user_line(stack_trace: str) -> str:
    """The last line of a node's stack trace that is neither torch's nor ours."""
    frames = re.findall(r'File "(.*?)", line .*\n\s+(.*)', stack_trace)
    return next((line for file, line in reversed(frames) if not file.startswith(OURS)), "")


class LayerTracer(fx.Tracer):
    """fx's tracer, with the four traps of the module docstring closed."""

    proxy_buffer_attributes = True
    record_stack_traces = True

    def __init__(self, entered: dict[nn.Module, str], inputs: list[str]):
        super().__init__()
        self.entered, self.inputs = entered, inputs
        self.modes = switches()

    def trace(self, root, concrete_args=None):
        flags = {module: module.training for module in self.entered}
        try:
            with RecordCalls(self):
                return super().trace(root, concrete_args)
        finally:
            for module, flag in flags.items():
                module.training = flag

    def create_args_for_root(self, forward, is_module, concrete_args=None):
        values = [self.create_proxy("placeholder", name, (), {}) for name in self.inputs]
        for module, name in self.entered.items():
            target = f"{name}.training" if name else "training"
            vars(module)["training"] = self.create_proxy("get_attr", target, (), {})
        return lambda *values: self.root.forward(*values), values

    def is_leaf_module(self, module, name):
        return module not in self.entered

    def create_node(self, kind, *args, **kwargs):
        if switches() != self.modes:
            raise fx.proxy.TraceError("gradients or autocast are switched inside")
        return super().create_node(kind, *args, **kwargs)

    def innermost(self):
        """Name and module of what was being followed when the trace failed."""
        names = {name: module for module, name in self.entered.items()}
        for name, _ in reversed(self.module_stack.values()):
            if name in names:
                return name, names[name]
        return "", self.root


class RecordCalls(TorchFunctionMode):
    """Calls into torch that no proxy goes into are nodes of the graph all the same."""

    def __init__(self, tracer):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        getter = getattr(function, "__name__", "") == "__get__"
        if isinstance(result, torch.Tensor) and not getter:
            return self.tracer.create_proxy("call_function", function, args, kwargs or {})
        return result


def switches():
    autocast = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def without_idle_reads(graph):
    """Drop the reads of attributes that nobody uses; a call may have an effect, so each stays."""
    for node in reversed(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return graph


def input_names(model: nn.Module, example=None) -> list[str]:
    """The arguments of forward that are given: those of the example, or all without a default."""
    arguments = inspect.signature(model.forward).parameters.values()
    places = [a for a in arguments if a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD)]
    needed = [a.name for a in places if a.default is a.empty]
    if example is None:
        if not needed:
            raise ValueError(
                f"{type(model).__name__}.forward has no argument without a default, so give an "
                "example: a tensor, or a tuple with one value for each input"
            )
        return needed
    names = [a.name for a in places]
    rest = next((a.name for a in arguments if a.kind is a.VAR_POSITIONAL), None)
    given = len(arguments_of(example))
    if rest:
        names += [f"{rest}_{i}" for i in range(given - len(names))]
    if not len(needed) <= given <= len(names):
        raise ValueError(
            f"the example has {given} values, but {type(model).__name__}.forward takes "
            f"{', '.join(names)}: give a tuple with one value for each input"
        )
    return names[:given]


def arguments_of(example) -> tuple:
    """A tuple is one value for each input; anything else is the one input."""
    return example if isinstance(example, tuple) else (example,)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module):
    """Put back the attributes, buffers and training flags of a model, and the random numbers."""
    attributes = {module: dict(vars(module)) for module in model.modules()}
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        for module, before in attributes.items():
            vars(module).clear()
            vars(module).update(before)
        with torch.no_grad():
            for holder, name, buffer, values in buffers:
                holder[name] = buffer
                buffer.copy_(values)
