"""What to tell when ranks fail: the first cause, in words, and a table of who waited for what."""

import signal
import time
import traceback


class RankError(RuntimeError):
    """A rank failed, and with it the launch.

    `rank` is the rank whose failure came first, or None if no single one is to blame; `summary`
    is one line without paths or times; `str(error)` adds that rank's traceback, or the table of
    waits, whose rows are also in `waits` as (rank, what it waits for, group).
    """

    def __init__(self, rank, summary, details="", waits=()):
        super().__init__(summary + ("\n\n" + details if details else ""))
        self.rank = rank
        self.summary = summary
        self.details = details
        self.waits = list(waits)

    def __reduce__(self):
        return RankError, (self.rank, self.summary, self.details, self.waits)


def failure_of(job) -> RankError:
    """The RankError for a job in which something failed: deaths explain errors, errors explain
    lost connections, and a timeout is explained by what each rank was doing."""
    if job.server_gone:
        summary = "the fork server ended, and the ranks with it; launch again"
        return RankError(None, summary, job.server.last_words())
    unanswered = [rank for rank in job.deaths if rank not in job.answers]
    if unanswered:
        return death(job, unanswered[0])
    by_kind = {}
    for rank, failure in job.failures.items():
        by_kind.setdefault(failure["kind"], []).append(rank)
    if "error" in by_kind:
        return raised(job, by_kind["error"])
    if "timeout" in by_kind:
        return waited(job, by_kind["timeout"][0])
    if job.deaths:
        return death(job, next(iter(job.deaths)))
    return raised(job, by_kind["lost"])


def failure_at(job, rank) -> RankError:
    """What became of one rank, whatever became of the others."""
    return death(job, rank) if rank in job.deaths else raised(job, [rank])


def death(job, rank):
    status = job.deaths[rank]
    when = "after" if rank in job.answers else "before"
    if status < 0:
        how = f"was killed by {signal_name(-status)}"
        if -status == signal.SIGKILL:
            how += " (by someone, or by the system for want of memory)"
    else:
        how = f"exited with status {status} {when} its function returned"
    text = job.streams[rank][1].tail.strip()
    words = f"the end of its stderr:\n{text}" if text else ""
    return RankError(rank, f"rank {rank} of {job.size} {how}", words)


def signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def raised(job, ranks):
    """The error of the first of `ranks`; of the lowest where several raised the same."""
    same = sorted(r for r in ranks if headline(job, r) == headline(job, ranks[0]))
    summary = f"rank {same[0]} of {job.size} raised {headline(job, same[0])}"
    if same[1:]:
        summary += f" (and so did {names(same[1:])})"
    return RankError(same[0], summary, "\n".join(map(render, job.failures[same[0]]["chain"])))


def names(ranks) -> str:
    """`rank 3`, or `ranks 0, 2`."""
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"


def headline(job, rank):
    """Type and first line of what a rank raised; a SyntaxError shows its source lines before."""
    lines = job.failures[rank]["chain"][0][2].splitlines()
    line = next((line for line in lines if line[:1].strip()), lines[0]).rstrip(":")
    return line if len(line) <= 500 else line[:500] + " ..."


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
    waits = [(rank, *wait) for rank in range(job.size) for wait in doing(job, rank)]
    rows = [("rank", "waits for", "group", "since")]
    for rank, what, group, since in waits:
        rows.append((str(rank), what, group, f"{now - since:.1f} s" if since else ""))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    summary = f"ranks waited for each other longer than {job.timeout:g} s"
    trace = render(job.failures[first]["chain"][0])
    hint = "With check=True, ranks that call different things are told at once, before they wait."
    hint = "" if job.check else f"{hint}\n\n"
    details = f"{table}\n\n{hint}Rank {first} gave up first.\n{trace}"
    return RankError(None, summary, details, [wait[:3] for wait in waits])


def doing(job, rank):
    failure = job.failures.get(rank)
    if failure and failure["wait"]:
        return [failure["wait"]]
    if rank in job.answers:
        return [("nothing: its function has returned", "", None)]
    if rank not in job.wheres:
        return [("no answer: it is stopped, or in a long computation", "", None)]
    return [
        (f"nothing: it {what} {group}".rstrip(), "", None)
        if since is None
        else (what, group, since)
        for what, group, since in job.wheres[rank]
    ]
