"""A flat buffer: parameters in one row of memory, cut into one piece for each rank.

    parameters     | weight (3, 4)          | bias (4) | gain (2) |padding|
    flat           x x x x x x x x x x x x x x x x x x x x x x x x x x x x
    pieces         | rank 0        | rank 1        | rank 2        | rank 3 ...

The cuts ignore where parameters begin, so all pieces are of one size and what a rank holds of a
parameter, its *shard*, is where the two meet: possibly nothing. Each parameter object stays the
same and changes its memory: at rest it is its shard of this rank's piece, which is what an
optimizer sees; in use it is its whole self, a view into the full flat.

    full       all W pieces in the working dtype; freed between uses where `keep_full` is False
    working    this rank's piece of it
    master     this rank's piece as the optimizer sees it: `working` itself, or in mixed precision
               a piece of its own in the parameters' first dtype
    local      gradients of this rank's batch, whole, until they are reduced
    reduced    this rank's piece of the gradients averaged over all ranks

A gradient that this rank does not have is -0.0 in `local`, and never one that it has, so a sum is
-0.0 only where no rank had one: None stays None, as with one process (see bucket.py).
"""

import torch

from s2s_lib.collectives.functions import all_gather, all_reduce, reduce_scatter

# Each rank sends (W-1)/W of the bytes, whatever their number.
ALGORITHM = "direct"


