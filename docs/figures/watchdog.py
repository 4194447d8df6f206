"""Draws how ranks watch each other: the picture of docs/explanation/failures.md.

python docs/figures/watchdog.py docs/figures/watchdog.svg
"""

import sys
from pathlib import Path

WIDTH, HEIGHT = 660, 316
RANK = 270  # the width of a rank
LEFT = 30, 30 + RANK + 60  # where ranks begin
PARTS = (  # of each rank: text, second line, colour, y
    ("training thread", "calls collectives, begins phases", "#4c78a8", 48),
    ("watchdog thread", "looks twice a second", "#f58518", 168),
    ("timer of the C library", "1.5 limits, needs no interpreter", "#b279a2", 242),
)
BOX, FILE = (200, 44), (230, 28)


def box(x: float, y: float, size: tuple[int, int], colour: str, *lines: str) -> str:
    """Draw a filled box with lines of text in its middle."""
    width, height = size
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}"/>'
    step = height / (len(lines) + 1)
    rows = (
        f'<text x="{x + width / 2}" y="{y + step * (n + 1) + 4:.0f}" fill="#ffffff" '
        f'text-anchor="middle">{line}</text>'
        for n, line in enumerate(lines)
    )
    return shape + "".join(rows)


def arrow(x: float, y: float, to_x: float, to_y: float, text: str = "") -> str:
    """Draw an arrow with a text next to its middle."""
    line = f'<path d="M{x} {y}L{to_x} {to_y}" stroke="#333333" marker-end="url(#head)"/>'
    side = 6 if to_x >= x else -6
    anchor = "start" if side > 0 else "end"
    place = f'x="{(x + to_x) / 2 + side}" y="{(y + to_y) / 2 + 4}" text-anchor="{anchor}"'
    return line + (f'<text {place} fill="#333333">{text}</text>' if text else "")


def picture() -> str:
    """The picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        "<title>Each rank records what it does in a file; each watchdog reads the files of all ranks</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M0 0L8 4L0 8z" fill="#333333"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
    ]
    for rank, left in enumerate(LEFT):
        parts.append(
            f'<rect x="{left}" y="14" width="{RANK}" height="288" rx="6" fill="#f7f7f7" stroke="#cccccc"/>'
        )
        parts.append(f'<text x="{left + 12}" y="34" fill="#111111">rank {rank}</text>')
    for rank, left in enumerate(LEFT):
        x = left + (12 if rank else RANK - 12 - BOX[0])
        for first, second, colour, y in PARTS:
            parts.append(box(x, y, BOX, colour, first, second))
        file = left + (12 if rank else RANK - 12 - FILE[0])
        parts.append(box(file, 116, FILE, "#54a24b", f"flight/rank-{rank}.bin, survives SIGKILL"))
        middle = x + BOX[0] / 2
        parts.append(arrow(middle, 92, middle, 114, "records"))
        parts.append(arrow(middle, 144, middle, 166, "reads"))
        parts.append(arrow(middle, 212, middle, 240, "sets again"))
        there, end = (LEFT[0] + RANK - 40, x - 2) if rank else (LEFT[1] + 40, x + BOX[0] + 2)
        parts.append(arrow(there, 145, end, 190))
    parts.append("</svg>\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture())
