"""All-reduce by levels: within each node, then between nodes, then within each node again.

With k ranks on each of m nodes and N bytes: a reduce_scatter inside the node leaves each rank
with N/k, which it all-reduces with its counterparts on the other nodes; an all_gather inside the
node completes it. Between nodes each rank sends 2(m-1)/m of N/k, a k-th of what a flat ring puts
on those links.
"""

from s2s_lib.collectives import direct
from s2s_lib.collectives.pieces import even_cuts, piece
from s2s_lib.collectives.reduction import reduction_of
from s2s_lib.ranks.connection import current
from s2s_lib.ranks.wire import Operation


def levels(group):
    """This rank's group inside its node, and the group of its counterparts between nodes.

    ValueError without a cluster, or where the nodes hold different numbers of the group's ranks.
    """
    cluster = current().cluster
    if cluster is None:
        raise ValueError("a hierarchical all_reduce needs launch(..., cluster=...) to know nodes")
    nodes = direct.places_by_node(group, cluster)
    if len({len(places) for places in nodes}) > 1:
        held = {cluster.node(group.ranks[places[0]]): len(places) for places in nodes}
        raise ValueError(f"a hierarchical all_reduce needs equal nodes, got ranks per node {held}")
    mine = next(places for places in nodes if group.rank in places)
    index = mine.index(group.rank)
    return group.subgroup(mine), group.subgroup([places[index] for places in nodes])


def all_reduce(operation, x, out, reduction):
    inside, between = levels(operation.group)
    cuts = even_cuts(x.numel(), inside.size)
    mine = piece(out, cuts, inside.rank)

    def level(name, group):
        return Operation(name, group, x.shape, x.dtype, operation.detail)

    # The average is taken once, over all ranks, when both sums are done.
    part = reduction_of("sum" if reduction.op == "avg" else reduction.op, x.dtype, 1)
    with level("reduce_scatter", inside) as inner:
        direct.reduce_scatter(inner, x, mine, cuts, part)
    with level("all_reduce", between) as inner:
        direct.all_reduce(inner, mine, mine, part)
    reduction.finish(mine)
    with level("all_gather", inside) as inner:
        direct.all_gather(inner, mine, out, cuts)
