"""The report at the end of a run: one page of HTML with its pictures inside.

The loss by step; where each rank's time went in the last step; what was sent along which axis of
the mesh and over which kind of link, and what the fullest rank holds.
"""

import html
import io
from pathlib import Path

from s2s_lib.course.charts import draw_bars, draw_timeline
from s2s_lib.draw import Picture
from s2s_lib.meters.timeline import KINDS, Timelines
from s2s_lib.strategies.diloco.diloco import BETWEEN_ISLANDS
from s2s_lib.strategies.tensor.region import LANE
from s2s_lib.strategies.zero import GATHERING, REDUCING
from s2s_lib.training.checkpoint import SAVING

LINKS = {"intra": "inside nodes", "inter": "between nodes"}
AXES = {
    "dp": "dp, replicas",
    "replicate": "between replicas",
    "shard": "between shards",
    "pp": "pp, stages",
    "tp": "tp, parts of layers",
    "island": "between islands",
    "other": "other",
}
# What the background threads do; DDP averages on the one on which ZeRO does.
THREADS = {
    REDUCING: "averages",
    GATHERING: "weights",
    LANE: "tensor sums",
    SAVING: "saving",
    BETWEEN_ISLANDS: "islands",
}
# Of the whole picture, what can be seen.
SHORTEST = 1 / 250
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; max-width: 48rem; margin: 2rem auto; padding: 0 1rem;
  color: #20242c; background: #ffffff; line-height: 1.5 }}
img {{ max-width: 100%; height: auto }}
table {{ border-collapse: collapse }}
td, th {{ padding: 0.2rem 0.8rem; text-align: right; border-bottom: 1px solid #d3d8e0 }}
td:first-child, th:first-child {{ text-align: left }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def write_report(config, runs: list, log: list[dict]) -> Path:
    """`runs` are what the ranks returned, `log` has every step since the run's beginning; the path
    of the page written, `report.html` in the run's folder."""
    folder = Path(runs[0].folder)
    lines = Timelines(run.timeline for run in runs if run.timeline is not None)
    last = log[-1]
    parts = [
        f"<p>{html.escape(summary(config, runs[0], last))}</p>",
        "<h2>Loss</h2>",
        loss_picture(log)._repr_html_(),
    ]
    if lines:
        parts += [
            "<h2>Where the time of the last step went</h2>",
            draw_timeline(rows_of(lines))._repr_html_(),
            table(["", *(f"{kind}, ms" for kind in KINDS)], spent(lines)),
            "<p>Of the main thread of each rank. What other threads did beside it has rows of its "
            "own in the picture, where it took long enough to be seen.</p>",
        ]
    sent = bars_of(last)
    parts += [
        "<h2>Sent a step by all ranks together, on average since the line of the log before</h2>",
        *([draw_bars([bar], "sent")._repr_html_() for bar in sent] or ["<p>Nothing.</p>"]),
        "<h2>Held after it: of each kind, by the rank that holds most</h2>",
        draw_bars([("held", last["held"])])._repr_html_(),
    ]
    page = folder / "report.html"
    page.write_text(PAGE.format(title=html.escape(folder.name), body="\n".join(parts)), "utf-8")
    return page


def summary(config, run, last) -> str:
    """One line of what was trained, and how it ended."""
    sizes = {
        "data": config.data_parallel_size,
        "pipeline": config.pipeline_parallel_size,
        "tensor": config.tensor_parallel_size,
    }
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"
    if config.diloco:
        layout = f"{config.islands} islands (H = {config.diloco.sync_every}) of {layout}"
    held_out = "" if run.evaluation is None else f", {run.evaluation:.4f} on held-out text"
    loss = f"loss {last['loss']:.4f}"
    return f"{layout}, ZeRO {config.zero_stage}: step {last['step']}, {loss}{held_out}"


def rows_of(lines) -> list[tuple]:
    """A row for each rank's main thread, and for each of its others on which something shows."""
    start = min(line.start for line in lines)
    shortest = SHORTEST * (max(line.end for line in lines) - start)
    rows = []
    for line in lines:
        for track in line.tracks():
            spans = line.spans(track)
            if track and max((span.seconds for span in spans), default=0) < shortest:
                continue
            label = f"rank {line.rank}" + (f" {THREADS[track - 1]}" if track else "")
            in_ms = [(1e3 * (s.start - start), 1e3 * (s.end - start), *s[2:4]) for s in spans]
            rows.append((label, in_ms))
    return rows


def bars_of(entry) -> list[tuple[str, dict]]:
    """What was sent, along each axis, and on a cluster over each class of link."""
    along = {AXES[axis]: size for axis, size in entry["sent_along"].items()}
    over = {LINKS[link]: size for link, size in entry["sent"].items() if link in LINKS}
    return [bar for bar in (("by axis", along), ("by link", over)) if bar[1]]


def spent(lines) -> list[list[str]]:
    """A row for each rank: milliseconds of each kind."""
    return [
        [f"rank {line.rank}", *(f"{1e3 * line.seconds(kind):.1f}" for kind in KINDS)]
        for line in lines
    ]


def table(head, rows) -> str:
    cells = [f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>"]
    cells += [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>{''.join(cells)}</table>"


def loss_picture(log) -> Picture:
    """The loss by step."""
    # Heavy, and only the end of a run needs it.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.6, 3.2), layout="tight")
    axes = figure.subplots()
    axes.plot([entry["step"] for entry in log], [entry["loss"] for entry in log], marker=".")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    ends = f"from {log[0]['loss']:.4f} in step {log[0]['step']} to {log[-1]['loss']:.4f}"
    return Picture(written.getvalue(), f"The loss, {ends} in step {log[-1]['step']}.")
