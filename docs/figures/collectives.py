"""Draws all-gather and reduce-scatter on four ranks: the picture of docs/learn/from_scratch.md.

python docs/figures/collectives.py docs/figures/collectives.svg
"""

from drawing import DARK, EMPTY, GREY, RANKS, Drawing, write

N, BOX, GAP, LEFT = 4, 34, 8, 64


def picture() -> Drawing:
    """Before and after each of the two."""
    drawing = Drawing(760, 304, "All-gather and reduce-scatter on four ranks")
    for column, (title, before, after) in enumerate(
        [
            ("all-gather: each rank gets all shards", "own shard", "the whole array"),
            ("reduce-scatter: each rank gets one shard of the sum", "own whole array", "shard of the sum"),
        ]
    ):
        x = 12 + column * 376
        drawing.text(x, 28, title, bold=True)
        for rank in range(N):
            y = 58 + rank * (BOX + GAP)
            drawing.text(x, y + 21, f"rank {rank}", GREY)
            for part in range(N):
                left, right = x + 46 + part * BOX, x + 226 + part * BOX
                if column == 0:
                    own = part == rank
                    drawing.box(left, y, BOX, BOX, RANKS[part] if own else EMPTY, f"w{part}" if own else "")
                    drawing.box(right, y, BOX, BOX, RANKS[part], f"w{part}")
                else:
                    drawing.box(left, y, BOX, BOX, RANKS[rank], f"{'abcd'[rank]}{part}", opacity=0.45)
                    if part == rank:
                        drawing.box(right, y, BOX, BOX, "#333333", f"\u03a3{part}")
                    else:
                        drawing.box(right, y, BOX, BOX, EMPTY)
        middle = 58 + (N * (BOX + GAP) - GAP) / 2
        drawing.arrow(x + 46 + N * BOX + 8, middle, x + 218, middle)
        drawing.text(x + 46, 50, before, GREY)
        drawing.text(x + 226, 50, after, GREY)
    y = 58 + N * (BOX + GAP) + 20
    drawing.text(12, y, "A colour is the rank that made the values.", DARK)
    drawing.text(388, y, "\u03a32 = a2 + b2 + c2 + d2: one term from each rank", DARK)
    drawing.text(
        12, y + 24, "Each of the two moves (N - 1) / N of the whole array to and from every rank.", DARK
    )
    drawing.text(12, y + 44, "An all-reduce is a reduce-scatter, then an all-gather of the sums.", DARK)
    return drawing


if __name__ == "__main__":
    write(picture)
