"""ZeRO: data parallelism in which no two ranks need to hold the same thing.

    who holds what    stage 0: weights, gradients and optimizer state, on every rank
                      stage 1: optimizer state cut into W parts
                      stage 2: gradients too
                      stage 3: weights too
    who sends what    stages 0, 1, 2: 2(W-1)/W of the weights' bytes a rank and step
                      stage 3: 3(W-1)/W

One dial, one class. The optimizer always owns this rank's shard of each parameter (flat.py); the
stage only says when the rest is dropped: at 1 nothing else is, at 2 the gradients as soon as they
are reduced, at 3 also the weights as soon as they are used. Stage 0 is a shard group of one rank
with everybody else as replicas. Parameters travel in *units*, by default the model's repeated
blocks, the rest being the last unit, the root: what is gathered, used, reduced and freed together.

torch's `fully_shard` is stage 3 of this with DTensors; its `ZeroRedundancyOptimizer` with DDP is
stage 1, cut between parameters. (Rajbhandari et al., 2020; Zhao et al., VLDB 2023.)
"""

import contextlib
import functools
import weakref

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from s2s_lib.collectives.background import background
from s2s_lib.collectives.functions import all_gather
from s2s_lib.ranks.connection import current, mark
from s2s_lib.ranks.group import Group
from s2s_lib.strategies import state
from s2s_lib.strategies.backward import Backward, tensors_in, weakly
from s2s_lib.strategies.grads import cut_over
from s2s_lib.strategies.materialise import materialise
from s2s_lib.strategies.options import check_options, check_ranks
from s2s_lib.strategies.replicas import claim, copy_from
from s2s_lib.strategies.steps import watch_steps
from s2s_lib.strategies.unit import make_units

# On which background thread: two, so that a gather never waits for a reduction.
REDUCING, GATHERING = 0, 1


