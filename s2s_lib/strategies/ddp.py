"""Data parallelism: the whole model on every rank, each with its own part of the batch.

    who holds what    weights, gradients and optimizer state: all of them, on every rank
    who sends what    2(W-1)/W of the gradients' bytes a rank and step: an all_reduce a bucket

The gradients are averaged while backward still computes. Parameters are put into *buckets* in
reverse order, which is about the order in which their gradients appear; as soon as all of a
bucket's gradients are there, a second thread averages them, and `backward()` returns when the
last bucket is done. So `optimizer.step()` finds final gradients, as with one process.

torch's own class adds much that is not here: bucket sizes that follow the first backward, delayed
all_reduce, communication hooks, static graphs. (Li et al., VLDB 2020.)
"""

import contextlib
import functools
from numbers import Real

import torch
from torch import nn

from s2s_lib.collectives.background import background
from s2s_lib.collectives.functions import all_gather, all_reduce
from s2s_lib.ranks.connection import mark
from s2s_lib.ranks.group import Group
from s2s_lib.strategies.backward import Backward, tensors_in, weakly
from s2s_lib.strategies.bucket import Bucket
from s2s_lib.strategies.grads import refuse_cut_over
from s2s_lib.strategies.replicas import check_same, claim, copy_from, copy_state, refuse_claimed

# The DDPs that the backward under way has reached, in that order. They share one thread for their
# averages, so all ranks must send in the same order: the buckets of the first, then the next's.
_running: list["DDP"] = []


