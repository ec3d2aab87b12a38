"""Pictures of tensor parallelism: plain data in, a `Picture` out.

draw_products  one matrix product on paper, cut by columns and by rows
draw_block     which state tensors are in along a block, and what is sent between
draw_fused     a fused weight cut by block and straight through, and what ranks then take it for
"""

from s2s_lib.course.charts import WIDTH
from s2s_lib.draw import FAINT, GREY, PAD, PALETTE, Canvas, Picture, colour

CELL = 30
# The states of a tensor along a block.
WHOLE, FEATURES, TOKENS = GREY, PALETTE[0], PALETTE[3]


def draw_products(x, w, ranks: int = 2) -> Picture:
    """x @ w of lists of whole numbers, w cut by columns above and by rows below.

    A number has the colour of the rank that holds it, grey if all do. Columns of w, and rows,
    must be a multiple of `ranks`.
    """
    y, parts = product(x, w), range(ranks)
    columns = [
        (x, lambda row, column: GREY, "x_BD"),
        (w, by_rank(len(w[0]), ranks, 1), "w_DFw"),
        (y, by_rank(len(w[0]), ranks, 1), "y_BFw"),
    ]
    terms = [product(*inner_part(x, w, part, ranks)) for part in parts]
    rows = [
        (x, by_rank(len(w), ranks, 1), "x_BDw"),
        (w, by_rank(len(w), ranks, 0), "w_DwF"),
        *((terms[part], one_rank(part), "y_BF_partial") for part in parts),
        (y, lambda row, column: GREY, "y_BF"),
    ]
    height = CELL * max(len(x), len(w)) + 84
    canvas = Canvas(WIDTH, 2 * height + 44)
    equation(canvas, PAD, "by columns", columns, "@=")
    equation(canvas, PAD + height, "by rows", rows, "@=" + "+" * (ranks - 1) + "=")
    entries = [("on every rank", GREY), *((f"rank {part}", colour(part)) for part in parts)]
    canvas.legend(PAD, 2 * height + 22, entries)
    said = [f"rank {part} has the term {terms[part]}" for part in parts]
    return canvas.picture(
        f"{x} times {w} on {ranks} ranks. By columns: each rank has some columns of {y}. "
        f"By rows: {', '.join(said)}, and the sum is {y}."
    )


def equation(canvas, top, title, matrices, signs):
    """Matrices in a line with signs between, the name of each below it."""
    canvas.text(PAD, top + 4, title, anchor="start", bold=True)
    middle = top + 26 + CELL * max(len(matrix) for matrix, _, _ in matrices) / 2
    left = PAD
    for (matrix, fill, name), sign in zip(matrices, [*signs, ""], strict=True):
        width, height = CELL * len(matrix[0]), CELL * len(matrix)
        for row, numbers in enumerate(matrix):
            for column, number in enumerate(numbers):
                x, y = left + CELL * column, middle - height / 2 + CELL * row
                canvas.rect(x + 1, y + 1, CELL - 2, CELL - 2, fill(row, column), radius=3)
                canvas.text(x + CELL / 2, y + CELL / 2, str(number))
        canvas.text(left + width / 2, middle + height / 2 + 14, name, 12, fill=FAINT)
        left += width
        canvas.text(left + 16, middle, sign, 15)
        left += 32


def product(x, w):
    columns = list(zip(*w, strict=True))
    return [[sum(a * b for a, b in zip(row, c, strict=True)) for c in columns] for row in x]


def inner_part(x, w, part, ranks):
    """The columns of x and the rows of w that one rank multiplies."""
    size = len(w) // ranks
    start, end = part * size, (part + 1) * size
    return [row[start:end] for row in x], w[start:end]


