"""The messages of one batch between stages on different ranks.

A receiver needs memory of the right shapes before a message comes. In the first batch of its shapes
each activation is told: its description goes before it, and the receiver asks for it when it needs
it. A batch like one before (`known`) needs none of that: receives are asked for early, as the
program says. A gradient has the shapes of the activation it belongs to, so it is never told.

A gradient that does not exist (the stage after did not use that output) is not the same as zeros:
an optimizer skips a weight without gradient, and decays one with zeros. It travels as -0.0 in every
element (and a gradient that is -0.0 everywhere as 0.0): not a byte more is sent, and each gradient
is read once more at either end.
"""

from collections.abc import Iterator

import torch

from s2s_lib.ranks.connection import current
from s2s_lib.ranks.group import Group
from s2s_lib.ranks.messages import irecv, isend
from s2s_lib.strategies.pipeline.actions import Action
from s2s_lib.strategies.pipeline.values import Description

SHOWN = {"F": "activations", "B": "activation gradients"}


class Mail:
    """Sends and receives for one rank; messages are named as in order.py.

    `known` has the Description of every activation, by message, or is None; `told` collects them.
    `failures` counts what some rank has given up before: what that left on its way, nobody takes.
    """

    def __init__(self, group: Group, known: dict[Action, Description] | None, failures: int = 0):
        self.group = group
        self.failures = failures
        self.known = known
        self.told: dict[Action, Description] = {}
        self.asked, self.sent = {}, {}

    def description(self, message) -> Description:
        """What a message looks like, if that is known by now."""
        known = self.told if self.known is None else self.known
        if message.kind == "F":
            return known[message]
        return known[Action(message.stage - 1, "F", message.micro)].of_gradients()

    def ask(self, message, source):
        """Get ready for a message that comes soon."""
        if self.known is not None:
            self.asked[message] = self.receive(message, source)

    def receive(self, message, source):
        shown = SHOWN[message.kind]
        buffers = (
            None if leaf is None else torch.empty(leaf.dims, dtype=leaf.dtype)
            for leaf in self.description(message).leaves
        )
        return [
            None
            if out is None
            else irecv(out, source, self.group, shown, self.label(message), message.micro)
            for out in buffers
        ]

    def take(self, message, source) -> tuple[list[torch.Tensor | None], Description]:
        """Wait for a message: its leaves and their description."""
        if self.known is None and message.kind == "F":
            self.told[message] = self.hear(message, source)
        coming = self.asked.pop(message, None) or self.receive(message, source)
        leaves = [None if transfer is None else transfer.wait() for transfer in coming]
        if message.kind == "B":
            leaves = [None if _is_nothing(leaf) else leaf for leaf in leaves]
        return leaves, self.description(message)

    def give(self, message, to, leaves, description):
        """Start sending a message. RuntimeError if an activation is not as it is known to be."""
        before = []
        if message.kind == "B":
            shapes = self.description(message).leaves
            leaves = [_or_nothing(leaf, s) for leaf, s in zip(leaves, shapes, strict=True)]
        elif self.known is None:
            self.told[message] = description
            before = self.tell(message, to, description)
        elif description != self.known[message]:
            raise RuntimeError(
                f"stage {message.stage} gave {description} for micro-batch {message.micro}, and "
                f"{self.known[message]} in a batch of the same shapes before: what passes between "
                "stages may change only with the shapes of the batch, train or eval, what requires "
                "gradients, and dtypes"
            )
        shown = SHOWN[message.kind]
        self.sent[message] = before + [
            isend(leaf, to, self.group, shown, self.label(message), message.micro)
            for leaf in leaves
            if leaf is not None
        ]

    def settle(self, message):
        """Let go of a message that must have been taken by now."""
        for transfer in self.sent.pop(message, ()):
            transfer.wait()

    def give_up(self):
        """After an error: nobody waits for what is on its way."""
        both = [*self.asked.values(), *self.sent.values()]
        current().give_up([transfer for row in both for transfer in row if transfer is not None])

    def finish(self):
        for message in list(self.sent):
            self.settle(message)

    def label(self, message) -> str:
        return f"stage {message.stage} {message.kind}, {self.failures} failures"

    def tell(self, message, to, description):
        said = torch.frombuffer(bytearray(description.to_bytes()), dtype=torch.uint8)
        size = torch.tensor([len(said)])
        return [
            isend(part, to, self.group, "description", self.label(message), message.micro)
            for part in (size, said)
        ]

    def hear(self, message, source) -> Description:
        how = self.group, "description", self.label(message), message.micro
        size = irecv(torch.empty(1, dtype=torch.int64), source, *how).wait()
        said = irecv(torch.empty(int(size), dtype=torch.uint8), source, *how).wait()
        return Description.from_bytes(said.numpy().tobytes())


def walk(steps, mail: Mail, here: dict, waiting) -> Iterator[Action]:
    """A rank's program (program.py), action by action, with the messages around each.

    Before an action is yielded, what it needs from other ranks is put into `here` (message ->
    leaves and description), inside `waiting()`; what it leaves there for another rank is sent.
    """
    for step in steps:
        for coming in step.ask:
            mail.ask(*coming)
        if step.take:
            with waiting():
                here[step.take[0]] = mail.take(*step.take)
        for sent in step.settle:
            mail.settle(sent)
        yield step.action
        if step.give:
            mail.give(*step.give, *here.pop(step.give[0]))
    mail.finish()


def _or_nothing(gradient, shape):
    if gradient is None and shape.dtype.is_complex:
        return torch.view_as_complex(
            torch.full((*shape.dims, 2), -0.0, dtype=shape.dtype.to_real())
        )
    if gradient is None:
        return torch.full(shape.dims, -0.0, dtype=shape.dtype)
    # Adding 0 turns -0.0 into 0.0.
    return gradient + torch.zeros_like(gradient) if _is_nothing(gradient) else gradient


def _is_nothing(gradient):
    numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return bool(numbers.numel()) and not numbers.any() and bool(torch.signbit(numbers).all())