class ZeRO(nn.Module):
    """`module` over the W ranks of `group`, cut as far as `stage` (0 to 3) says.

    Construction: all ranks check that they built the same module (ValueError on all, naming the
    first difference) and take the first rank's values, unit by unit. Parameters on the meta device
    are made and drawn then, by each module's `reset_parameters` and in the order of `modules()`, so
    that at stage 3 no rank ever holds more than its shards, the root and twice a unit.
    Forward: each unit's weights are gathered before it runs where they are not up to date (stages
    1 and 2: the first time after a step; stage 3: always, and freed after it). With `prefetch` the
    next unit's are gathered meanwhile. In training mode, and not under `no_sync`, the first rank's
    buffers are copied to all before.
    Backward: stage 3 gathers each unit again; when all of a unit's gradients are there they are
    reduced on a second thread, and each rank keeps the average's shard.
    Step: each rank steps its shards, with any elementwise torch optimizer over
    `model.parameters()`. They are the module's own Parameter objects, which at rest *are* their
    shards (as many dims, possibly empty) and in use the whole: build the optimizer after wrapping.

    Sent per rank: a unit of P parameters is padded to a multiple of W. Its gradients cost (W-1)/W
    of it (in the working dtype) for each backward that is not under `no_sync`; its weights (W-1)/W
    for the first forward after a step at stages 1 and 2, for each forward and each backward at
    stage 3. Stage 0 averages whole gradients, 2(W-1)/W. A training forward adds, over all
    ranks together, W-1 times the buffers' bytes (with R copies of the model R W - 1 times).

    Held per rank, model states: with 4-byte numbers and AdamW 16 P bytes at stage 0, 8 P + 8 P/W at
    1, 4 P + 12 P/W at 2 and 16 P/W at 3. While they run, at stage 3 also the root, the unit in use
    and the prefetched one; where gradients are cut, the root's whole ones and those of up to two
    units on their way, with memory to receive them into.

    `param_dtype` (torch.bfloat16, torch.float16) is mixed precision as in the paper: weights in
    use, gradients and messages in 16 bits, added in float32; what the optimizer steps stays in the
    parameter's first dtype: 2 P + 2 P + 12 P bytes, the 12 cut first, then a 2, then the other.
    Floating inputs are converted, buffers are not. `.grad` is 16-bit, and in the parameter's first
    dtype during a step. (A hybrid rounds twice: after the sum inside, and after that between.)

    Hybrid shard: `replicate` is a second group, of the ranks that hold the same shard in other
    copies of the model. Every backward then averages shards between the R copies too, 2(R-1)/R of a
    shard. With `sync_every=k` above 1 it does not: the copies step apart, and after every k-th
    step of an optimizer their weights are averaged, moments not. That is local SGD, not the same
    training.

    `units` are modules (a class, or a list of modules) whose parameters are to travel together; a
    parameter used in two units belongs to the innermost one around both. Parameters of several
    dtypes, and frozen ones, each have a buffer of their own. `clip_grad_norm_` knows the shards.
    Gradients average over ranks as in DDP: see there for unequal batches. At stage 3 all ranks run
    the same units in the same order; what one may skip goes into a larger unit. A process runs one
    backward at a time. Use weights outside of their unit's forward under `with model.gathered():`;
    elsewhere they read as shards, so a penalty on weights is the optimizer's `weight_decay`, or is
    computed in their unit's forward. Change shards in place under `torch.no_grad()`: what goes
    through `.data` stages 1 and 2 do not notice, unless an optimizer of torch's class does it.
    """

    # A pipeline's I and W (strategies/pipeline): by the time of W the weights are shards again.
    backward_comes_apart = False

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        stage: int,
        replicate: Group | None = None,
        units=None,
        param_dtype: torch.dtype | None = None,
        prefetch: bool = True,
        sync_every: int = 1,
    ):
        super().__init__()
        check_options(module, group, replicate, stage, param_dtype, sync_every)
        self.units = make_units(module, units)
        names = [unit.name for unit in self.units]
        options = {"stage": stage, "units": names, "param_dtype": param_dtype}
        options |= {"prefetch": prefetch, "sync_every": sync_every}
        check_ranks(module, group, replicate, options)
        self.module = module
        self.stage, self.group, self.replicate = stage, group, replicate
        self.param_dtype, self.prefetch, self.sync_every = param_dtype, prefetch, sync_every
        self.shard_group = Group((group.ranks[group.rank],), 0) if stage == 0 else group
        averaged = [group] if stage == 0 else []
        self.averaged_over = averaged + ([replicate] if replicate and sync_every == 1 else [])
        self.syncing = True
        self.backward = Backward(self.close_all, self.end_backward)
        self.unfinished = False
        self.steps = weakref.WeakKeyDictionary()
        self.flat_of, self.unit_of = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self.cut_up()
        claim(module.named_parameters(), *([group, replicate] if replicate else [group]))
        # In the order of the last forward, which is the order to expect of the next.
        self.order, self.seen = [self.root, *self.units[:-1]], []
        self.reducing = None
        # Flats whose gradients are in the optimizer's dtype, and what they were, during a step.
        self.widened = []
        # Inside gathered(), where nothing is cut; after a no_sync backward, until it is reduced.
        self.whole = self.accumulated = False
        self.watch_forwards()
        watch_steps(self, module.parameters())

    # Construction

    def watch_forwards(self):
        for unit in self.units:
            before = functools.partial(self.before_forward, unit)
            after = functools.partial(self.after_forward, unit)
            unit.module.register_forward_pre_hook(before, with_kwargs=True)
            unit.module.register_forward_hook(after, always_call=True)
        for name, inner in self.module.named_modules():
            if any(True for _ in inner.parameters(recurse=False)):
                inner.register_forward_pre_hook(functools.partial(self.check_open, name))

    def cut_up(self):
        """Draw what is on the meta device, copy the first rank's values, cut unit by unit."""
        waiting = list(self.units)
        for module in self.module.modules():
            materialise(module, self.module)
            ready = [u for u in waiting if not any(p.is_meta for p in u.parameters)]
            waiting = [u for u in waiting if u not in ready]
            for unit in ready:
                self.copy_first([p.data for p in unit.parameters])
                unit.cut(self.shard_group, self.param_dtype, self.stage)
                for flat in unit.flats:
                    self.register(unit, flat)
        self.copy_first(list(self.module.buffers()))

    def copy_first(self, tensors):
        # Between replicas first, so that what is then copied inside is the same everywhere.
        if self.replicate is not None and self.group.rank == 0:
            copy_from(tensors, self.replicate)
        copy_from(tensors, self.group)

    def register(self, unit, flat):
        for i, parameter in enumerate(flat.parameters):
            self.flat_of[parameter], self.unit_of[parameter] = flat, unit
            if self.shard_group.size > 1:
                cut_over(parameter, self.shard_group, flat=True)
            if flat.trainable:
                numbers = self.units.index(unit), unit.flats.index(flat), i
                hook = weakly(self.gradient_arrived, *numbers)
                parameter.register_post_accumulate_grad_hook(hook)

    # Forward

    def forward(self, *args, **kwargs):
        self.check_parameters()
        if self.training and self.syncing:
            self.copy_first(list(self.module.buffers()))
        if self.param_dtype is not None:
            args, kwargs = pytree.tree_map(self.to_working_dtype, (args, kwargs))
        return self.module(*args, **kwargs)

    def to_working_dtype(self, value):
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.param_dtype) if floating else value

    def check_parameters(self):
        for name, parameter in self.module.named_parameters():
            if parameter not in self.flat_of:
                raise RuntimeError(
                    f"{name} is new since ZeRO was built, and would be neither cut nor averaged: "
                    "finish the module first, then build ZeRO"
                )
            if parameter.requires_grad != self.flat_of[parameter].trainable:
                raise RuntimeError(
                    f"requires_grad of {name} was {not parameter.requires_grad} when ZeRO was "
                    "built and has changed: set it first, then build ZeRO"
                )

    @property
    def flats(self):
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def root(self):
        return self.units[-1]

    def before_forward(self, unit, _, args, kwargs):
        if unit is self.root and not self.backward.running:
            self.recover()
            self.seen = []
        if self.backward.running:
            # A checkpoint that is computed again, perhaps with a backward of its own.
            self.open(unit, self.backward_order())
            unit.stash()
        else:
            self.seen.append(unit)
            self.open(unit, self.order)
            unit.uses += torch.is_grad_enabled()
        if self.stage == 3 and torch.is_grad_enabled():
            return self.watch_inputs(unit, (args, kwargs))
        return None

    def check_open(self, name, module, _):
        for key, parameter in module.named_parameters(recurse=False):
            unit = self.unit_of[parameter]
            if not unit.is_open:
                where = f"{name}.{key}" if name else key
                raise RuntimeError(
                    f"{where} is used outside the forward of {unit.name}, where this rank has only "
                    "its shard of it: call the ZeRO itself, or work under `with model.gathered():`"
                )

    def watch_inputs(self, unit, inputs):
        """The same inputs, by which `after_backward` is called once all their gradients are there.

        Each tensor is passed as a view of its own: one that goes into several units has its whole
        gradient only when all of them are done.
        """
        leaves, structure = pytree.tree_flatten(inputs)
        # Numbers, not tensors: what a hook of a tensor holds must not hold the tensor.
        waiting = set()

        def one_is_there(number, _):
            waiting.discard(number)
            if not waiting:
                self.after_backward(unit)

        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaves[number] = leaf.view_as(leaf)
                leaves[number].register_hook(functools.partial(one_is_there, number))
                waiting.add(number)
            elif any(tensor.requires_grad for tensor in tensors_in(leaf)):
                # In a dataclass: nobody will tell, and the end of backward closes the unit.
                waiting.add(number)
        unit.watched = bool(waiting)
        return pytree.tree_unflatten(leaves, structure)

    def after_forward(self, unit, _, args, outputs):
        if self.backward.running:
            # Backward is about to use what was computed again.
            return
        self.close(unit)
        if unit is self.root:
            if self.stage == 3:
                self.order = list(dict.fromkeys([*self.seen, *self.order]))
            else:
                # Those that this rank has not used, and others may have.
                self.fetch_before(len(self.order))
            self.close_all()
        tensors = list(tensors_in(outputs))
        if torch.is_grad_enabled() and unit.trainable and outputs is not None and not tensors:
            raise TypeError(
                f"{unit.name} returns a {type(outputs).__name__}, and ZeRO finds no tensor in it "
                "by which to know when its backward begins: return tensors, tuples, dictionaries "
                "or dataclasses"
            )
        for tensor in tensors:
            if tensor.grad_fn is not None:
                # By then the unit that it went into is closed: its view of it comes first.
                tensor.grad_fn.register_prehook(functools.partial(self.before_backward, unit))

    def open(self, unit, order):
        """Have the unit's weights here whole, and those of the next on their way."""
        if not unit.is_open:
            if self.stage < 3 and not self.backward.running:
                self.fetch_before(order.index(unit))
            if unit.coming is None and unit.stale:
                self.fetch(unit)
            unit.use()
        if self.prefetch:
            for other in order[order.index(unit) + 1 :][:1]:
                if not other.is_open and other.coming is None and other.stale:
                    self.fetch(other, ahead=True)

    def fetch_before(self, place):
        """Where full weights are kept, all ranks gather all units in one order, used or not: then
        a rank may run others than the rest."""
        for unit in self.order[:place]:
            if unit.coming is None and unit.stale:
                self.fetch(unit, ahead=True)

    def fetch(self, unit, ahead=False):
        if current().check:
            self.check_order(unit)
        mark(f"gather {unit.name}")
        unit.prepare()
        unit.coming = background(unit.gather, lane=GATHERING)
        if not ahead:
            unit.arrive()

    def check_order(self, unit):
        """The optional check: all ranks are about to gather the same unit."""
        number = torch.tensor([self.units.index(unit)])
        said = all_gather(number, self.shard_group).tolist()
        if len(set(said)) > 1:
            names = ", ".join(f"rank {r}: {self.units[n].name}" for r, n in enumerate(said))
            raise RuntimeError(
                f"the ranks use their units in different orders ({names}), and would "
                "get each other's weights: all must run the same units"
            )

    def close(self, unit):
        if not self.whole:
            unit.rest()

    def close_all(self):
        for unit in self.units:
            self.close(unit)

    # Backward

    def begin_backward(self):
        if self.whole:
            raise RuntimeError("a backward inside gathered(), where nothing is cut: leave it first")
        if self.backward.begin():
            self.recover()
            self.unfinished = True
            for unit in self.units:
                unit.begin()

    def recover(self):
        """After a forward, backward or step that raised: nothing is in use, and the gradients of
        that backward are gone. RuntimeError where those of earlier ones are gone with them."""
        self.narrow_gradients()
        lost = self.unfinished and self.accumulated
        if self.unfinished:
            self.unfinished = self.accumulated = self.backward.due = False
            if self.reducing is not None:
                with contextlib.suppress(Exception):
                    self.reducing[1].wait()
                self.reducing = None
            for unit in self.units:
                unit.forget()
        self.close_all()
        if lost:
            raise RuntimeError(
                "the backward before this one raised, and took with it the gradients of those "
                "under no_sync before: call model.zero_grad() and begin the step again"
            )

    def before_backward(self, unit, _=None):
        """At the first gradient of one of the unit's outputs."""
        if self.stage == 3 and torch.is_grad_enabled():
            raise RuntimeError(
                "a backward with create_graph=True is to be differentiated again, with weights "
                "that stage 3 frees in between: use stage 2"
            )
        self.begin_backward()
        if not self.root.is_open:
            # Here, so that all ranks gather it first, whichever unit they begin with.
            self.open(self.root, self.backward_order())
            self.root.stash()
        self.open(unit, self.backward_order())
        unit.stash()

    def backward_order(self):
        return [self.root, *(unit for unit in reversed(self.order) if unit is not self.root)]

    def after_backward(self, unit):
        """When the gradients of the unit's inputs are there."""
        self.close(unit)
        self.reduce_complete()

    def gradient_arrived(self, unit, flat, i, parameter):
        """Each time a parameter's gradient was added to, its unit and flat given as numbers."""
        unit = self.units[unit]
        flat = unit.flats[flat]
        self.check_gradient(unit, flat, i)
        self.begin_backward()
        flat.take(i)
        if unit.complete:
            if self.stage == 3 and not unit.watched and unit is not self.root:
                self.close(unit)
            self.reduce_complete()

    def check_gradient(self, unit, flat, i):
        gradient = flat.parameters[i].grad
        if unit.reduced and self.backward.running:
            raise RuntimeError(
                f"the gradient of {flat.names[i]} arrived again after those of {unit.name} were "
                "reduced: checkpoint with use_reentrant=False"
            )
        if gradient.requires_grad:
            raise RuntimeError(
                "backward(create_graph=True) would differentiate through the reduction, which is "
                "not recorded: take the inner gradient with torch.autograd.grad instead"
            )
        if gradient.is_sparse:
            raise RuntimeError(
                f"the gradient of {flat.names[i]} is sparse: build it with sparse=False"
            )

    def reduce_complete(self):
        """Reduce complete units; always in order, so that all ranks do so in the same."""
        if not self.syncing:
            return
        for unit in self.reducing_order():
            if not unit.reduced and unit.trainable:
                if not unit.complete:
                    return
                self.reduce(unit)

    def reducing_order(self):
        """The same on all ranks whatever they ran: as the module has the units, last first."""
        return [*reversed(self.units[:-1]), self.root]

    def reduce(self, unit):
        self.wait_for_reduction()
        unit.reduced = True
        unit.stash()
        self.reducing = unit, background(unit.reduce, self.averaged_over, lane=REDUCING)

    def wait_for_reduction(self):
        """One is on its way at a time, so that no more gradients are held than need be."""
        if self.reducing is not None:
            unit, task = self.reducing
            self.reducing = None
            task.wait()
            unit.drop_local()

    def end_backward(self):
        """Reduce what is left of a backward, and hand the gradients out."""
        trainable = [unit for unit in self.reducing_order() if unit.trainable]
        if self.syncing and any(unit.arrived for unit in trainable):
            for unit in trainable:
                if not unit.reduced:
                    self.reduce(unit)
            self.wait_for_reduction()
        for unit in self.units:
            unit.hand_out()
        self.unfinished = False
        self.accumulated = any(unit.has_local for unit in self.units)

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes inside add up this rank's gradients and send nothing; the next one
        outside reduces the sum. Until then they are held whole, at every stage, and apart from
        `.grad`, so `optimizer.step()` refuses; `model.zero_grad()` drops them."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def zero_grad(self, set_to_none: bool = True):
        self.accumulated = False
        for unit in self.units:
            unit.forget()
        super().zero_grad(set_to_none)

    def narrow_gradients(self):
        """After a step: gradients in the working dtype again."""
        for flat, narrow in self.widened:
            flat.narrow_gradients(narrow)
        self.widened = []

    # Whole weights

    @contextlib.contextmanager
    def gathered(self):
        """Inside, every parameter is whole on every rank; what is changed there, on all ranks
        alike, is kept. Needs memory for the whole model. Collective: a gather of it, and at
        stages 1 and 2 another at the next forward."""
        if self.backward.running or self.whole:
            raise RuntimeError("gathered() does not nest, and not inside a backward")
        self.whole = True
        try:
            for unit in self.units:
                self.open(unit, [unit])
            yield self.module
            for unit in self.units:
                unit.keep()
        finally:
            self.whole = False
            self.close_all()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The module's own state dict, whole tensors on every rank, in the optimizer's precision.

        Collective: (W-1)/W of the weights' bytes from each rank. Gathers one unit at a time.
        """
        return state.gather_weights(self)

    def load_full_state_dict(self, saved: dict[str, torch.Tensor]):
        """Take this rank's shards from a state dict of the plain module, as one process or
        `full_state_dict` at any other number of ranks made it. Local; nothing is changed where
        names or shapes do not fit (ValueError)."""
        state.load_weights(self, saved)

    def full_optimizer_state_dict(self, optimizer) -> dict:
        """{"state": {name: {key: value}}, "param_groups": [...]}: an optimizer's state by parameter
        name, whole tensors on every rank of the group.

        Collective: (W-1)/W of the bytes of each moment, and a pickled message for each flat.
        """
        return state.gather_optimizer(self, optimizer)

    def load_full_optimizer_state_dict(self, optimizer, saved: dict):
        """Take this rank's part of what `full_optimizer_state_dict` gave at any number of ranks.

        Local. ValueError, and nothing is changed, where groups, names or shapes do not fit.
        """
        state.load_optimizer(self, optimizer, saved)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Memory that is not reached through parameters, for the memory meter."""
        return {
            "weights": [t for flat in self.flats for t in (flat.full, flat.working, flat.master)],
            "gradients": [t for f in self.flats for t in (f.local, f.reduced) if t is not None],
        }

    def _apply(self, fn, recurse=True):
        raise RuntimeError(
            "a ZeRO cannot be converted or moved, its memory is laid out: convert the module first"
        )

    def __getstate__(self):
        raise TypeError(
            "a ZeRO cannot be copied or saved, it is tied to its ranks: save full_state_dict()"
        )
