"""Draws the flat buffer of one unit, cut across its parameters: a picture of docs/explanation/schedule.md.

python docs/figures/flat.py docs/figures/flat.svg

The offsets are those that shardrt's own Layout gives.
"""

from drawing import DARK, GREY, RANKS, Drawing, write

from shardrt.fsdp.layout import Layout

SHAPES = [("norm.weight", (48,)), ("up.weight", (24, 10)), ("up.bias", (24,)), ("down.weight", (10, 24))]
SHADES = ("#9ecae9", "#72b7b2", "#d8b5a5", "#eeca3b")
LEFT, WIDTH, BOX = 24, 712, 36


def picture() -> Drawing:
    """The parameters, the flat buffer, and the shards of four ranks."""
    layout = Layout.plan(SHAPES, shards=len(RANKS))
    drawing = Drawing(760, 290, "The flat buffer of one unit is cut into four equal shards")
    scale = WIDTH / layout.total
    drawing.text(
        LEFT,
        28,
        f"the parameters of a unit, one after the other in one flat buffer of {layout.total} elements",
        bold=True,
    )
    for entry, fill in zip(layout.entries, SHADES, strict=True):
        x = LEFT + entry.offset * scale
        drawing.box(x, 76, entry.size * scale, BOX, fill)
        if entry.size * scale < 90:
            drawing.text(x, 66, f"{entry.name}, {entry.size}", DARK)
        else:
            drawing.text(x + 8, 100, f"{entry.name}, {entry.size}", DARK)
    for start, stop in layout.padding:
        drawing.box(LEFT + start * scale, 76, (stop - start) * scale, BOX, "#ffffff", dashed=True)
    y = 170
    drawing.text(LEFT, y - 14, f"{len(RANKS)} shards of {layout.shard_size} elements", bold=True)
    for rank, fill in enumerate(RANKS):
        start, stop = layout.shard_range(rank)
        x = LEFT + start * scale
        drawing.box(x, y, (stop - start) * scale, BOX, fill, f"rank {rank}")
        if rank:
            drawing.path(f"M{x:g} 72V{y + BOX + 6:g}", DARK, dashed=True)
        parts = [entry for entry in layout.entries if entry.offset < stop and entry.stop > start]
        for line, entry in enumerate(parts):
            low, high = max(entry.offset, start) - entry.offset, min(entry.stop, stop) - entry.offset
            drawing.text(x + 4, y + BOX + 18 + 16 * line, f"{entry.name}[{low}:{high}]", GREY)
    drawing.text(LEFT, 278, "Dashed: padding, since parameters and shards begin at multiples of 16 elements.")
    return drawing


if __name__ == "__main__":
    write(picture)
