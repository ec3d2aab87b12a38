"""Pictures of a mesh: plain data in, a `Picture` out.

draw_mesh  the ranks as a box, and for each axis who is in one group, with the nodes they live on
"""

import math

from s2s_lib.course.charts import WIDTH
from s2s_lib.draw import FAINT, INK, PAD, PALETTE, Canvas, Picture, colour
from s2s_lib.ranks.group import Group, Mesh

# None of the first four, which are groups.
AXIS_COLOURS = {"dp": PALETTE[7], "pp": PALETTE[6], "tp": PALETTE[4]}
# From one rank to the next along an axis, in the box: across, down, and slanting to the back.
ALONG = {"tp": (84, 0), "pp": (0, 84), "dp": (52, -36)}
BOX, STEP, BETWEEN_NODES = 40, 46, 14


def draw_mesh(sizes: dict[str, int], gpus_per_node: int) -> Picture:
    """The ranks of a mesh with the axes dp, pp and tp, the last of `sizes` varying fastest.

    On the left the box, an edge in its axis' colour. On the right a line for each axis: ranks of
    one colour are one group; frames are nodes.
    """
    meshes = meshes_of(sizes)
    groups = {axis: groups_along(meshes, axis) for axis in sizes}
    slant = ALONG["dp"][1] * (sizes["dp"] - 1)
    height = 2 * PAD + 60 - slant + 84 * (sizes["pp"] - 1)
    height = max(height, 2 * PAD + 24 + 58 * len(sizes))
    canvas = Canvas(WIDTH, height)
    box_of_ranks(canvas, meshes, PAD + 24, PAD + 24 - slant)
    nodes = -(-len(meshes) // gpus_per_node)
    left = WIDTH - PAD - STEP * len(meshes) - BETWEEN_NODES * nodes
    column = [left + STEP * r + BETWEEN_NODES * (r // gpus_per_node) for r in range(len(meshes))]
    for node in range(nodes):
        x, width = column[gpus_per_node * node] - 6, STEP * gpus_per_node + 6
        canvas.rect(x, PAD + 14, width, height - 2 * PAD - 8, "none", FAINT, radius=8)
        canvas.text(x + width / 2, PAD + 2, f"node {node}", 12, fill=FAINT)
    for number, axis in enumerate(sizes):
        y = PAD + 34 + 58 * number
        canvas.rect(left - 66, y + BOX / 2 - 9, 18, 18, AXIS_COLOURS[axis])
        canvas.text(left - 40, y + BOX / 2, axis, anchor="start", bold=True)
        for chunk, ranks in enumerate(groups[axis]):
            for rank in ranks:
                canvas.box(column[rank], y, BOX, BOX, str(rank), colour(chunk))
    return canvas.picture(said(sizes, groups, gpus_per_node))


def meshes_of(sizes) -> list[Mesh]:
    """The mesh as each of its ranks sees it."""
    ranks = tuple(range(math.prod(sizes.values())))
    return [Mesh(Group(ranks, rank), **sizes) for rank in ranks]


def groups_along(meshes, axis) -> list[tuple[int, ...]]:
    """The different groups along an axis, in the order of their first ranks."""
    return sorted({mesh[axis].ranks for mesh in meshes})


def box_of_ranks(canvas, meshes, left, top):
    places = [at(mesh.coordinate, left, top) for mesh in meshes]
    for axis in meshes[0].axes:
        for mesh, (x, y) in zip(meshes, places, strict=True):
            if mesh.coordinate[axis]:
                onward = mesh.coordinate | {axis: mesh.coordinate[axis] - 1}
                canvas.line(*at(onward, left, top), x, y, AXIS_COLOURS[axis], 4)
    # Those at the back first, so that those in front cover them.
    for rank in sorted(range(len(meshes)), key=lambda rank: -meshes[rank].coordinate["dp"]):
        x, y = places[rank]
        canvas.circle(x, y, 15, "#ffffff", INK)
        canvas.text(x, y, str(rank), 12)


def at(coordinate, left, top):
    x = left + sum(ALONG[axis][0] * index for axis, index in coordinate.items())
    y = top + sum(ALONG[axis][1] * index for axis, index in coordinate.items())
    return x, y


def said(sizes, groups, gpus_per_node):
    lines = []
    for axis, found in groups.items():
        crosses = any(len({rank // gpus_per_node for rank in ranks}) > 1 for ranks in found)
        where = "between nodes" if crosses else "inside nodes"
        lists = ", ".join(" ".join(map(str, ranks)) for ranks in found)
        lines.append(f"{axis}, {where}: {lists}")
    named = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    return f"A mesh, {named}, with {gpus_per_node} ranks a node. Groups along {'; '.join(lines)}."
