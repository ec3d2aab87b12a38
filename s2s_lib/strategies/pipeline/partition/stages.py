"""The stages of a model as a list that tells what is in each, and draws itself as a table."""

from typing import NamedTuple

import torch
from torch import nn


class Row(NamedTuple):
    """One stage in the report; `cost` in the unit of `by`, `share` of the sum over the stages."""

    layers: tuple[str, ...]
    parameters: int
    cost: float
    share: float


class Stages(list):
    """The stages in order; prints and draws itself as a table.

    `.by`          what was balanced: "params", "flops" or "time"
    `.rows[s]`     a Row: the names of the layers, the parameters held, cost and share of it
    `.boundaries`  for s from 0 to S - 2, the names of the values that go from stage s to s + 1
    `.tied`        one {stage: name} for each parameter that several stages hold
    """

    def __init__(self, stages, model, by, rows, boundaries):
        super().__init__(stages)
        self.by, self.rows, self.boundaries = by, rows, boundaries
        self.tied = find_tied(stages)
        for stage in stages:
            stage.tied = self.tied
        self.model = model
        # Who holds which tensor at the split: those on the meta device are replaced later, one
        # stage at a time, and then no longer tell what was tied.
        self.origin = [(module, tensors_of(module)) for module in model.modules()]
        self.places = [
            [(module, *item) for module in stage.modules() for item in tensors_of(module).items()]
            for stage in stages
        ]

    def _table(self):
        unit = {"flops": ["Mflop"], "time": ["ms"]}.get(self.by, [])
        share = " of ".join(["share", *unit])
        yield ["stage", "layers", "parameters", *unit, share, "sends"]
        for s, row in enumerate(self.rows):
            layers = " .. ".join(dict.fromkeys([row.layers[0], row.layers[-1]]))
            cost = {"flops": [f"{row.cost / 1e6:,.4g}"], "time": [f"{row.cost * 1e3:.2f}"]}
            sends = ", ".join(self.boundaries[s]) if s + 1 < len(self) else "result"
            numbers = [f"{row.parameters:,}", *cost.get(self.by, []), f"{row.share:.1%}"]
            yield [str(s), layers, *numbers, sends]

    def _ties(self):
        for names in self.tied:
            yield "tied: " + " = ".join(f"{name} (stage {s})" for s, name in names.items())

    def __str__(self):
        rows = list(self._table())
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        left = (0, 1, len(widths) - 1)
        lines = [
            "  ".join(
                cell.ljust(width) if i in left else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *self._ties()])

    __repr__ = __str__

    def _repr_markdown_(self):
        head, *rows = self._table()
        rule = [":--", ":--", *["--:"] * (len(head) - 3), ":--"]
        lines = ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]
        return "\n".join(["\n".join(lines), *self._ties()]).replace("\ntied", "\n\ntied")


def find_tied(stages):
    names_of = {}
    for s, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            names_of.setdefault(parameter, {}).setdefault(s, name)
    return [names for names in names_of.values() if len(names) > 1]


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers that a module holds itself, by name."""
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None}
