"""Draws the axes besides sharding, one picture each: those of docs/learn/axes.md.

python docs/figures/axes.py tensor docs/figures/tensor.svg

The first argument is the name of an axis: tensor, sequence, pipeline, context or experts.
"""

import sys
from pathlib import Path

from drawing import DARK, EMPTY, GREY, RANKS, Drawing

ONE, OTHER, BOTH = RANKS[0], RANKS[1], "#dddddd"
KEY = [(ONE, "rank 0"), (OTHER, "rank 1"), (BOTH, "on both ranks, the same values")]


def tensor() -> Drawing:
    """An MLP whose first weight is cut by columns, the second by rows."""
    drawing = Drawing(760, 262, "Tensor parallelism: each rank has half of the hidden units of an MLP")
    drawing.text(12, 26, "y = gelu(x A) B on two ranks: each has half of the hidden units", bold=True)
    top, bottom = 62, 150
    drawing.box(20, 88, 56, 70, BOTH, "x", ink=DARK)
    drawing.text(48, 176, "T x C", GREY, "middle")
    for y, fill, rank in ((top, ONE, 0), (bottom, OTHER, 1)):
        drawing.arrow(80, 123, 122, y + 30)
        drawing.box(126, y, 70, 56, fill, f"A{rank}")
        drawing.arrow(200, y + 28, 232, y + 28)
        drawing.box(236, y, 70, 56, fill, f"h{rank}")
        drawing.arrow(310, y + 28, 342, y + 28)
        drawing.box(346, y, 70, 56, fill, f"B{rank}")
        drawing.arrow(420, y + 28, 452, y + 28)
        drawing.box(456, y, 56, 56, fill, f"y{rank}")
        drawing.arrow(516, y + 28, 566, 123)
    drawing.text(161, 56, "half of the columns", GREY, "middle")
    drawing.text(381, 56, "half of the rows", GREY, "middle")
    drawing.text(484, 56, "a term", GREY, "middle")
    drawing.box(570, 100, 84, 46, "#ffffff", "all-reduce", rx=5)
    drawing.arrow(658, 123, 684, 123)
    drawing.box(688, 88, 56, 70, BOTH, "y", ink=DARK)
    drawing.text(612, 176, "y = y0 + y1", GREY, "middle")
    drawing.key(20, 244, KEY)
    return drawing


def sequence() -> Drawing:
    """A block: what is cut along time, and where it is put together."""
    drawing = Drawing(760, 262, "Sequence parallelism: between matmuls each rank has half of the positions")
    drawing.text(12, 26, "A block on two ranks, with sequence parallelism: time runs downwards", bold=True)
    steps = [("norm", True), ("attention", False), ("add, norm", True), ("MLP", False), ("add", True)]
    x, y, height = 20, 64, 110
    for number, (name, cut) in enumerate(steps):
        width = 82
        if cut:
            drawing.box(x, y, width, height / 2, ONE, name)
            drawing.box(x, y + height / 2, width, height / 2, OTHER, name)
            drawing.text(x + width / 2, y + height + 18, "half of the time", GREY, "middle")
        else:
            drawing.box(x, y, width / 2, height, ONE)
            drawing.box(x + width / 2, y, width / 2, height, OTHER)
            drawing.text(x + width / 2, y - 8, name, DARK, "middle")
            drawing.text(
                x + width / 2,
                y + height + 18,
                "half of the heads" if number == 1 else "half of the units",
                GREY,
                "middle",
            )
        x += width
        if number < len(steps) - 1:
            drawing.arrow(x + 6, y + height / 2, x + 68, y + height / 2)
            drawing.text(x + 37, y + height / 2 - 22, "all-" if cut else "reduce-", DARK, "middle")
            drawing.text(x + 37, y + height / 2 - 8, "gather" if cut else "scatter", DARK, "middle")
            x += 74
    drawing.text(
        20,
        226,
        "All-gather and reduce-scatter move as many bytes as the all-reduce of tensor parallelism alone.",
        DARK,
    )
    drawing.key(20, 250, KEY[:2])
    return drawing


# A cell is one unit of time: F takes 1, B takes 2. 1F1B on two ranks with four micro-batches.
ONE_F_ONE_B = (
    "F0 F1 .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3",
    ".  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 . ",
)


