"""One batch on its way through the stages of one rank."""

import contextlib

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from s2s_lib.strategies.pipeline import values
from s2s_lib.strategies.pipeline.actions import KIND_WORDS, Action
from s2s_lib.strategies.pipeline.order import before, message


class Entry(torch.autograd.Function):
    """The beginning of a stage's graph: what comes out of a message gets a place in it, and its
    gradient is put into `found`. As no leaf of the graph it may be changed in place.

    forward: identity    backward: keep the gradient
    """

    @staticmethod
    def forward(ctx, anchor, tensor, found):
        ctx.found = found
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        ctx.found.append(gradient)
        return None, None, None


def copied(leaf):
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


@contextlib.contextmanager
def told_where(action: Action):
    """An error inside also says which action it came from, where Python can add that (3.11)."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):
            words = f"stage {action.stage}, micro-batch {action.micro}"
            error.add_note(f"in {action}: {KIND_WORDS[action.kind]} of {words}")
        raise


def _trained(leaf):
    return leaf is not None and leaf.requires_grad


class Batch:
    """Runs actions. What they need is in `here`, and what they give is put there: for the name of
    a message (program.py), its leaves and their description.

    `loss` is the sum so far, `outputs` the last stage's by micro-batch, if it has no targets.
    """

    def __init__(self, pipeline, training, inputs, targets, shares):
        self.pipeline, self.training = pipeline, training
        self.inputs, self.targets, self.shares = inputs, targets, shares
        self.last = pipeline.schedule.stages - 1
        self.here = {}
        # In flight, for each stage and micro-batch: what went in (places in the graph, and where
        # Entry puts their gradients), the leaves that came out, and the Half.
        self.flying = {}
        self.loss = None
        self.outputs = {}
        # Micro-batches of which no term counts.
        self.uncounted = set()
        line = [
            a for a in pipeline.schedule.ranks[pipeline.group.rank] if training or a.kind == "F"
        ]
        self.split = {(action.stage, action.micro) for action in line if action.kind == "I"}
        # The last of each stage's forwards and backwards: what replicas share is exchanged then.
        self.final = {(action.stage, action.kind == "F"): action for action in line}

    def act(self, action: Action):
        """Run one action."""
        do = {"F": self.F, "B": self.B, "I": self.I, "W": self.W}[action.kind]
        with self.pipeline.accelerator.pace(action), self.apart(action), told_where(action):
            do(action)

    def apart(self, action):
        """Where a stage is a DDP or a ZeRO, its replicas exchange nothing before the last of its
        backwards (and buffers with the last of its forwards). That one does not wait for what they
        exchange: the stage before waits for its gradient. See `settle`."""
        module = self.pipeline.module_of[action.stage]
        if not hasattr(module, "no_sync"):
            return contextlib.nullcontext()
        if action != self.final[action.stage, action.kind == "F"]:
            return module.no_sync()
        return contextlib.nullcontext() if action.kind == "F" else module.backward.waiting_later()

    def settle(self):
        """At the end: gradients are what the replicas have exchanged."""
        for module in self.pipeline.module_of.values():
            if hasattr(module, "no_sync"):
                module.backward.wait()

    def F(self, action):
        stage, _, micro = action
        went_in, value = self.enter(action)
        halves = self.pipeline.halves[stage] if (stage, micro) in self.split else None
        if halves:
            halves.record()
        output = self.pipeline.module_of[stage](value)
        if stage == self.last:
            came_out = self.finish(output, micro)
        else:
            came_out, description = values.flatten(output, f"stage {stage}")
            # What has no graph may be memory that the stage writes into again, a buffer say.
            given = [copied(leaf) if not _trained(leaf) else leaf for leaf in came_out]
            self.here[action] = given, description
        if self.training:
            came_out = [leaf for leaf in came_out if _trained(leaf)]
            self.flying[stage, micro] = went_in, came_out, halves.done() if halves else None

    def enter(self, action):
        """What goes into a stage: where its gradients will be, and the value, cut off from the
        graph of the stage before."""
        source = before(action, self.pipeline.schedule)
        if source is None:
            value, self.inputs[action.micro] = self.inputs[action.micro], None
            # A copy: micro-batches are parts of one tensor, which a stage may change in place.
            return [], pytree.tree_map(copied, value)
        leaves, description = self.here.pop(source)
        if source.stage in self.pipeline.module_of:
            # From a stage of this rank no message came: a copy, as a message would be.
            leaves = [copied(leaf) for leaf in leaves]
        went_in = []
        for i, shape in enumerate(description.leaves):
            if shape is not None and shape.trained:
                found = []
                leaves[i] = Entry.apply(torch.empty(0, requires_grad=True), leaves[i], found)
                went_in.append((get_gradient_edge(leaves[i]), found))
        return went_in, values.build(leaves, description)

    def finish(self, output, micro):
        """At the end of the last stage: this micro-batch's part of the batch's loss."""
        if self.targets is None:
            self.outputs[micro] = output
            return []
        target, share = self.targets[micro], self.shares[micro]
        self.targets[micro] = None
        if not share:
            # The mean over nothing is no number; in the mean over all it has no part.
            self.uncounted.add(micro)
            return values.tensors(output)
        part = self.pipeline.loss_fn(output, target) * share
        wide = part.detach().to(torch.promote_types(part.dtype, torch.float32))
        self.loss = wide + (0 if self.loss is None else self.loss)
        return [part]

    def B(self, action):
        went_in, outputs, gradients = self.arrive(action)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        self.leave(action, [found.pop() if found else None for _, found in went_in])

    def I(self, action):  # noqa: E743
        went_in, outputs, gradients = self.arrive(action)
        half = self.flying[action.stage, action.micro]
        edges = [edge for edge, _ in went_in]
        self.leave(
            action, half.inputs(outputs, gradients, edges) if outputs else [None] * len(edges)
        )

    def W(self, action):
        self.flying.pop((action.stage, action.micro)).weight_gradients()

    def arrive(self, action):
        """What went into a stage, the leaves that came out and have a gradient, the gradients."""
        stage, kind, micro = action
        went_in, came_out, half = self.flying.pop((stage, micro))
        if kind == "I":
            self.flying[stage, micro] = half
        if stage == self.last and micro not in self.uncounted:
            return went_in, came_out, [None]
        gradients = [None] * len(came_out)
        if stage != self.last:
            gradients, _ = self.here.pop(Action(stage + 1, "B", micro))
        pairs = [p for p in zip(came_out, gradients, strict=True) if p[1] is not None]
        if not pairs and self.closes(stage, micro):
            # Nothing to add, but replicas exchange in this backward what the others have added.
            pairs = [(leaf, torch.zeros_like(leaf)) for leaf in came_out]
        came_out, gradients = zip(*pairs, strict=True) if pairs else ((), ())
        return went_in, came_out, gradients

    def closes(self, stage, micro):
        """Whether a stage with replicas has its last backward of the batch for this micro-batch."""
        replicated = hasattr(self.pipeline.module_of[stage], "no_sync")
        return replicated and self.final[stage, False].micro == micro

    def leave(self, action, gradients):
        if action.stage:
            self.here[message(action)] = gradients, None
