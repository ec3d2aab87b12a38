"""The bill: how many bytes and messages this rank sent, for which collective, over which link."""

import contextlib
from collections import Counter

from s2s_lib.ranks import connection


class Bill(connection.Log):
    """What one rank sent while `bill()` was open.

    `bytes` and `messages` are totals; `by("collective")`, `by("group")` and `by("link")` split
    the bytes. Links are "intra" and "inter" on a cluster and "wire" without one. The headers of
    emulated links are not the program's own bytes and are left out.
    """

    KEYS = ("collective", "group", "link")

    def __init__(self, rank, cluster):
        self.rank = rank
        self._cluster = cluster
        # One entry for each message; appending is safe from several threads, adding up is not.
        self._entries = []

    def message(self, name, group, peer, nbytes, when):
        link = self._cluster.link_class(self.rank, peer) if self._cluster else "wire"
        self._entries.append((name, group.ranks, link, nbytes))

    @property
    def bytes(self) -> int:
        return sum(entry[-1] for entry in self._entries)

    @property
    def messages(self) -> int:
        return len(self._entries)

    def by(self, key: str) -> dict:
        """Bytes by "collective" (its name), "group" (a tuple of world ranks) or "link"."""
        if key not in self.KEYS:
            raise ValueError(f"a bill is split by {', '.join(self.KEYS)}; got {key!r}")
        column, total = self.KEYS.index(key), Counter()
        for entry in self._entries:
            total[entry[column]] += entry[-1]
        return dict(sorted(total.items()))

    def __repr__(self):
        lines, counts = Counter(), Counter()
        for *line, nbytes in self._entries:
            lines[tuple(line)] += nbytes
            counts[tuple(line)] += 1
        rows = [f"rank {self.rank} sent {self.bytes:,} bytes in {self.messages} messages"]
        for (name, ranks, link), nbytes in sorted(lines.items()):
            count = counts[name, ranks, link]
            rows.append(
                f"  {name:<15}{nbytes:>14,} bytes {count:>5} messages  {link}  {list(ranks)}"
            )
        return "\n".join(rows)


@contextlib.contextmanager
def bill():
    """Count what this rank sends inside the `with`; yields a `Bill`, which can be returned."""
    here = connection.current()
    with connection.heard_by(Bill(here.rank, here.cluster)) as log:
        yield log
