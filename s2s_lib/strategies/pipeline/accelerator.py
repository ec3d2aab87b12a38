"""An accelerator, emulated: so that stages do not fight for this machine's processors.

A pipeline's ranks compute at the same time. Four of them on two cores would each be slowed by the
others, and no measured timeline could look like a schedule. On a `Cluster` with a `gpu`, an action
therefore does its true arithmetic and then sleeps until the time is over that the GPU would need
for it: the floating-point operations of its matrix products over the GPU's peak. Sleeping costs no
processor, so stages overlap as they would on machines of their own.

A GPU works through a queue that its host fills ahead. So an action counts from the end of the one
before, if what it needs had come by then, and else from the moment it came: the host's own time,
for messages and for Python, is hidden while it is shorter than the action. It is honest as long as
the arithmetic is done before the action's time is over; `overran` counts those for which it was
not.
"""

import contextlib
import time

from s2s_lib.ranks.connection import current
from s2s_lib.ranks.links import sleep_until
from s2s_lib.strategies.pipeline.flops import counted

# A wait for a message that is there already takes less, in seconds.
AT_ONCE = 0.0002


class Accelerator:
    """Paces the actions of one rank; without a cluster, or a gpu in it, they take what they take.

    `seconds[stage, kind]` is how long the GPU needs for one. It is counted on the first of the
    kind, and all others get as long: give it micro-batches of one size.
    """

    def __init__(self, cluster):
        self.rate = cluster.gpu.flops_per_second if cluster and cluster.gpu else None
        self.seconds = {}
        self.overran = 0
        self.free = 0.0

    def begin(self):
        """A batch begins: nothing is in the queue."""
        self.free = time.monotonic()

    @contextlib.contextmanager
    def wait(self):
        """Inside, wait for what the next action needs."""
        start = time.monotonic()
        yield
        end = time.monotonic()
        if end - start > AT_ONCE:
            self.free = max(self.free, end)

    @contextlib.contextmanager
    def pace(self, action):
        """Run an action inside; it is noted in every open log."""
        start = time.monotonic() if self.rate is None else self.free
        key = action.stage, action.kind
        if self.rate is None or key in self.seconds:
            yield
        else:
            with counted() as counter:
                yield
            self.seconds[key] = counter.get_total_flops() / self.rate
        end = time.monotonic()
        if self.rate is not None:
            over = start + self.seconds[key]
            self.overran += end > over
            sleep_until(over)
            self.free = end = max(over, end)
        for log in current().logs:
            log.action(str(action), start, end)
