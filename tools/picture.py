"""Measure and draw the picture of the README: one DDP step on a slow link, apart and overlapped."""

from pathlib import Path

import torch
from torch import nn

from s2s_lib import DDP, Cluster, Link, Timelines, barrier, launch, timeline
from s2s_lib.course.charts import draw_timeline

HERE = Path(__file__).resolve().parent.parent


def step(world, overlap):
    """The second of two steps: in the first, DDP still learns when gradients arrive."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8)]
    model = DDP(nn.Sequential(*layers), world, bucket_mb=4, overlap=overlap)
    x = torch.randn(512, 512)
    model(x).sum().backward()
    barrier(world)
    with timeline() as line:
        with line.section("forward"):
            loss = model(x).sum()
        with line.section("backward"):
            loss.backward()
    return line


def main():
    cluster = Cluster(nodes=2, gpus_per_node=1, inter=Link(gbit_s=0.5, latency_us=50))
    rows = []
    for name, overlap in (("after backward", False), ("beside it", True)):
        lines = Timelines(launch(step, overlap, ranks=2, cluster=cluster))
        labelled = [(label.replace("background 0", "2nd thread"), s) for label, s in lines.rows()]
        rows += [(f"{name}, {label}", spans) for label, spans in labelled]
    longest = max(end for _, spans in rows for _, end, _, _ in spans)
    rows = [
        (
            label,
            [(a * 1e3, b * 1e3, kind, text) for a, b, kind, text in spans if b - a > longest / 300],
        )
        for label, spans in rows
    ]
    draw_timeline(rows).save(HERE / "pictures" / "overlap.svg")


if __name__ == "__main__":
    main()
