"""The weights of a tensor-parallel module, whole and by its own names: what is saved and loaded."""

import torch
from torch import nn

from s2s_lib.collectives.functions import all_gather
from s2s_lib.strategies.tensor.layers import Parallel


def full_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's state dict with whole tensors, on every rank: as of one process.

    Collective: (W-1)/W of the bytes of what is cut, one tensor at a time.
    """
    cuts = cuts_of(module)
    check_parts(module, cuts)
    return {
        name: gather_parts(value, *cuts[name]) if name in cuts else value.detach().clone()
        for name, value in module.state_dict().items()
    }


def load_full_state_dict(module: nn.Module, saved: dict[str, torch.Tensor]):
    """Take this rank's parts from a state dict of the plain module, as one process or
    `full_state_dict` at any number of ranks made it. Local. ValueError, and nothing is changed,
    where names or shapes do not fit."""
    cuts, mine = cuts_of(module), module.state_dict()
    check_parts(module, cuts)
    wrong = [f"missing {name}" for name in mine if name not in saved]
    wrong += [f"unexpected {name}" for name in saved if name not in mine]
    for name in mine.keys() & saved.keys():
        shape = whole_shape(mine[name], *cuts[name]) if name in cuts else mine[name].shape
        if not isinstance(saved[name], torch.Tensor):
            wrong.append(f"{name} is no tensor but {saved[name]!r}")
        elif saved[name].shape != shape:
            wrong.append(f"{name} is {list(saved[name].shape)}, the module has {list(shape)}")
    if wrong:
        raise ValueError(f"this state dict does not fit the module: {'; '.join(sorted(wrong))}")
    with torch.no_grad():
        for name, value in mine.items():
            cut, group = cuts.get(name, (None, None))
            value.copy_(cut.take(saved[name], group.rank) if cut else saved[name])


def cuts_of(module):
    """Name in the state dict -> its cut and group."""
    return {
        f"{path}.{name}" if path else name: (cut, layer.group)
        for path, layer in module.named_modules(remove_duplicate=False)
        if isinstance(layer, Parallel) and layer.cuts
        for name, cut in layer.cuts.items()
        if getattr(layer, name) is not None
    }


def check_parts(module, cuts):
    mine = module.state_dict()
    for name, (cut, group) in cuts.items():
        if mine[name].shape[cut.dim : cut.dim + 1] != (cut.size(group.rank),):
            raise ValueError(
                f"{name} is {list(mine[name].shape)} here, and this rank's part has "
                f"{cut.size(group.rank)} along dim {cut.dim}: a ZeRO around the module has cut it "
                "further; call this under `with model.gathered():`"
            )


def whole_shape(part, cut, _):
    shape = list(part.shape)
    shape[cut.dim] = sum(cut.blocks)
    return torch.Size(shape)


def gather_parts(part, cut, group):
    """The whole tensor of which this rank has a part."""
    shapes = [list(part.shape) for _ in range(group.size)]
    for rank, shape in enumerate(shapes):
        shape[cut.dim] = cut.size(rank)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = all_gather(part.detach().reshape(-1), group, sizes=sizes).split(sizes)
    return cut.join([p.view(shape) for p, shape in zip(parts, shapes, strict=True)])
