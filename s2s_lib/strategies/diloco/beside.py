"""What islands average beside their parameters: buffers, and if wanted an optimizer's moments."""

import torch

from s2s_lib.ranks.group import Group
from s2s_lib.strategies.replicas import exchange
from s2s_lib.strategies.state import NUMBERS


class Buffers:
    """A module's floating buffers, and what they were after the last sync.

    Averaged is how far they have moved since: one that nobody moves stays what it is, bit for bit.
    """

    def __init__(self, model: torch.nn.Module):
        self.live = [b for b in model.buffers() if b.is_floating_point() or b.is_complex()]
        self.outer = [buffer.clone() for buffer in self.live]

    def moved(self) -> list[torch.Tensor]:
        return [live - outer for live, outer in zip(self.live, self.outer, strict=True)]

    def hand_out(self, averages: list[torch.Tensor]):
        for live, outer, average in zip(self.live, self.outer, averages, strict=True):
            live.copy_(outer.add_(average))


def moments_of(optimizer, fragment) -> dict[str, torch.Tensor]:
    """ "exp_avg of blocks.0.attn.q.weight" -> that tensor, in the fragment's order."""
    found = {}
    for row in fragment.rows:
        for name, parameter in zip(row.names, row.parameters, strict=True):
            state = optimizer.state.get(parameter, {})
            for key in sorted(state):
                value = state[key]
                if key not in NUMBERS and getattr(value, "shape", None) == parameter.shape:
                    found[f"{key} of {name}"] = value
    return found


def check_moments(mine: dict, group: Group):
    """ValueError on all islands unless all have the same to average. An exchange of the names."""
    said = [set(text.decode().splitlines()) for text in exchange("\n".join(mine).encode(), group)]
    for number, theirs in enumerate(said):
        if theirs != said[0]:
            name = min(theirs ^ said[0])
            has, lacks = (number, 0) if name in theirs else (0, number)
            raise ValueError(
                f'moments="average": island {has} has {name} and island {lacks} has not, since it '
                'never had a gradient there: give moments="keep" or "reset"'
            )
