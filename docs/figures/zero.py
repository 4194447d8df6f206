"""Draws what one rank of four keeps in DDP, ZeRO-1, 2 and 3: a picture of docs/learn/strategies.md.

python docs/figures/zero.py docs/figures/zero.svg
"""

from drawing import DARK, EMPTY, GRADIENTS, GREY, OPTIMIZER, PARAMETERS, Drawing, write

N, BOX = 4, 30
ROWS = (("parameters", PARAMETERS, 1), ("gradients", GRADIENTS, 1), ("optimizer state", OPTIMIZER, 2))
# (name, strategy here, which rows are sharded from one step to the next, what it sends)
COLUMNS = (
    ("DDP", "NO_SHARD", (), "2 P"),
    ("ZeRO-1", "SHARD_OPT", ("optimizer state",), "2 P"),
    ("ZeRO-2", "SHARD_GRAD_OP", ("optimizer state", "gradients"), "2 P"),
    ("ZeRO-3", "FULL_SHARD", ("optimizer state", "gradients", "parameters"), "3 P"),
)


def picture() -> Drawing:
    """One column for each."""
    drawing = Drawing(760, 280, "What rank 1 of four holds in backward: DDP, ZeRO-1, ZeRO-2, ZeRO-3")
    drawing.text(12, 26, "What rank 1 of 4 holds while a step runs", bold=True)
    y = 88
    for name, fill, height in ROWS:
        drawing.text(12, y + height * BOX / 2 + 4, name)
        for column, (_, _, sharded, _) in enumerate(COLUMNS):
            x = 122 + column * 160
            for part in range(N):
                there = name not in sharded or part == 1
                drawing.box(x + part * BOX, y, BOX, height * BOX, fill if there else EMPTY)
        y += height * BOX + 10
    for column, (name, strategy, sharded, sent) in enumerate(COLUMNS):
        x = 122 + column * 160
        drawing.text(x, 56, name, bold=True)
        drawing.text(x, 74, strategy, GREY)
        kept = sum(height / (N if row in sharded else 1) for row, _, height in ROWS)
        drawing.text(x, y + 14, f"{4 * kept:g} bytes an element")
        drawing.text(x, y + 32, f"moves {sent} elements", GREY)
    drawing.text(12, y + 14, "kept, in float32", DARK)
    drawing.text(12, y + 32, "P: all elements", GREY)
    return drawing


if __name__ == "__main__":
    write(picture)
