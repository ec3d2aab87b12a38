"""What to tell when ranks fail: the first cause, in words, and a table of who waited for what."""

import signal
import time
import traceback


class RankError(RuntimeError):
    """A rank failed, and with it the launch.

    `rank` is the rank whose failure came first, or None if no single one is to blame; `summary`
    is one line without paths or times; `str(error)` adds that rank's traceback, or the table of
    waits.
    """

    def __init__(self, rank, summary, details=""):
        super().__init__(summary + ("\n\n" + details if details else ""))
        self.rank = rank
        self.summary = summary
        self.details = details

    def __reduce__(self):
        return RankError, (self.rank, self.summary, self.details)


def failure_of(job) -> RankError:
    """The RankError for a job in which something failed: deaths explain errors, errors explain
    lost connections, and a timeout is explained by what each rank was doing."""
    dead = [rank for rank, status in job.deaths.items() if rank not in job.answers]
    if dead:
        return death(job, dead[0])
    by_kind = {}
    for rank, failure in job.failures.items():
        by_kind.setdefault(failure["kind"], []).append(rank)
    if "error" in by_kind:
        return raised(job, by_kind["error"][0])
    if "timeout" in by_kind:
        return waited(job, by_kind["timeout"][0])
    return raised(job, by_kind["lost"][0])


def death(job, rank):
    status = job.deaths[rank]
    if status is None:
        return RankError(None, "the fork server ended, and the ranks with it; launch again")
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
        if -status == signal.SIGKILL:
            how += " (by someone, or by the system for want of memory)"
    else:
        how = f"exited with status {status} before its function returned"
    return RankError(rank, f"rank {rank} of {job.size} {how}", last_words(job, rank))


def last_words(job, rank):
    text = job.streams[rank][1].text.strip()
    return f"the end of its stderr:\n{text[-2000:]}" if text else ""


def raised(job, rank):
    chain = job.failures[rank]["chain"]
    summary = f"rank {rank} of {job.size} raised {chain[0][2]}"
    others = sorted(r for r in job.failures if r != rank)
    if others:
        summary += f" (and so did rank{'s'[: len(others) > 1]} {', '.join(map(str, others))})"
    return RankError(rank, summary, "\n".join(map(render, chain)))


def render(link):
    """One exception of a chain. The source lines are read here, where notebook cells are known."""
    relation, frames, text = link
    lines = traceback.format_list(
        [traceback.FrameSummary(file, line, name) for file, line, name in frames]
    )
    head = [f"{relation}\n"] if relation else []
    return "".join([*head, "Traceback of the rank (most recent call last):\n", *lines, text])


def waited(job, first):
    now = time.monotonic()
    rows = [("rank", "waits for", "group", "since")]
    for rank in range(job.size):
        for what, group, since in doing(job, rank):
            rows.append((str(rank), what, group, f"{now - since:.1f} s" if since else ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    summary = f"ranks waited for each other longer than {job.timeout:g} s"
    trace = render(job.failures[first]["chain"][0])
    return RankError(None, summary, f"{table}\n\nRank {first} gave up first.\n{trace}")


def doing(job, rank):
    failure = job.failures.get(rank)
    if failure and failure["wait"]:
        return [failure["wait"]]
    if rank in job.answers:
        return [("nothing: its function has returned", "", None)]
    if rank not in job.wheres:
        return [("no answer: it is stopped, or in a long computation", "", None)]
    return [
        (f"nothing: it is {what} {group}".rstrip(), "", None)
        if since is None
        else (what, group, since)
        for what, group, since in job.wheres[rank]
    ]
