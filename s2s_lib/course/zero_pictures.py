"""Pictures of ZeRO: which part of weights, gradients and optimizer state each rank holds."""

from s2s_lib.course.charts import KIND_COLOURS, WIDTH
from s2s_lib.course.show import row_zero
from s2s_lib.draw import EDGE, FAINT, PAD, Canvas, Picture

# From which stage on a kind is cut, and its bytes for each parameter (float32, AdamW).
KINDS = {"weights": (3, 4), "gradients": (2, 4), "optimizer": (1, 8)}


def draw_stages(ranks: int = 4, stages=(0, 1, 2, 3)) -> Picture:
    """A column for each stage, a row for each rank; lengths are bytes, what is not held is empty.

    Below each column: the bytes that a rank holds for each parameter.
    """
    left, gap, row = PAD + 54, 16, 34
    width = (WIDTH - left - PAD + gap) / len(stages) - gap
    top = PAD + 26
    canvas = Canvas(WIDTH, top + row * ranks + 62)
    for rank in range(ranks):
        canvas.text(PAD, top + row * rank + 12, f"rank {rank}", 12, "start", FAINT)
    for column, stage in enumerate(stages):
        x = left + column * (width + gap)
        canvas.text(x + width / 2, PAD + 4, f"stage {stage}", bold=True)
        for rank in range(ranks):
            _held(canvas, x, top + row * rank, width, (rank, ranks), stage)
        held = f"{row_zero(1, ranks, stage).held:g} bytes a parameter"
        canvas.text(x + width / 2, top + row * ranks + 8, held, 11)
    legend = [(kind, KIND_COLOURS[kind]) for kind in KINDS]
    canvas.legend(left, top + row * ranks + 38, legend)
    said = [f"stage {stage}: {_cut(stage)}" for stage in stages]
    return canvas.picture(f"What each of {ranks} ranks holds. " + "; ".join(said) + ".")


def _held(canvas, x, y, width, place, stage):
    """One rank's bar: for each kind an empty frame, and in it the part that this rank holds."""
    rank, ranks = place
    scale = width / sum(size for _, size in KINDS.values())
    for kind, (first, size) in KINDS.items():
        whole = scale * size - 3
        part = whole / ranks if stage >= first else whole
        offset = part * rank if stage >= first else 0
        canvas.rect(x, y, whole, 24, "#ffffff", EDGE, radius=2, dashed=True)
        canvas.rect(x + offset, y, part, 24, KIND_COLOURS[kind], radius=2)
        x += whole + 3


def _cut(stage):
    cut = [kind for kind, (first, _) in KINDS.items() if stage >= first]
    return f"{' and '.join(cut)} cut" if cut else "everything on every rank"
