"""Weights that live in several stages, an embedding that is also the head for example.

Each stage has its own copy. The copies start equal, and stay so because every optimizer takes the
same step: the gradient of each is the sum over all of them. In the norm of the whole gradient such
a weight counts once.
"""

import contextlib

import torch

from s2s_lib.collectives.functions import all_reduce
from s2s_lib.strategies.grads import is_in_flat
from s2s_lib.strategies.replicas import copy_from


def describe(tied, module_of, schedule) -> list:
    """Of each tied weight the copies on this rank: [shape, dtype, trained] by number of the stage.

    `tied[i]` gives, for each stage that has weight i, its name there; `module_of` this rank's
    modules by number. ValueError for stages and names that do not exist.
    """
    found = []
    for names in tied:
        wrong = [number for number in names if number not in range(schedule.stages)]
        if wrong or len(names) < 2:
            raise ValueError(
                f"tied: {names} should name a weight in two or more of the stages 0 to "
                f"{schedule.stages - 1}"
            )
        copies = {}
        for number in sorted(set(names) & set(module_of)):
            weight = weight_of(module_of[number], names[number], number)
            if is_in_flat(weight):
                raise ValueError(
                    f"tied: {names[number]!r} of stage {number} is in a ZeRO, which cuts it in "
                    "other places than the other stage's; use a DDP, or ZeRO with stage=0"
                )
            copies[number] = [list(weight.shape), str(weight.dtype)[6:], weight.requires_grad]
        found.append(copies)
    return found


def weight_of(module, name, number):
    """A parameter by its name in the stage, which a DDP or ZeRO may hold as `.module`."""
    for holder in (module, getattr(module, "module", None)):
        try:
            return holder.get_parameter(name)
        except AttributeError:
            continue
    raise ValueError(f"tied: stage {number} has no parameter {name!r}")


class Ties:
    """The tied weights of a pipeline, described alike by all ranks (`describe`).

    Construction copies the first stage's values to the others: a broadcast for each weight. A step
    adds an all_reduce of each weight's gradient over the ranks that have it.
    """

    def __init__(self, tied, module_of, group, schedule):
        self.own, self.names = [], []
        # Those that count in the norm on another rank, or as another tensor here.
        self.copies = []
        for names in tied:
            ranks = sorted({schedule.rank_of[number] for number in names})
            first = schedule.rank_of[min(names)]
            holders = group.subgroup(ranks)
            if holders is None:
                continue
            numbers = sorted(set(names) & set(module_of))
            weights = [weight_of(module_of[number], names[number], number) for number in numbers]
            # A rank with two of the stages may have one tensor in both.
            weights = list({id(weight): weight for weight in weights}.values())
            copy_from(weights[:1], holders, ranks.index(first))
            for other in weights[1:]:
                other.data.copy_(weights[0].data)
            self.copies += weights[group.rank == first :]
            self.own.append((weights, holders, group.rank == first))
            self.names.append(names)
        # This rank's copies of what other stages have too.
        self.weights = [weight for weights, _, _ in self.own for weight in weights]
        self.trained = [weights[0].requires_grad for weights, *_ in self.own]

    def check(self):
        """ValueError for a weight frozen or unfrozen since construction: the other ranks that have
        it would not know."""
        for (weights, *_), names, trained in zip(self.own, self.names, self.trained, strict=True):
            if any(weight.requires_grad != trained for weight in weights):
                raise ValueError(
                    f"the tied weight {names} was {'trained' if trained else 'frozen'} when the "
                    "Pipeline was built: set requires_grad first, on all ranks, then build it"
                )

    @contextlib.contextmanager
    def summed(self):
        """The gradients that come inside are summed over all copies; what was there before, which
        all copies have, stays what it is."""
        own = [copies for copies, trained in zip(self.own, self.trained, strict=True) if trained]
        for weights, _, first in own:
            # What was there is in the sum once.
            for weight in weights[first:]:
                if weight.grad is not None:
                    weight.grad.zero_()
        yield
        for weights, holders, _ in own:
            total = torch.zeros_like(weights[0])
            for grad in (weight.grad for weight in weights if weight.grad is not None):
                total += grad
            total = all_reduce(total, holders)
            for weight in weights:
                if weight.grad is None or weight.grad.is_sparse:
                    weight.grad = total.clone()
                else:
                    weight.grad.copy_(total)