class Flat:
    """Parameters of one dtype, all trainable or all frozen, and the memory under them (see above).

    `keep_full` and `keep_local` say what is not dropped after use: the weights, the gradients.
    """

    def __init__(
        self, names, parameters, group, working_dtype=None, keep_full=True, keep_local=True
    ):
        self.names, self.parameters, self.group = names, parameters, group
        self.keep_full, self.keep_local = keep_full, keep_local
        first = parameters[0]
        self.label = names[0]
        self.trainable = first.requires_grad
        self.dtype = first.dtype
        mixed = working_dtype is not None and first.is_floating_point()
        self.working_dtype = working_dtype if mixed else self.dtype
        self.mixed = self.working_dtype != self.dtype
        self.shapes = [p.shape for p in parameters]
        self.starts, numel = [], 0
        for parameter in parameters:
            self.starts.append(numel)
            numel += parameter.numel()
        self.piece = -(-numel // group.size)
        self.begin = group.rank * self.piece
        self.in_use = False
        self.make_weights()
        # What happened since the last reduction and in this backward, for each parameter.
        self.has = [False] * len(parameters)
        self.arrived = [False] * len(parameters)
        self.old = None
        self.local = self.reduced = None
        if self.trainable and keep_local:
            self.local = self.full_like(-0.0)

    def full_like(self, value):
        numel = self.piece * self.group.size
        return torch.full((numel,), value, dtype=self.working_dtype, device="cpu")

    def own(self, flat):
        """This rank's piece of a full flat, as a view."""
        return flat[self.begin : self.begin + self.piece]

    def whole(self, flat, i):
        """Parameter i in a full flat, as a view."""
        shape, start = self.shapes[i], self.starts[i]
        return flat[start : start + shape.numel()].view(shape)

    def span(self, i):
        """Where the shard of parameter i begins and ends, counted from the parameter's start."""
        start, numel = self.starts[i], self.shapes[i].numel()
        first = min(max(self.begin - start, 0), numel)
        return first, max(first, min(self.begin + self.piece - start, numel))

    def shard(self, piece, i):
        """The shard of parameter i in a piece, as a view with as many dims as the parameter."""
        first, last = self.span(i)
        offset = self.starts[i] + first - self.begin if last > first else 0
        rows = piece[offset : offset + last - first]
        return rows.view(-1, *[1] * (len(self.shapes[i]) - 1))

    # Weights

    def make_weights(self):
        values = torch.zeros(self.piece * self.group.size, dtype=self.dtype, device="cpu")
        for i, parameter in enumerate(self.parameters):
            self.whole(values, i).copy_(parameter.detach())
        self.full = values.to(self.working_dtype)
        self.working = self.own(self.full) if self.keep_full else self.own(self.full).clone()
        self.master = self.own(values).clone() if self.mixed else self.working
        self.views = [self.whole(self.full, i) for i in range(len(self.parameters))]
        self.shards = [self.shard(self.master, i) for i in range(len(self.parameters))]
        self.accumulators = []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view
            if self.trainable:
                # Autograd's node for the parameter, kept alive: it checks gradients against the
                # shape and dtype of now, the whole, also while the parameter is its shard.
                self.accumulators.append(
                    parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                )
        self.set_gradient_dtype(self.working_dtype)
        self.refresh()
        self.rest()

    def set_gradient_dtype(self, dtype):
        for parameter in self.parameters if self.mixed and self.trainable else ():
            parameter.grad_dtype = dtype

    def rest(self):
        """Each parameter is its shard; the full weights are freed unless they are kept."""
        now = [parameter._version for parameter in self.parameters]
        if self.in_use and now != self.versions:
            # The module changed its weights while it ran.
            self.keep()
            self.versions = now
        self.in_use = False
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            parameter.data = shard
        if not self.keep_full:
            self.full.untyped_storage().resize_(0)

    def use(self):
        """Each parameter is its whole self; the full weights must be there."""
        for i, parameter in enumerate(self.parameters):
            if not self.in_use and parameter.data_ptr() != self.shards[i].data_ptr():
                raise RuntimeError(
                    f"{self.names[i]} was given other memory (`p.data = ...`), and the sharded row "
                    "did not see it: write into it in place, under torch.no_grad()"
                )
            parameter.data = self.views[i]
        self.in_use = True

    @property
    def stale(self) -> bool:
        """Whether the full weights are not those of the optimizer."""
        return (
            not self.keep_full
            or self.changed
            or any(p._version != v for p, v in zip(self.parameters, self.versions, strict=True))
        )

    def prepare(self):
        """Memory for the full weights, and this rank's piece up to date."""
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.full.numel() * self.full.itemsize)
        self.refresh()

    def refresh(self):
        if self.mixed:
            self.working.copy_(self.master)
        self.changed = False
        self.versions = [p._version for p in self.parameters]

    def gather(self):
        """Collective: all pieces of the full weights; sends (W-1)/W of their bytes."""
        all_gather(self.working, self.group, ALGORITHM, out=self.full, label=self.label)

    def keep(self):
        """What is in the full weights becomes what the optimizer sees."""
        for i, shard in enumerate(self.shards):
            new = self.shard(self.own(self.full), i)
            if self.mixed:
                # What is only the rounding of what it was has not changed.
                same = new == shard.to(new.dtype)
                new = torch.where(same, shard, new.to(shard.dtype))
            shard.copy_(new)
        self.changed = True

    # Gradients

    def stash(self):
        """Before a backward: put away what the shards' `.grad` hold, to be added to later."""
        self.old = [p.grad for p in self.parameters]
        for i, parameter in enumerate(self.parameters):
            if self.old[i] is not None and self.keep_local:
                self.old[i] = self.old[i].clone()
            parameter.grad = None

    def take(self, i):
        """Move the gradient that autograd has put into parameter i to its place."""
        gradient = self.parameters[i].grad
        if self.local is None:
            self.local = self.full_like(-0.0)
        slot = self.whole(self.local, i)
        if self.has[i]:
            slot.add_(gradient)
        else:
            # Copies, and makes +0.0 of -0.0.
            torch.add(gradient, 0.0, out=slot)
        self.parameters[i].grad = None
        self.has[i] = self.arrived[i] = True

    def reduce(self, averaged_over):
        """Collective: this rank's piece of the average over the group and over those groups.

        Sends (W-1)/W of the gradients' bytes, and 2(R-1)/R of a piece for each group of R.
        """
        if self.local is None:
            self.local = self.full_like(-0.0)
        for i, has in enumerate(self.has):
            if not has:
                self.whole(self.local, i).fill_(-0.0)
        mine = self.own(self.local)
        self.reduced = mine if self.keep_local else torch.empty_like(mine)
        # The average of complex numbers would lose the sign of zero.
        local, out = as_real(self.local), as_real(self.reduced)
        reduce_scatter(local, self.group, "avg", ALGORITHM, out=out, label=self.label)
        for group in averaged_over:
            all_reduce(out, group, "avg", ALGORITHM, out=out, label=self.label)

    def drop_local(self):
        if not self.keep_local:
            self.local = None

    def hand_out(self):
        """The reduced gradients become the shards' `.grad`, added to what was there before."""
        for i, parameter in enumerate(self.parameters):
            gradient = self.shard(self.reduced, i)
            if not self.has[i] and nobody_had(gradient):
                parameter.grad = self.old[i]
                continue
            if self.old[i] is not None:
                gradient += self.old[i]
            parameter.grad = gradient
        self.has = [False] * len(self.parameters)
        self.old = self.reduced = None

    def put_back(self):
        """After a backward that is not reduced: the shards' `.grad` are as they were."""
        if self.old is not None:
            for parameter, gradient in zip(self.parameters, self.old, strict=True):
                parameter.grad = gradient
            self.old = None

    def forget(self):
        """Drop the gradients that were not reduced."""
        self.has = [False] * len(self.parameters)
        self.drop_local()

    # For the optimizer: it needs gradients in the dtype of what it changes.

    def widen_gradients(self):
        narrow = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self.set_gradient_dtype(self.dtype)
        for parameter, gradient in zip(self.parameters, narrow, strict=True):
            if gradient is not None:
                parameter.grad = gradient.to(self.dtype)
        return narrow

    def narrow_gradients(self, narrow):
        for parameter in self.parameters:
            parameter.grad = None
        self.set_gradient_dtype(self.working_dtype)
        for parameter, gradient in zip(self.parameters, narrow, strict=True):
            parameter.grad = gradient

    # Whole tensors, for saving and loading.

    def gather_vectors(self, piece) -> list[torch.Tensor]:
        """Collective: whole tensors from each rank's piece, one for each parameter."""
        flat = all_gather(piece, self.group, ALGORITHM)
        return [self.whole(flat, i).clone() for i in range(len(self.parameters))]

    def index(self, parameter) -> int:
        """Which of the flat's parameters this is."""
        return next(i for i, p in enumerate(self.parameters) if p is parameter)

    def part_of(self, tensor, i):
        """Of a whole tensor of parameter i, what belongs to this rank's shard of it."""
        first, last = self.span(i)
        return tensor.reshape(-1)[first:last].view(self.shards[i].shape)


def as_real(flat):
    """A complex row as one of twice as many real numbers, in the same memory."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def nobody_had(gradient) -> bool:
    """Whether this is the sum of nothing but the -0.0 of ranks without a gradient."""
    real = gradient.real if gradient.is_complex() else gradient
    return bool(((real == 0) & torch.signbit(real)).all())
