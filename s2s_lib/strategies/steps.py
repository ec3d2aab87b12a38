"""What a ZeRO does around an optimizer's step: torch calls it for every optimizer."""

import functools
import weakref

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from s2s_lib.collectives.functions import all_reduce

# Optimizers that look at a parameter's shape, or at all of them at once.
NOT_ELEMENTWISE = {"adafactor", "lbfgs", "muon", "shampoo", "lars", "lamb"}
# Parameter -> a weak reference to the ZeRO that cuts it.
_owner = WeakIdKeyDictionary()


def watch_steps(model, parameters):
    """From now on, steps of optimizers that hold these parameters are this ZeRO's concern."""
    for parameter in parameters:
        _owner[parameter] = weakref.ref(model)
    _watch_optimizers()


def before_step(model, optimizer, parameters, closure):
    """Errors for a step that would go wrong; then gradients in the dtype of what is stepped."""
    check_elementwise(optimizer)
    if any(unit.has_local for unit in model.units):
        raise RuntimeError(
            "the last backward was under no_sync, and its gradients are not reduced: run one "
            "outside before optimizer.step(), or model.zero_grad() to drop them"
        )
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            check_shape(key, value, parameter)
    mixed = {id(f): f for p in parameters if (f := model.flat_of[p]).mixed}.values()
    if mixed and closure:
        raise TypeError(
            "in mixed precision a step with a closure would run backward on what is being stepped: "
            "run forward and backward first, then optimizer.step()"
        )
    model.widened = [(flat, flat.widen_gradients()) for flat in mixed]


def after_step(model, optimizer, parameters):
    """The weights have changed; every `sync_every`-th step they are averaged between replicas."""
    model.narrow_gradients()
    flats = list({id(f): f for f in map(model.flat_of.get, parameters)}.values())
    for flat in flats:
        # An optimizer may hold frozen parameters, and leaves them alone.
        flat.changed = flat.changed or flat.trainable
    if model.sync_every > 1:
        model.steps[optimizer] = model.steps.get(optimizer, 0) + 1
        if model.steps[optimizer] % model.sync_every == 0:
            for flat in flats:
                all_reduce(flat.master, model.replicate, "avg", "direct", out=flat.master)


def check_elementwise(optimizer):
    if NOT_ELEMENTWISE & {kind.__name__.lower() for kind in type(optimizer).__mro__}:
        raise TypeError(
            f"{type(optimizer).__name__} looks at whole tensors, and here are shards: use an "
            "elementwise optimizer (SGD, Adam, AdamW, RMSprop, ...)"
        )


def check_shape(key, value, parameter):
    if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
        raise RuntimeError(
            f"the optimizer's {key} has shape {tuple(value.shape)}, this rank's shard "
            f"{tuple(parameter.shape)}: it is from before ZeRO, or of another layout; build it "
            "after wrapping, load with load_full_optimizer_state_dict"
        )


def _owned(optimizer):
    """Each ZeRO that owns some of an optimizer's parameters, and those."""
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = _owner.get(parameter)
            model = owner and owner()
            if model is not None:
                found.setdefault(id(model), (model, []))[1].append(parameter)
    return found.values()


def _before(optimizer, args, kwargs):
    closure = kwargs.get("closure") or any(callable(a) and a is not optimizer for a in args)
    for model, parameters in _owned(optimizer):
        before_step(model, optimizer, parameters, closure)


def _after(optimizer, args, kwargs):
    for model, parameters in _owned(optimizer):
        after_step(model, optimizer, parameters)


@functools.cache
def _watch_optimizers():
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
