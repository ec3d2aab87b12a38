"""One stage as a module: a part of a traced model's graph, with the model's own parts in it.

What runs is Python that fx writes from the graph, kept as text: print the stage to read it. The
text is also what is pickled or copied, since fx's own GraphModule would be traced again on arrival
and so lose what `trace.py` takes care of.
"""

import linecache
import zlib

from torch import fx, nn

# What fx puts into the namespace of any code: torch itself and a few names.
ALWAYS = fx.Graph().python_code("self").globals


class Stage(nn.Module):
    """A run of layers of a model: one argument in, one value (or tuple) out.

    `tied` lists the weights that this or other stages have in common, by number of the stage.

    Submodules, parameters and buffers are the model's own objects under the model's own names, and
    none that the stage does not use. Printed, it shows its forward.
    """

    def __init__(self, graph: fx.Graph, model: nn.Module):
        super().__init__()
        self.training = model.training
        self.tied = []
        for node in graph.nodes:
            if node.op in ("get_attr", "call_module"):
                adopt(self, model, node.target)
        written = graph.python_code("self")
        self._code = written.src.strip()
        self._names = {name: v for name, v in written.globals.items() if name not in ALWAYS}
        self._compile()

    def _compile(self):
        file, names = f"<stage {zlib.crc32(self._code.encode())}>", ALWAYS | self._names
        # So that a traceback shows the lines.
        linecache.cache[file] = (len(self._code), None, self._code.splitlines(True), file)
        exec(compile(self._code, file, "exec"), names)
        self._run = names["forward"]

    def forward(self, value):
        return self._run(self, value)

    def extra_repr(self):
        return self._code

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "_run"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._compile()


def adopt(stage: nn.Module, model: nn.Module, target: str):
    """Have the model's submodule, parameter, buffer or attribute in the stage under its name."""
    *path, name = target.split(".")
    for part in path:
        model = getattr(model, part)
        if part not in stage._modules:
            stage.add_module(part, nn.Module())
        stage = stage._modules[part]
        if stage is model:
            return
    for kind in ("_modules", "_parameters", "_buffers"):
        if name in getattr(model, kind):
            getattr(stage, kind)[name] = getattr(model, kind)[name]
            break
    else:
        vars(stage)[name] = getattr(model, name)
    if name in model._non_persistent_buffers_set:
        stage._non_persistent_buffers_set.add(name)
