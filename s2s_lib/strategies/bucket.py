"""A bucket of gradients: parameters whose gradients travel together.

A rank may lack a gradient that another has, and nobody knows before backward is over. A bucket
becomes a sum over ranks, and in floating point a sum of zeros is -0.0 only if all of them are. So
a rank fills the place of a gradient it does not have with -0.0, never brings -0.0 as the first
element of one it has, and reads from the sum itself whether anybody had one: None stays None, as
with one process, and not a byte more is sent. (A sum too small for 16 bits may be rounded to -0.0,
so every element of the place must be.)
"""

import torch


class Bucket:
    """Parameters whose gradients are averaged together, in one flat piece of memory.

    `slots[i]` is the view of `flat` that becomes `parameters[i].grad`, `pieces[i]` the same
    memory as a row of real numbers (a complex number is two). `arrived[i]` counts how often that
    gradient was added to in this backward, `expected[i]` how often it will be; before the first
    backward that is unknown, and a bucket is sent when backward is over. `sent` is the average
    under way on the second thread, or None.
    """

    def __init__(self, names, parameters):
        self.names = names
        self.parameters = parameters
        kind = parameters[0].dtype
        numbers = [p.numel() * (2 if kind.is_complex else 1) for p in parameters]
        self.flat = torch.zeros(sum(numbers), dtype=kind.to_real(), device=parameters[0].device)
        self.pieces = self.flat.split(numbers)
        self.slots = [slot_like(p, piece) for p, piece in zip(parameters, self.pieces, strict=True)]
        self.expected = self.sent = None
        self.interrupted = False
        self.begin()

    def begin(self):
        """Start a backward. RuntimeError where one that raised left gradients half averaged."""
        self.interrupted = self.interrupted or self.sent is not None
        self.wait()
        self.arrived = [0] * len(self.parameters)
        if self.interrupted and any(map(self.holds, range(len(self.parameters)))):
            raise RuntimeError(
                "the backward before this one raised while its gradients were being averaged, "
                "and they are not whole: call zero_grad(), then forward and backward again"
            )
        self.interrupted = False

    def wait(self):
        """Return when no average is under way; raises what it raised."""
        sent, self.sent = self.sent, None
        if sent is not None:
            sent.wait()

    @property
    def complete(self) -> bool:
        return self.expected is not None and all(
            a >= e for a, e in zip(self.arrived, self.expected, strict=True)
        )

    def holds(self, i) -> bool:
        """Whether the gradient of parameter i is slot i."""
        grad = self.parameters[i].grad
        return grad is not None and grad.data_ptr() == self.slots[i].data_ptr()

    def take(self, i):
        """Make slot i hold the gradient that parameter i has now."""
        grad, slot = self.parameters[i].grad, self.slots[i]
        if grad.dtype != slot.dtype and not slot.is_complex():
            raise RuntimeError(
                f"{self.names[i]} has become {grad.dtype} after DDP was built with {slot.dtype}: "
                "convert the module first, then build DDP"
            )
        if grad.is_sparse:
            raise RuntimeError(f"{self.names[i]} has a sparse gradient; build it with sparse=False")
        if self.holds(i):
            self.pieces[i][:1].add_(0.0)
        else:
            # 0 + g copies g and turns -0.0 into 0.0 in one pass.
            torch.add(torch.zeros((), dtype=slot.dtype), grad, out=slot)
            self.parameters[i].grad = slot

    def fill(self):
        """Take what arrived without a hook of its own; mark the place of what did not."""
        self.missing = [i for i, p in enumerate(self.parameters) if p.grad is None]
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self.pieces[i].fill_(-0.0)
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
            piece = self.pieces[i]
            if piece.any() or not torch.signbit(piece).all():
                self.parameters[i].grad = self.slots[i]
        if not any(self.arrived):
            # This rank stood in for one without a batch, and has learned nothing.
            return
        self.expected = [
            max(1, a, e) for a, e in zip(self.arrived, self.expected or self.arrived, strict=True)
        ]


def slot_like(parameter, piece):
    """The piece seen as a tensor of the parameter's shape and, where it has no gaps, strides.

    Optimizers that walk through the memory of both (torch's fused ones) need the same order.
    """
    strides = torch.empty_like(parameter, device="meta").stride()
    row = torch.view_as_complex(piece.view(-1, 2)) if parameter.is_complex() else piece
    return row.as_strided(parameter.shape, strides)
