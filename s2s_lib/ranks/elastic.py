"""The same program under torchrun: join the world that it set up instead of starting one."""

import datetime
import os

import torch.distributed as dist

from s2s_lib.ranks import connection, messages
from s2s_lib.ranks.launch import check_cluster


def run_in_world(fn, args, ranks, cluster, timeout, check, survive) -> list:
    """`launch` for a process started by torchrun: every process gets the values of all."""
    if survive:
        raise ValueError(
            "survive=True under torchrun: it ends all its processes when one fails; leave it out, "
            "and let torchrun start all again (--max-restarts)"
        )
    size = int(os.environ["WORLD_SIZE"])
    if ranks not in (None, size):
        raise ValueError(
            f"launch asks for {ranks} ranks, torchrun started {size}: "
            f"start it with {ranks} processes, or leave `ranks` out"
        )
    check_cluster(size, cluster)
    if not dist.is_initialized():
        # Meeting the others takes its time, however short a message may take.
        patience = datetime.timedelta(seconds=max(timeout, 30))
        dist.init_process_group("gloo", timeout=patience)
    world = connection.connect(dist.get_rank(), size, timeout=timeout, cluster=cluster, check=check)
    value = fn(world, *args)
    messages.finish()
    values = [None] * size
    dist.all_gather_object(values, value)
    return values
