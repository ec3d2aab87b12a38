"""An accelerator, emulated: so that stages do not fight for this machine's processors.

A pipeline's ranks compute at the same time. Four of them on two cores would each be slowed by the
others, and no measured timeline could look like a schedule. On a `Cluster` with a `gpu`, an action
therefore does its true arithmetic and then sleeps until the time is over that the GPU would need
for it: the floating-point operations of its matrix products over the GPU's peak. Sleeping costs no
processor, so stages overlap as they would on machines of their own. It is honest as long as the
arithmetic is done before the sleep would end; `overran` counts the actions for which it was not.
"""

import contextlib
import time

from s2s_lib.ranks.connection import current
from s2s_lib.ranks.links import sleep_until
from s2s_lib.strategies.pipeline.flops import counted


class Accelerator:
    """Paces the actions of one rank; without a cluster, or a gpu in it, they take what they take.

    `seconds[stage, kind]` is how long the GPU needs for one. It is counted on the first of the
    kind, and all others get as long: give it micro-batches of one size.
    """

    def __init__(self, cluster):
        self.rate = cluster.gpu.flops_per_second if cluster and cluster.gpu else None
        self.seconds = {}
        self.overran = 0

    @contextlib.contextmanager
    def pace(self, action):
        """Run an action inside; it is noted in every open log."""
        start = time.monotonic()
        key = action.stage, action.kind
        if self.rate is None or key in self.seconds:
            yield
        else:
            with counted() as counter:
                yield
            self.seconds[key] = counter.get_total_flops() / self.rate
        if self.rate is not None:
            end = start + self.seconds[key]
            self.overran += time.monotonic() > end
            sleep_until(end)
        for log in current().logs:
            log.action(str(action), start, time.monotonic())
