"""The timeline: when each rank computed, communicated and waited.

Each rank records its own; all ranks of one machine share a clock, so timelines laid side by side
(`Timelines`) tell who waited for whom. "Communication" is time inside a collective, send or
receive, less the "waiting" in it: the thread was blocked, and the message had not been sent yet
(on an emulated link), or had not come (without one, where sending takes no time to speak of).
Waiting for a `background` task is waiting too. What is left on the main thread is "compute".
"""

import contextlib
import json
import time
from typing import NamedTuple

from s2s_lib.ranks import connection

KINDS = ("compute", "communication", "waiting")


class Span(NamedTuple):
    """`kind` from `start` to `end` (seconds), on thread `track` (0 is the main thread)."""

    start: float
    end: float
    kind: str
    name: str
    track: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline(connection.Log):
    """What one rank did while `timeline()` was open."""

    def __init__(self, rank):
        self.rank = rank
        self.start = self.end = time.monotonic()
        self.operations, self.waits, self.sections, self.marks = [], [], [], []

    def operation(self, name, group, channel, start, end):
        self.operations.append(Span(start, end, "communication", name, channel))

    def wait(self, name, channel, start, end):
        self.waits.append(Span(start, end, "waiting", name, channel))

    def action(self, name, start, end):
        self.sections.append(Span(start, end, "compute", name, 0))

    def mark(self, name, when):
        self.marks.append((name, when))

    @contextlib.contextmanager
    def section(self, name: str):
        """Give what is computed inside the `with` a name."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.action(name, start, time.monotonic())

    def spans(self, track: int = 0) -> list[Span]:
        """What a thread did, in order, without overlap. Compute is listed for the main thread."""
        waits = sorted(span for span in self.waits if span.track == track)
        blocks = []
        for block in sorted(span for span in self.operations if span.track == track):
            inside = [w for w in waits if block.start <= w.start and w.end <= block.end]
            blocks += [*inside, *_gaps(block, inside)]
        alone = [w for w in waits if not any(b.start <= w.start and w.end <= b.end for b in blocks)]
        blocks = sorted(blocks + alone)
        if track != 0:
            return blocks
        whole = Span(self.start, self.end, "compute", "compute", 0)
        return sorted([*blocks, *self._named(_gaps(whole, blocks))])

    def _named(self, gaps):
        """Compute spans, cut where a named section begins or ends, by the innermost's name."""
        edges = sorted({edge for s in self.sections for edge in (s.start, s.end)})
        for gap in gaps:
            cuts = [gap.start, *(e for e in edges if gap.start < e < gap.end), gap.end]
            for start, end in zip(cuts, cuts[1:], strict=False):
                # The inner of two ends first.
                names = [s.name for s in self.sections if s.start <= start and end <= s.end]
                yield gap._replace(start=start, end=end, name=names[0] if names else gap.name)

    def tracks(self) -> list[int]:
        return sorted({0, *(span.track for span in self.operations)})

    def seconds(self, kind: str, track: int = 0) -> float:
        """How long a thread spent in "compute", "communication" or "waiting"."""
        if kind not in KINDS:
            raise ValueError(f"a timeline has {', '.join(KINDS)}; got {kind!r}")
        return sum(span.seconds for span in self.spans(track) if span.kind == kind)


class Timelines(list):
    """The timelines of several ranks, side by side on one clock."""

    def rows(self) -> list[tuple[str, list[tuple[float, float, str, str]]]]:
        """A row for each thread of each rank: its label and its (start, end, kind, name), in
        seconds since the first rank began. `draw_timeline` draws them."""
        origin = min(line.start for line in self)
        return [
            (
                f"rank {line.rank}" + (f" background {track - 1}" if track else ""),
                [(s.start - origin, s.end - origin, s.kind, s.name) for s in line.spans(track)],
            )
            for line in self
            for track in line.tracks()
        ]

    def save(self, path):
        """Write a Chrome trace, which Perfetto and chrome://tracing open."""
        origin = min(line.start for line in self)
        events = []
        for line in self:
            pid = {"pid": line.rank}
            events.append(
                {**pid, "ph": "M", "name": "process_name", "args": {"name": f"rank {line.rank}"}}
            )
            for track in line.tracks():
                name = f"background {track - 1}" if track else "main"
                events.append(
                    {**pid, "tid": track, "ph": "M", "name": "thread_name", "args": {"name": name}}
                )
                for span in line.spans(track):
                    times = {"ts": 1e6 * (span.start - origin), "dur": 1e6 * span.seconds}
                    what = {"ph": "X", "name": span.name, "cat": span.kind}
                    events.append({**pid, "tid": track, **what, **times})
            for name, when in line.marks:
                events.append(
                    {
                        **pid,
                        "tid": 0,
                        "ph": "i",
                        "s": "t",
                        "name": name,
                        "ts": 1e6 * (when - origin),
                    }
                )
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _gaps(whole: Span, inside: list[Span]) -> list[Span]:
    """The parts of a span that the (sorted, disjoint) spans inside it leave free."""
    edges = [whole.start]
    for span in inside:
        edges += [max(span.start, edges[-1]), max(span.end, edges[-1])]
    edges.append(max(whole.end, edges[-1]))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [whole._replace(start=start, end=end) for start, end in pairs if end > start]


@contextlib.contextmanager
def timeline():
    """Record what this rank does inside the `with`; yields a `Timeline`, which can be returned."""
    log = Timeline(connection.current().rank)
    try:
        with connection.heard_by(log):
            yield log
    finally:
        log.end = time.monotonic()
