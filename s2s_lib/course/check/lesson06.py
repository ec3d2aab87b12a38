"""The checks of lesson 06: meshes of data, pipeline and tensor parallelism."""

import math
from collections.abc import Mapping

import torch

from s2s_lib.course.check.answers import NOT_ATTEMPTED, Wrong, run, same_tensor
from s2s_lib.ranks.group import Group, Mesh

# The axes of the first exercise, the outermost first.
SIZES = (
    {"dp": 2, "pp": 2, "tp": 2},
    {"pp": 2, "dp": 3, "tp": 4},
    {"tp": 4, "dp": 2, "pp": 3},
)


def mesh_places(place, group):
    """`place(rank, sizes)`: axis -> index of a rank in a mesh whose axes are those of the dict
    `sizes`, the last varying fastest. `group(rank, axis, sizes)`: the ranks of its group along an
    axis, in order."""
    if all(_stub(yours, *given) for yours, given in ((place, (0,)), (group, (0, "dp")))):
        print(NOT_ATTEMPTED)
        return
    for sizes in SIZES:
        for rank in range(math.prod(sizes.values())):
            _check_place(place(rank, dict(sizes)), rank, sizes)
    if _stub(group, 0, "dp"):
        raise Wrong("place is right; now the groups")
    for sizes in SIZES:
        for rank in range(math.prod(sizes.values())):
            for axis in sizes:
                _check_group(group(rank, axis, dict(sizes)), rank, axis, sizes)
    print("right in three meshes of 8 and 24 ranks: the place of each rank, and its three groups")


def _stub(yours, *given):
    try:
        return yours(*given, dict(SIZES[0])) in (None, ...)
    except NotImplementedError:
        return True
    except Exception:
        # It does something; what is wrong with it shows in the check.
        return False


def _mesh(rank, sizes):
    return Mesh(Group(tuple(range(math.prod(sizes.values()))), rank), **sizes)


def _named(sizes):
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def _check_place(got, rank, sizes):
    right = _mesh(rank, sizes).coordinate
    if isinstance(got, Mapping) and dict(got) == right:
        return
    where = f"place of rank {rank} in {_named(sizes)}"
    if not isinstance(got, Mapping) or set(got) != set(sizes):
        raise Wrong(f"{where}: give a dict with the axes {', '.join(sizes)}, got {got!r}")
    backwards = dict(reversed(sizes.items()))
    hint = ""
    if dict(got) == _mesh(rank, backwards).coordinate:
        hint = "; the last axis varies fastest, in yours the first does"
    raise Wrong(f"{where}: got {dict(got)}, expected {right}{hint}")