def pipeline() -> Drawing:
    """Two stages, and the timetable of a step."""
    drawing = Drawing(
        760, 300, "Pipeline parallelism: each rank has some layers, micro-batches follow each other"
    )
    drawing.text(12, 26, "Four blocks in two stages, four micro-batches: 1F1B", bold=True)
    for block in range(4):
        drawing.box(112 + block * 88, 44, 76, 34, ONE if block < 2 else OTHER, f"block {block}")
        if block < 3:
            drawing.arrow(190 + block * 88, 61, 198 + block * 88, 61)
    drawing.text(12, 65, "the model")
    drawing.text(482, 58, "activations go on to the next stage,", GREY)
    drawing.text(482, 74, "their gradients come back", GREY)
    left, width, height = 112, 44, 40
    shade = {"F": 1.0, "B": 0.55}
    for rank, row in enumerate(ONE_F_ONE_B):
        y = 108 + rank * (height + 10)
        drawing.text(12, y + 24, f"rank {rank}, stage {rank}")
        cells = row.split()
        start = 0
        while start < len(cells):
            stop = start + 1
            while cells[start][0] == "B" and stop < len(cells) and cells[stop] == cells[start]:
                stop += 1
            x, wide = left + start * width, (stop - start) * width
            if cells[start] == ".":
                drawing.box(x, y, wide, height, EMPTY, dashed=True)
            else:
                drawing.box(x, y, wide, height, RANKS[rank], cells[start], opacity=shade[cells[start][0]])
            start = stop
    drawing.arrow(left, 222, left + 14 * width, 222, GREY)
    drawing.text(left + 14 * width, 238, "time", GREY, "end")
    drawing.text(20, 264, "F2: forward of micro-batch 2. B2: its backward, which takes twice as long.")
    drawing.key(20, 286, [(ONE, "stage 0"), (OTHER, "stage 1"), (EMPTY, "the bubble: the rank waits")])
    return drawing


def context() -> Drawing:
    """Eight chunks of a sequence on four ranks, and which keys each query sees."""
    drawing = Drawing(
        760, 320, "Context parallelism: each rank has an early and a late chunk of every sequence"
    )
    drawing.text(12, 26, "One sequence on four ranks: each has an early and a late chunk", bold=True)
    owner = [min(chunk, 7 - chunk) for chunk in range(8)]
    for chunk in range(8):
        drawing.box(20 + chunk * 40, 44, 40, 30, RANKS[owner[chunk]], f"{owner[chunk]}")
    drawing.text(20, 94, "chunks of the sequence, with the rank that has them", GREY)
    drawing.text(20, 130, "Each rank computes attention for its own queries.")
    drawing.text(20, 148, "For each head of keys and values, an all-gather")
    drawing.text(20, 166, "brings the keys and values of all chunks.")
    drawing.text(20, 196, "Causal attention: a query sees the keys before it.")
    drawing.text(20, 214, "Every rank has 9 of the 36 squares: equal work.")
    size, left, top = 26, 500, 50
    for query in range(8):
        for key in range(8):
            seen = key <= query
            drawing.box(
                left + key * size, top + query * size, size, size, RANKS[owner[query]] if seen else EMPTY
            )
        drawing.text(left - 8, top + query * size + 17, f"{query}", GREY, "end")
        drawing.text(left + query * size + size / 2, top + 8 * size + 16, f"{query}", GREY, "middle")
    drawing.text(left + 4 * size, top + 8 * size + 34, "chunk of the keys", GREY, "middle")
    drawing.text(left - 24, top + 4 * size, "chunk of", GREY, "end")
    drawing.text(left - 24, top + 4 * size + 15, "the queries", GREY, "end")
    drawing.key(20, 304, [(fill, f"rank {rank}") for rank, fill in enumerate(RANKS)] + [(EMPTY, "not seen")])
    return drawing


def experts() -> Drawing:
    """Tokens of two ranks, sent to the experts and back."""
    drawing = Drawing(760, 320, "Expert parallelism: tokens are sent to the rank that has their expert")
    drawing.text(12, 26, "Four experts on two ranks, one expert for each token", bold=True)
    goes_to = [[0, 2, 1, 3], [2, 2, 0, 3]]
    arrive = {expert: [] for expert in range(4)}
    for rank, choices in enumerate(goes_to):
        for token, expert in enumerate(choices):
            arrive[expert].append((rank, token))
    columns = [(60, "tokens of each rank"), (300, "rows at each expert"), (600, "outputs, in their places")]
    for x, title in columns:
        drawing.text(x, 54, title, GREY)
    for rank, choices in enumerate(goes_to):
        for token, expert in enumerate(choices):
            y = 66 + rank * 110 + token * 24
            for x in (60, 600):
                drawing.box(x, y, 66, 20, RANKS[rank], f"token {token}")
            place = arrive[expert].index((rank, token))
            to_y = 66 + expert * 55 + place * 18 + 8
            drawing.arrow(130, y + 10, 296, to_y, RANKS[rank])
            drawing.arrow(452, to_y, 596, y + 10, RANKS[rank])
        drawing.text(12, 66 + rank * 110 + 52, f"rank {rank}")
    for expert, rows in arrive.items():
        y = 66 + expert * 55
        for place, (rank, token) in enumerate(rows):
            drawing.box(300, y + place * 18, 60, 16, RANKS[rank], f"{rank}.{token}")
        drawing.box(372, y, 76, 50, RANKS[expert // 2], f"expert {expert}", rx=5)
    drawing.text(214, 296, "all-to-all", DARK, "middle")
    drawing.text(524, 296, "all-to-all", DARK, "middle")
    drawing.key(20, 308, KEY[:2])
    return drawing


PICTURES = {each.__name__: each for each in (tensor, sequence, pipeline, context, experts)}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in PICTURES:
        sys.exit(f"usage: python docs/figures/axes.py {'|'.join(PICTURES)} FILE.svg")
    Path(sys.argv[2]).write_text(str(PICTURES[sys.argv[1]]()), encoding="utf-8")
