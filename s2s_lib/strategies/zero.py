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
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from s2s_lib.collectives.background import background
from s2s_lib.collectives.functions import all_gather, all_reduce
from s2s_lib.ranks.connection import current, mark
from s2s_lib.ranks.group import Group, check_group
from s2s_lib.strategies import optimizer_state
from s2s_lib.strategies.backward import Backward, tensors_in, weakly
from s2s_lib.strategies.grads import cut_over
from s2s_lib.strategies.replicas import (
    check_same,
    check_tiles,
    claim,
    copy_from,
    exchange,
    refuse_claimed,
)
from s2s_lib.strategies.unit import make_units, materialise

# Optimizers that look at a parameter's shape, or at all of them at once.
NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "Shampoo", "LARS", "LAMB")
# On which background thread: two, so that a gather never waits for a reduction.
REDUCING, GATHERING = 0, 1
# Parameter -> a weak reference to the ZeRO that cuts it.
_owner = WeakIdKeyDictionary()


class ZeRO(nn.Module):
    """`module` over the W ranks of `group`, cut as far as `stage` (0 to 3) says.

    Construction: all ranks check that they built the same module (ValueError on all, naming the
    first difference) and take the first rank's values, unit by unit. Parameters on the meta device
    are made and drawn then, by each module's `reset_parameters` and in the order of `modules()`, so
    that no rank ever holds more than a unit and the root.
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
    stage 3. Stage 0 averages whole gradients, 2(W-1)/W. A training forward adds W-1 times the
    buffers' bytes over all ranks.

    Held per rank, model states: with 4-byte numbers and AdamW 16 P bytes at stage 0, 8 P + 8 P/W at
    1, 4 P + 12 P/W at 2 and 16 P/W at 3. While they run, at stage 3 also the root, the unit in use
    and the prefetched one; where gradients are cut, those of up to two units on their way.

    `param_dtype` (torch.bfloat16, torch.float16) is mixed precision as in the paper: weights in
    use, gradients and messages in 16 bits, added in float32; what the optimizer steps stays in the
    parameter's first dtype: 2 P + 2 P + 12 P bytes, the 12 cut first, then a 2, then the other.
    Floating inputs are converted, buffers are not. `.grad` is 16-bit; the optimizer gets it wide.

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
    elsewhere they read as shards. Change shards in place under `torch.no_grad()`: through `.data`
    stages 1 and 2 do not notice, unless an optimizer of torch's class does it.
    """

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
        check_options(module, stage, replicate, param_dtype, sync_every)
        check_group(group)
        # Between replicas first, so that what is then copied inside is the same everywhere.
        self.copies = (group,) if replicate is None else (replicate, group)
        refuse_claimed(module.named_parameters())
        self.units = make_units(module, units)
        copies = None if replicate is None else replicate.size
        options = {
            "stage": stage,
            "replicate": copies,
            "units": [u.name for u in self.units],
            "param_dtype": param_dtype,
            "prefetch": prefetch,
            "sync_every": sync_every,
        }
        check_same(module, group)
        check_options_same(options, group)
        if replicate is not None:
            check_options_same(options, replicate)
            check_tiles(group, replicate)
            check_same(module, replicate)
        self.module = module
        self.stage, self.group, self.replicate = stage, group, replicate
        self.param_dtype, self.prefetch, self.sync_every = param_dtype, prefetch, sync_every
        self.shard_group = Group((group.ranks[group.rank],), 0) if stage == 0 else group
        averaged = [group] if stage == 0 else []
        self.averaged_over = averaged + ([replicate] if replicate and sync_every == 1 else [])
        self.syncing = True
        self.backward = Backward(self.end_backward)
        self.unfinished = False
        self.steps = weakref.WeakKeyDictionary()
        self.flat_of, self.unit_of = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self.cut_up()
        claim(module.named_parameters())
        # In the order of the last forward, which is the order to expect of the next.
        self.order, self.seen = [self.root, *self.units[:-1]], []
        self.reducing = None
        self.narrow_gradients = []
        self.watch_forwards()
        _watch_optimizers()

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
                    self.own(unit, flat)
        self.copy_first(list(self.module.buffers()))

    def copy_first(self, tensors):
        for ranks in self.copies:
            copy_from(tensors, ranks)

    def own(self, unit, flat):
        for i, parameter in enumerate(flat.parameters):
            self.flat_of[parameter], self.unit_of[parameter] = flat, unit
            _owner[parameter] = weakref.ref(self)
            if self.shard_group.size > 1:
                cut_over(parameter, self.shard_group)
            if flat.trainable:
                numbers = self.units.index(unit), unit.flats.index(flat), i
                hook = weakly(self.gradient_arrived, *numbers)
                parameter.register_post_accumulate_grad_hook(hook)

    # Forward

    def forward(self, *args, **kwargs):
        self.check_parameters()
        if self.training and self.syncing and self.copies[-1].size * self.copies[0].size > 1:
            self.copy_first(list(self.module.buffers()))
        if self.param_dtype is not None:
            args, kwargs = pytree.tree_map(self.narrow, (args, kwargs))
        return self.module(*args, **kwargs)

    def narrow(self, value):
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.param_dtype) if floating else value

    def check_parameters(self):
        for name, parameter in self.module.named_parameters():
            if parameter not in self.flat_of:
                raise RuntimeError(
                    f"{name} is new since ZeRO was built, and would be neither cut nor averaged: "
                    "finish the module first, then build ZeRO"
                )
        for unit in self.units:
            for flat in unit.flats:
                for name, parameter in zip(flat.names, flat.parameters, strict=True):
                    if parameter.requires_grad != flat.trainable:
                        raise RuntimeError(
                            f"requires_grad of {name} was {flat.trainable} when ZeRO was built and "
                            "has changed: set it first, then build ZeRO"
                        )

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
            self.watch_inputs(unit, (args, kwargs))

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
        """Have `after_backward` called once the gradients of all inputs are there."""
        tensors = {id(t): t for t in tensors_in(inputs) if t.requires_grad}
        unit.watched = bool(tensors)
        # Numbers, not tensors: what a hook of a tensor holds must not hold the tensor.
        waiting = set(tensors)

        def one_is_there(number, _):
            waiting.discard(number)
            if not waiting:
                self.after_backward(unit)

        for number, tensor in tensors.items():
            # One that nothing was computed from outlives the backward, and so would its hook.
            if tensor.grad_fn is not None:
                tensor.register_hook(functools.partial(one_is_there, number))

    def after_forward(self, unit, _, args, outputs):
        if self.backward.running:
            # Backward is about to use what was computed again.
            return
        unit.rest()
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
                # Called after the hooks of the tensor, which close the unit that it went into.
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
            following = order[order.index(unit) + 1 :][:1]
            for other in following:
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

    def close_all(self):
        for unit in self.units:
            unit.rest()

    # Backward

    def begin_backward(self):
        if self.backward.begin():
            self.recover()
            self.unfinished = True
            for unit in self.units:
                unit.begin()

    def recover(self):
        """After a forward or backward that raised: nothing is in use, its gradients are gone."""
        if self.unfinished:
            self.unfinished = False
            if self.reducing is not None:
                with contextlib.suppress(Exception):
                    self.reducing[1].wait()
                self.reducing = None
            for unit in self.units:
                unit.forget()
        self.close_all()

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
        unit.rest()
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
                unit.rest()
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
        trainable = [unit for unit in self.reducing_order() if unit.trainable]
        if self.syncing and any(unit.arrived for unit in trainable):
            for unit in trainable:
                if not unit.reduced:
                    self.reduce(unit)
            self.wait_for_reduction()
        self.close_all()
        for unit in self.units:
            unit.hand_out()
        self.unfinished = False

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
        for unit in self.units:
            unit.forget()
        super().zero_grad(set_to_none)

    # Around an optimizer's step

    def before_step(self, optimizer, parameters):
        if type(optimizer).__name__ in NOT_ELEMENTWISE:
            raise TypeError(
                f"{type(optimizer).__name__} looks at whole tensors, and here are shards: use an "
                "elementwise optimizer (SGD, Adam, AdamW, RMSprop, ...)"
            )
        if any(unit.has_local for unit in self.units):
            raise RuntimeError(
                "the last backward was under no_sync, and its gradients are not reduced: run one "
                "outside before optimizer.step(), or model.zero_grad() to drop them"
            )
        for parameter in parameters:
            for key, value in optimizer.state.get(parameter, {}).items():
                odd = (
                    isinstance(value, torch.Tensor)
                    and value.dim()
                    and value.shape != parameter.shape
                )
                if odd:
                    raise RuntimeError(
                        f"the optimizer's {key} has shape {tuple(value.shape)}, this rank's shard "
                        f"{tuple(parameter.shape)}: it is from before ZeRO, or of another layout; "
                        "build it after wrapping, load with load_full_optimizer_state_dict"
                    )
        mixed = {id(f): f for p in parameters if (f := self.flat_of[p]).mixed}.values()
        self.narrow_gradients = [(flat, flat.widen_gradients()) for flat in mixed]

    def after_step(self, optimizer, parameters):
        for flat, narrow in self.narrow_gradients:
            flat.narrow_gradients(narrow)
        self.narrow_gradients = []
        flats = list({id(f): f for f in map(self.flat_of.get, parameters)}.values())
        for flat in flats:
            # An optimizer may hold frozen parameters, and leaves them alone.
            flat.changed = flat.changed or flat.trainable
        if self.sync_every > 1:
            self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
            if self.steps[optimizer] % self.sync_every == 0:
                for flat in flats:
                    all_reduce(flat.master, self.replicate, "avg", "direct", out=flat.master)

    # Whole weights

    @contextlib.contextmanager
    def gathered(self):
        """Inside, every parameter is whole on every rank; what is changed there, on all ranks
        alike, is kept. Collective, and needs memory for the whole model."""
        if self.backward.running:
            raise RuntimeError("gathered() inside a backward would change what it computes with")
        for unit in self.units:
            self.open(unit, [unit])
        try:
            yield self.module
        finally:
            for unit in self.units:
                unit.keep()
            self.close_all()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The module's own state dict, whole tensors on every rank, in the optimizer's precision.

        Collective: (W-1)/W of the weights' bytes from each rank. Gathers one unit at a time.
        """
        whole = WeakIdKeyDictionary()
        for unit in self.units:
            for flat in unit.flats:
                for parameter, tensor in zip(
                    flat.parameters, flat.gather_vectors(flat.master), strict=True
                ):
                    whole[parameter] = tensor
        state = self.module.state_dict(keep_vars=True)
        return {
            name: whole[value] if value in self.flat_of else value.detach().clone()
            for name, value in state.items()
        }

    def load_full_state_dict(self, state: dict[str, torch.Tensor]):
        """Take this rank's shards from a state dict of the plain module, as one process or
        `full_state_dict` at any other number of ranks made it. Local; nothing is changed where
        names or shapes do not fit (ValueError)."""
        mine = self.module.state_dict(keep_vars=True)
        whole = {
            p: shape
            for u in self.units
            for f in u.flats
            for p, shape in zip(f.parameters, f.shapes, strict=True)
        }
        wrong = [f"missing {name}" for name in mine if name not in state]
        wrong += [f"unexpected {name}" for name in state if name not in mine]
        for name, value in mine.items():
            shape = whole.get(value, value.shape)
            if name not in state:
                continue
            if not isinstance(state[name], torch.Tensor) or state[name].is_meta:
                wrong.append(f"{name} is {state[name]!r}, not a tensor with values")
            elif state[name].shape != shape:
                wrong.append(f"{name} is {tuple(state[name].shape)}, not {tuple(shape)}")
        if wrong:
            raise ValueError(f"this state dict does not fit the module: {'; '.join(wrong)}")
        with torch.no_grad():
            for name, value in mine.items():
                flat = self.flat_of.get(value)
                if flat is None:
                    value.copy_(state[name])
                else:
                    i = next(i for i, p in enumerate(flat.parameters) if p is value)
                    flat.shards[i].copy_(flat.part_of(state[name], i))
                    flat.changed = True

    def full_optimizer_state_dict(self, optimizer) -> dict:
        """An optimizer's state by parameter name, whole tensors on every rank. Collective."""
        return optimizer_state.gather(self, optimizer)

    def load_full_optimizer_state_dict(self, optimizer, state: dict):
        """Take this rank's part of what `full_optimizer_state_dict` gave at any number of ranks."""
        optimizer_state.load(self, optimizer, state)

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Memory that is not reached through parameters, for the memory meter."""
        flats = [flat for unit in self.units for flat in unit.flats]
        return {
            "weights": [t for flat in flats for t in (flat.full, flat.working, flat.master)],
            "gradients": [t for f in flats for t in (f.local, f.reduced) if t is not None],
        }

    def _apply(self, fn, recurse=True):
        raise RuntimeError(
            "a ZeRO cannot be converted or moved, its memory is laid out: convert the module first"
        )

    def __getstate__(self):
        raise TypeError(
            "a ZeRO cannot be copied or saved, it is tied to its ranks: save full_state_dict()"
        )


def check_options_same(options, group):
    """ValueError on all ranks, naming the first option that differs between them."""
    said = [
        text.decode().splitlines()
        for text in exchange("\n".join(f"{k}={v}" for k, v in options.items()).encode(), group)
    ]
    for rank, theirs in enumerate(said):
        for mine, other in zip(said[0], theirs, strict=True):
            if mine != other:
                raise ValueError(
                    f"the ranks give ZeRO different options: {mine} on rank 0 and "
                    f"{other} on rank {rank} of group {list(group.ranks)}"
                )


def check_options(module, stage, replicate, param_dtype, sync_every):
    """Errors for what makes no sense whatever the ranks are."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"ZeRO wraps a torch.nn.Module, got {module!r}")
    if not any(True for _ in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no parameters: there is nothing to cut")
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(
            f"stage={stage!r}: 0 cuts nothing, 1 optimizer state, 2 gradients too, 3 weights too"
        )
    if replicate is not None:
        check_group(replicate)
    if isinstance(sync_every, bool) or not isinstance(sync_every, int) or sync_every < 1:
        raise ValueError(f"sync_every={sync_every!r}: average the replicas every 1, 2, ... steps")
    if sync_every > 1 and replicate is None:
        raise ValueError(
            f"sync_every={sync_every} says how often replicas are averaged, and there are none: "
            "give replicate="
        )
    narrow = isinstance(param_dtype, torch.dtype) and param_dtype.is_floating_point
    if param_dtype is not None and not narrow:
        raise ValueError(f"param_dtype={param_dtype!r}: give a floating dtype or None")


def _zeros_of(optimizer):
    """Each ZeRO that owns some of an optimizer's parameters, and those."""
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = _owner.get(parameter)
            model = owner and owner()
            if model is not None:
                found.setdefault(id(model), (model, []))[1].append(parameter)
    return found.values()


def _before_step(optimizer, args, kwargs):
    for model, parameters in _zeros_of(optimizer):
        model.before_step(optimizer, parameters)


def _after_step(optimizer, args, kwargs):
    for model, parameters in _zeros_of(optimizer):
        model.after_step(optimizer, parameters)


@functools.cache
def _watch_optimizers():
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
