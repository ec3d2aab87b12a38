"""Weights that live in several stages, an embedding that is also the head for example.

Each stage has its own copy. The copies start equal, and stay so because every optimizer takes the
same step: the gradient of each is the sum over all of them. In the norm of the whole gradient such
a weight counts once.
"""

import contextlib

import torch

from s2s_lib.collectives.functions import all_reduce
from s2s_lib.strategies.grads import counted_elsewhere
from s2s_lib.strategies.replicas import copy_from


class Ties:
    """The tied weights of a pipeline: `tied[i]` gives, for each stage that has weight i, its name
    there. `stage` is this rank's modules by number.

    Construction copies the first stage's values to the others: a broadcast for each weight. A step
    adds an all_reduce of each weight's gradient over the ranks that have it.
    """

    def __init__(self, tied, stage, group, schedule):
        self.own = []
        for names in tied:
            ranks = sorted({schedule.rank_of[number] for number in names})
            first = schedule.rank_of[min(names)]
            holders = group.subgroup(ranks)
            if holders is None:
                continue
            copies = {}
            for number in sorted(set(names) & set(stage)):
                weight = stage[number].get_parameter(names[number])
                copies[id(weight)] = weight
            weights = list(copies.values())
            copy_from(weights[:1], holders, ranks.index(first))
            for other in weights[1:]:
                other.data.copy_(weights[0].data)
            for weight in weights[group.rank == first :]:
                counted_elsewhere(weight)
            self.own.append((weights, holders, group.rank == first))

    @contextlib.contextmanager
    def summed(self):
        """The gradients that come inside are summed over all copies; what was there before, which
        all copies have, stays what it is."""
        for weights, _, first in self.own:
            # What was there is in the sum once.
            for weight in weights[first:]:
                if weight.grad is not None:
                    weight.grad.zero_()
        yield
        for weights, holders, _ in self.own:
            if weights[0].requires_grad:
                total = sum(w.grad for w in weights if w.grad is not None)
                if not isinstance(total, torch.Tensor):
                    total = torch.zeros_like(weights[0])
                if holders.size > 1:
                    total = all_reduce(total, holders)
                for weight in weights:
                    if weight.grad is None:
                        weight.grad = total.clone()
                    else:
                        weight.grad.copy_(total)