class DDP(nn.Module):
    """`module` on every rank of `group`, with gradients averaged when `backward()` returns.

    Construction: all ranks check that they built the same module (ValueError on all, naming the
    first difference), then take the weights and buffers of the group's first rank: an all_gather
    of 8 bytes a rank and W-1 times the bytes of the module.
    Forward: as the module's; in training mode, and not under `no_sync`, the first rank's buffers
    are then copied to all.
    Backward: each bucket (`bucket_mb` MiB of parameters of one dtype) is averaged as soon
    as it is complete, on a second thread; with `overlap=False` after backward, one by one.
    Step: nothing; every rank takes the same one.

    A parameter's gradient is the sum over ranks divided by W, where a rank that did not use it
    counts as zero; nobody used it: it stays None. So equal batches with a mean loss give the
    gradient of the whole batch. Where ranks hold n_r samples or tokens of N, let the local loss be
    sum_r * W / N. 16-bit gradients are added in float32 and rounded once. Each rank's backward
    must reach at least one parameter. Gradients are views into the buckets: clone one to keep it
    beyond the next backward. A module with nothing to train passes through, and nothing is sent.

    Sent in each backward, by all ranks together: 2(W-1) times the bytes of the trainable
    parameters, as they travel. A bucket above 1 MiB travels in its own dtype and each rank sends an
    equal share, 2(W-1)/W of it; where W does not divide it, some pieces are an element longer. A
    smaller one goes up and down a tree, where a rank sends it once to each neighbour, and 16-bit
    floats travel as float32. On emulated links `choose` decides. A training
    forward adds W-1 times the buffers' bytes.

    A parameter belongs to one DDP for life: ValueError for a second, whose hooks would average
    again. A process runs one backward at a time, which may pass through several DDPs.
    """

    def __init__(self, module: nn.Module, group: Group, bucket_mb: float = 25, overlap=True):
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"DDP wraps a torch.nn.Module, got {module!r}")
        if not isinstance(bucket_mb, Real) or not bucket_mb > 0:
            raise ValueError(f"bucket_mb={bucket_mb!r}: give MiB above 0")
        # A DDP inside averages its own; averaging twice would send the bytes twice.
        inside = {id(p) for m in module.modules() if isinstance(m, DDP) for p in m.parameters()}
        mine = [
            (name, p)
            for name, p in module.named_parameters()
            if p.requires_grad and id(p) not in inside
        ]
        refuse_claimed(mine)
        refuse_cut_over(mine, group)
        self.module = module
        self.group = group
        self.overlap = overlap
        self.syncing = True
        self.backward = Backward(self.end_backward, self.finish_backward)
        check_same(module, group)
        copy_from([*module.parameters(), *module.buffers()], group)
        self.buffers_from = 0
        self.known = {id(p) for p in module.parameters()}
        self.frozen = [p for p in module.parameters() if not p.requires_grad]
        self.buckets = make_buckets(mine, bucket_mb * 2**20)
        claim(mine, group)
        for number, bucket in enumerate(self.buckets):
            for i, parameter in enumerate(bucket.parameters):
                hook = weakly(self.gradient_arrived, number, i)
                parameter.register_post_accumulate_grad_hook(hook)

    def forward(self, *args, **kwargs):
        if any(p.requires_grad for p in self.frozen):
            raise RuntimeError(
                "a parameter that was frozen when DDP was built is trainable now, and would not "
                "be averaged: set requires_grad first, then build DDP"
            )
        new = [name for name, p in self.module.named_parameters() if id(p) not in self.known]
        if new:
            raise RuntimeError(
                f"{new[0]} is new since DDP was built, and would not be averaged: finish the "
                "module first, then build DDP"
            )
        outputs = self.module(*args, **kwargs)
        if self.training and self.syncing:
            self.copy_buffers()
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(self.begin_backward)
        return outputs

    def copy_buffers(self):
        copy_from(list(self.module.buffers()), self.group, self.buffers_from)

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes inside leave the gradients as they are on this rank; they add up, and
        the next backward outside averages the sum. What counts is where backward runs."""
        inner = [m for m in self.modules() if isinstance(m, DDP)]
        before = [m.syncing for m in inner]
        for m in inner:
            m.syncing = False
        try:
            yield
        finally:
            for m, syncing in zip(inner, before, strict=True):
                m.syncing = syncing

    def __getstate__(self):
        raise TypeError(
            "a DDP cannot be copied or saved, it is tied to its ranks: copy or save its .module"
        )

    # Backward, in order.

    def begin_backward(self, _=None):
        """At the first gradient of an output, in the outermost backward."""
        trainable = (p.requires_grad for bucket in self.buckets for p in bucket.parameters)
        if not self.syncing or self.backward.running or not any(trainable):
            return
        for bucket in self.buckets:
            bucket.begin()
        self.backward.begin()
        _running[:] = [ddp for ddp in _running if ddp.backward.running and ddp is not self] + [self]

    def gradient_arrived(self, number, i, parameter):
        """Each time a parameter's gradient was added to."""
        if not self.syncing:
            return
        bucket = self.buckets[number]
        self.begin_backward()
        self.check_gradient(bucket, i)
        bucket.take(i)
        bucket.arrived[i] += 1
        if bucket.complete:
            mark(f"bucket {number} ready")
            if self.overlap:
                self.send_complete()

    @staticmethod
    def check_gradient(bucket, i):
        if bucket.parameters[i].grad.requires_grad:
            raise RuntimeError(
                "backward(create_graph=True) would differentiate through the averaging, which is "
                "not recorded: take the inner gradient with torch.autograd.grad instead"
            )
        if bucket.sent:
            raise RuntimeError(
                f"the gradient of {bucket.names[i]} arrived more often than in any backward before,"
                " when its bucket had been sent: build DDP with overlap=False"
            )

    def send_complete(self):
        """Send complete buckets; always in order, so that all ranks send them in the same."""
        for ddp in _running:
            for bucket in ddp.buckets if ddp.overlap else ():
                if not bucket.sent:
                    if not bucket.complete:
                        return
                    bucket.fill()
                    ddp.send(bucket)

    def send(self, bucket):
        average = functools.partial(all_reduce, bucket.flat, self.group, op="avg", out=bucket.flat)
        if self.overlap:
            bucket.sent = background(average)
        else:
            average()

    def end_backward(self):
        """When the outermost backward is over: send the rest."""
        _running.remove(self)
        if self.reached:
            for bucket in self.buckets:
                if not bucket.sent:
                    bucket.fill()
                    self.send(bucket)

    def finish_backward(self):
        if self.reached:
            self.wait_for_buckets()

    @property
    def reached(self) -> bool:
        """Whether this backward did: torch.autograd.grad may pass through the outputs without
        asking for any parameter."""
        return any(any(bucket.arrived) for bucket in self.buckets)

    def wait_for_buckets(self):
        for bucket in self.buckets:
            bucket.wait()
            bucket.hand_out()

    # Ranks with different numbers of batches.

    def join(self, batches, *stateful):
        """Iterate over this rank's batches although other ranks have more or fewer.

        A rank that has run out counts as zero in the averages (the divisor stays W) until every
        rank has; then all take the weights and buffers of the first rank that ran to the end, and
        the state of what is in `stateful`: give the optimizer and the scheduler, or theirs stays
        behind on the ranks that ran out. The loop's body must make one forward and one averaged
        backward a batch, as it must on every rank. Before each batch comes an all_gather of 8
        bytes a rank.
        """
        batches, end, dropped = iter(batches), object(), False
        while True:
            batch = next(batches, end)
            have = all_gather(torch.tensor([int(batch is not end)]), self.group).tolist()
            if not any(have):
                break
            self.buffers_from, dropped = have.index(1), dropped or not all(have)
            if batch is end:
                self.stand_in()
            else:
                yield batch
        if dropped:
            everything = [*self.module.parameters(), *self.module.buffers()]
            copy_from(everything, self.group, self.buffers_from)
            if stateful:
                copy_state(stateful, self.group, self.buffers_from)
        self.buffers_from = 0

    def stand_in(self):
        """Take part in one forward and backward of the others without a batch."""
        if self.training:
            self.copy_buffers()
        for bucket in self.buckets:
            bucket.leave_out()
            self.send(bucket)
        self.wait_for_buckets()
        self.zero_grad()


def make_buckets(named, limit) -> list[Bucket]:
    """Parameters given with their names, last first, in runs of one dtype up to `limit` bytes."""
    runs, filling = [], {}
    for name, parameter in reversed(named):
        run = filling.get(parameter.dtype)
        if run is None or run[2] + parameter.nbytes > limit:
            run = filling[parameter.dtype] = [[], [], 0]
            runs.append(run)
        run[0].append(name)
        run[1].append(parameter)
        run[2] += parameter.nbytes
    return [Bucket(names, parameters) for names, parameters, _ in runs]
