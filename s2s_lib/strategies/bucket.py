"""A bucket of gradients: parameters whose gradients travel together.

A rank may lack a gradient that another has, and nobody knows before backward is over. A bucket
becomes a sum over ranks, and in floating point a sum of zeros is -0.0 only if all of them are. So
a rank fills the place of a gradient it does not have with -0.0, never brings -0.0 as the first
element of one it has, and reads from the sum itself whether anybody had one: None stays None, as
with one process, and not a byte more is sent.
"""

import torch


class Bucket:
    """Parameters whose gradients are averaged together, in one flat piece of memory.

    `slots[i]` is the view of `flat` that becomes `parameters[i].grad`. `arrived[i]` counts how
    often that gradient was added to in this backward, `expected[i]` how often it will be; before
    the first backward that is unknown, and a bucket is sent when backward is over.
    """

    def __init__(self, names, parameters):
        self.names = names
        self.parameters = parameters
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
        pieces = self.flat.split([p.numel() for p in parameters])
        self.slots = [s.view(p.shape) for s, p in zip(pieces, parameters, strict=True)]
        self.expected = None
        self.begin()

    def begin(self):
        self.arrived = [0] * len(self.parameters)
        self.sent = None

    @property
    def complete(self) -> bool:
        return self.expected is not None and all(
            a >= e for a, e in zip(self.arrived, self.expected, strict=True)
        )

    def take(self, i):
        """Make slot i hold the gradient that parameter i has now."""
        grad, slot = self.parameters[i].grad, self.slots[i]
        if grad.is_sparse:
            raise RuntimeError(f"{self.names[i]} has a sparse gradient; build it with sparse=False")
        if grad.data_ptr() == slot.data_ptr():
            slot.view(-1)[:1].add_(0.0)
        else:
            # 0 + g copies g and turns -0.0 into 0.0 in one pass.
            torch.add(torch.zeros((), dtype=slot.dtype), grad, out=slot)
            self.parameters[i].grad = slot

    def fill(self):
        """Take what arrived without a hook of its own; mark the place of what did not."""
        self.missing = [i for i, p in enumerate(self.parameters) if p.grad is None]
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self.slots[i].fill_(-0.0)
            elif not self.arrived[i]:
                self.take(i)

    def leave_out(self):
        """Bring nothing at all to this average."""
        self.begin()
        self.missing = range(len(self.parameters))
        self.flat.fill_(-0.0)

    def hand_out(self):
        """Give a gradient to the parameters that had none here but have one somewhere."""
        for i in self.missing:
            first = self.slots[i].view(-1)[:1]
            first = first.real if first.is_complex() else first
            if first.numel() and not (first == 0 and torch.signbit(first)):
                self.parameters[i].grad = self.slots[i]
        self.expected = [
            max(1, a, e) for a, e in zip(self.arrived, self.expected or self.arrived, strict=True)
        ]