def by_rank(size, ranks, dim):
    """The colour of an element whose dim of this size is cut over the ranks."""
    return lambda *place: colour(place[dim] * ranks // size)


def one_rank(rank):
    return lambda row, column: colour(rank)


# What a block does, in order: the step, whether it is inside (features cut), and its width.
STEPS = [
    ("norm", False, 52),
    ("q k v", True, 58),
    ("heads", True, 58),
    ("o", True, 44),
    ("+", False, 34),
    ("norm", False, 52),
    ("gate up", True, 66),
    ("silu ×", True, 58),
    ("down", True, 52),
    ("+", False, 34),
]
# Where the state changes: into the inside and out of it, forward and backward.
SENT = {
    False: {"in": ("", "all_reduce"), "out": ("all_reduce", "")},
    True: {"in": ("all_gather", "reduce_scatter"), "out": ("reduce_scatter", "all_gather")},
}
GAP = 24


def draw_block() -> Picture:
    """A block of the GPT, left to right, in colours of what is cut: without sequence parallel, and
    with it. Above each line what is sent forward, below what is sent backward."""
    canvas = Canvas(WIDTH, 2 * 132 + 40)
    for number, sequence in enumerate((False, True)):
        title = "with sequence parallel" if sequence else "tensor parallel"
        canvas.text(PAD, PAD + 132 * number, title, anchor="start", bold=True)
        line_of_steps(canvas, PAD + 132 * number + 42, sequence)
    legend = [("whole", WHOLE), ("features cut", FEATURES), ("tokens cut", TOKENS)]
    canvas.legend(PAD + 70, 2 * 132 + 18, legend)
    return canvas.picture(
        "A block. Tensor parallel: norms whole; all_reduce after o and after down forward, before "
        "q k v and before gate up backward. With sequence parallel: norms on a part of the tokens; "
        "all_gather before q k v and gate up and reduce_scatter after o and down forward, the same "
        "places the other way round backward."
    )


def line_of_steps(canvas, top, sequence):
    canvas.text(PAD, top - 8, "forward →", 11, "start", FAINT)
    canvas.text(PAD, top + 46, "← backward", 11, "start", FAINT)
    left, was = PAD + 70, False
    for name, inside, width in STEPS:
        if inside != was:
            forward, backward = SENT[sequence]["in" if inside else "out"]
            canvas.line(left + GAP / 2 - 2, top - 2, left + GAP / 2 - 2, top + 40, FAINT, 2)
            canvas.text(left + GAP / 2 - 2, top - 12, forward, 11)
            canvas.text(left + GAP / 2 - 2, top + 50, backward, 11)
            left += GAP
        fill = FEATURES if inside else TOKENS if sequence else WHOLE
        canvas.rect(left, top, width, 38, fill)
        canvas.text(left + width / 2, top + 19, name, 12)
        left, was = left + width + 4, inside


def draw_fused(heads: int = 4, ranks: int = 2) -> Picture:
    """A weight that fuses q, k and v, a box for each head, cut over ranks in two ways; below each,
    what every rank takes for its q, k and v."""
    names = [f"{kind}{head}" for kind in "qkv" for head in range(heads)]
    by_block = [head * ranks // heads for _ in "qkv" for head in range(heads)]
    straight = [place * ranks // len(names) for place in range(len(names))]
    canvas = Canvas(WIDTH, PAD + 2 * 150)
    said = []
    for number, (title, owner) in enumerate(
        (("each block by itself", by_block), ("straight through", straight))
    ):
        top = PAD + 150 * number
        canvas.text(PAD, top + 2, title, anchor="start", bold=True)
        row_of_heads(canvas, PAD, top + 18, names, [colour(rank) for rank in owner])
        for rank in range(ranks):
            held = [name for name, at in zip(names, owner, strict=True) if at == rank]
            left = PAD + rank * (WIDTH - 2 * PAD) / ranks
            taken = taken_for(canvas, left, top + 70, rank, held)
            said.append(f"{title}, rank {rank} takes {taken}")
    return canvas.picture(f"Fused q, k, v on {ranks} ranks. {'; '.join(said)}.")


def row_of_heads(canvas, left, top, names, fills):
    for place, (name, fill) in enumerate(zip(names, fills, strict=True)):
        canvas.box(left + 38 * place, top, 36, 28, name, fill, 12)


def taken_for(canvas, left, top, rank, held):
    """A rank's heads in three equal parts, as q, k and v; says the same in words."""
    canvas.text(left, top + 30, f"rank {rank}", 12, "start", FAINT)
    third, said = len(held) // 3, []
    for part, kind in enumerate("qkv"):
        mine = held[part * third : (part + 1) * third]
        x = left + 50 + part * (38 * third + 12)
        canvas.text(x + 19 * third, top + 4, f"as {kind}", 11, fill=FAINT)
        row_of_heads(canvas, x, top + 16, mine, [colour(rank)] * third)
        said.append(f"{' '.join(mine)} as {kind}")
    return ", ".join(said)