def _check_group(got, rank, axis, sizes):
    right = list(_mesh(rank, sizes)[axis].ranks)
    where = f"group of rank {rank} along {axis} in {_named(sizes)}"
    if not isinstance(got, (list, tuple, range)):
        raise Wrong(f"{where}: give a list of ranks, got {got!r}")
    got = list(got)
    if got == right:
        return
    block = list(range(rank // sizes[axis] * sizes[axis], (rank // sizes[axis] + 1) * sizes[axis]))
    hint = ""
    if sorted(got) == sorted(right):
        hint = "; the ranks are right, their order is not"
    elif got == block:
        hint = "; neighbours are a group along the last axis only"
    elif rank not in got:
        hint = "; the rank itself is in its group"
    raise Wrong(f"{where}: got {got}, expected {right}{hint}")


def join_pieces(yours):
    """`yours(rows, shape, dim)`: the whole weight of this shape, cut along `dim` into as many parts
    as `rows` has lists. `rows[t][d]` is shard d of part t: the part in one row of numbers, zeros
    behind so that all shards have one length."""
    for shape, dim, parts, shards in (((4, 6), 0, 2, 2), ((4, 6), 1, 2, 2), ((3, 10), 1, 5, 4)):
        whole = torch.arange(1, 1 + math.prod(shape)).view(shape)
        rows = [_shards(part, shards) for part in whole.chunk(parts, dim)]
        where = f"a weight {list(shape)}, cut along dim {dim} into {parts} parts, {shards} shards"
        try:
            got = yours([list(row) for row in rows], shape, dim)
        except NotImplementedError:
            got = None
        except (RuntimeError, ValueError, TypeError) as error:
            raise Wrong(
                f"{where}: {type(error).__name__}: {error}{_padding(rows, whole)}"
            ) from None
        if got is None or got is ...:
            print(NOT_ATTEMPTED)
            return
        _same_whole(where, got, whole, rows, dim)
    print("right for three weights: shards to parts, parts to the whole, nothing of the padding")


def _shards(part, count):
    length = -(-part.numel() // count)
    row = torch.cat([part.reshape(-1), part.new_zeros(count * length - part.numel())])
    return row.split(length)


def _padding(rows, whole):
    there, part = sum(map(len, rows[0])), whole.numel() // len(rows)
    if there == part:
        return ""
    return f"; the shards of a part have {there} numbers, the part has {part}: the rest is padding"


def _same_whole(where, got, whole, rows, dim):
    try:
        same_tensor(where, got, whole)
    except Wrong as wrong:
        hint = ""
        if isinstance(got, torch.Tensor) and got.numel() == whole.numel():
            straight = torch.cat([torch.cat(row) for row in rows])
            if torch.equal(got.reshape(-1), straight[: whole.numel()]):
                hint = f"; each part is a tensor, and the parts stand side by side along dim {dim}"
            turned = [torch.cat(shards) for shards in zip(*rows, strict=True)]
            if torch.equal(got.reshape(-1), torch.cat(turned)[: whole.numel()]):
                hint = "; first join what was cut last, the shards of a part"
        raise Wrong(f"{wrong}{hint}") from None


def norm_of_mesh(yours):
    """`yours(gradients, cut, mesh)`: the norm of the gradient as one process has it, on every rank.
    `gradients` are this rank's by name, those named in `cut` are cut over tp and the others whole;
    stages differ along pp, ranks along dp have the same."""
    for sizes in ({"dp": 2, "pp": 2, "tp": 2}, {"tp": 2, "pp": 4, "dp": 1}):
        where = f"on a mesh {_named(sizes)}"
        ran = run(
            lambda _, world, sizes=sizes: _norm(yours, Mesh(world, **sizes)), [torch.zeros(1)] * 8
        )
        if ran is None:
            return
        right = math.sqrt(sum(_squares(s, t, sizes) for s, t in _parts(sizes)) + _whole(sizes))
        for rank, one in enumerate(ran):
            _same_norm(f"{where}, rank {rank}", one.result, right, _mesh(rank, sizes))
            if one.bytes > 100:
                raise Wrong(f"{where}: rank {rank} sent {one.bytes} bytes; squares are numbers")
    print("right on two meshes of 8 ranks: one process's norm, everywhere")


def _gradients(stage, part):
    """Of one rank: a weight that is cut, and the gain of a norm, which all tp ranks have."""
    cut = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3) * (1 + 2 * stage + part)
    return {f"{stage}.weight": cut, f"{stage}.norm": torch.full((4,), 2.0 + stage).double()}


def _parts(sizes):
    return [(stage, part) for stage in range(sizes["pp"]) for part in range(sizes["tp"])]


def _squares(stage, part, sizes):
    return _gradients(stage, part)[f"{stage}.weight"].square().sum().item()


def _whole(sizes):
    return sum(_gradients(s, 0)[f"{s}.norm"].square().sum().item() for s in range(sizes["pp"]))


def _norm(yours, mesh):
    stage, part = mesh.coordinate["pp"], mesh.coordinate["tp"]
    found = yours(_gradients(stage, part), {f"{stage}.weight"}, mesh)
    return None if found is None or found is ... else float(found)


def _same_norm(where, got, right, mesh):
    if got is None:
        raise Wrong(f"{where}: it returned nothing here; is a return missing?")
    if math.isclose(got, right, rel_tol=1e-9):
        return
    raise Wrong(f"{where}: got {got:.6g}, expected {right:.6g}{_guess(got, right, mesh)}")


def _guess(got, right, mesh):
    sizes, stage, part = mesh.axes, mesh.coordinate["pp"], mesh.coordinate["tp"]
    cut = {place: _squares(*place, sizes) for place in _parts(sizes)}
    gain = [_gradients(s, 0)[f"{s}.norm"].square().sum().item() for s in range(sizes["pp"])]
    stage_cut = sum(square for place, square in cut.items() if place[0] == stage)
    everything = sum(cut.values()) + sizes["tp"] * sum(gain)
    part_of_all = sum(cut[s, part] for s in range(sizes["pp"])) + sum(gain)
    wrong = {
        "that is this rank's own": cut[stage, part] + gain[stage],
        "that is one stage's: what about the others?": stage_cut + gain[stage],
        "that is of one part of each layer: add up over tp what is cut": part_of_all,
        "what is whole on every tp rank is counted once for each": everything,
        "replicas are counted, and what is whole once for each tp rank": sizes["dp"] * everything,
        "that is one stage's, and what is whole is counted once for each tp rank": stage_cut
        + sizes["tp"] * gain[stage],
    }
    if math.isclose(got, right**2, rel_tol=1e-9):
        return "; that is its square"
    for words, square in wrong.items():
        if math.isclose(got, math.sqrt(square), rel_tol=1e-9):
            return f"; {words}"
    return ""
