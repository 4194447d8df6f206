"""Draws what FSDP does to one layer: the README's first picture.

python docs/figures/loop.py docs/figures/loop.svg
"""

import sys
from pathlib import Path

RANKS, COLOURS = 4, ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
BOX, GAP = 22, 6
STAGES = (
    ("keep", "each rank keeps 1/4", "of each layer"),
    ("gather", "all-gather: each rank", "has the whole layer"),
    ("compute", "compute, on each", "rank's own samples"),
    ("release", "release: 1/4 is left,", "gather the next layer"),
)
WIDTH, HEIGHT = 760, 190


def picture() -> str:
    """The picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        "<title>A layer is gathered from all ranks, used, and released</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
    ]
    for rank in range(RANKS):
        y = 20 + rank * (BOX + GAP)
        parts.append(f'<text x="12" y="{y + 15}" fill="#333333">rank {rank}</text>')
        for column, (stage, *_) in enumerate(STAGES):
            whole = stage in ("gather", "compute")
            for shard in range(RANKS):
                filled = whole or shard == rank
                x = 70 + column * 175 + shard * BOX
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{BOX}" height="{BOX}" stroke="#888888" '
                    f'fill="{COLOURS[shard] if filled else "#f2f2f2"}"/>'
                )
            if stage == "compute":
                x = 70 + column * 175 + RANKS * BOX + 6
                parts.append(f'<text x="{x}" y="{y + 15}" fill="#333333">x {rank} -&gt; y {rank}</text>')
    for column, (_, first, second) in enumerate(STAGES):
        x, y = 70 + column * 175, 20 + RANKS * (BOX + GAP) + 16
        parts.append(f'<text x="{x}" y="{y}" fill="#111111">{first}</text>')
        parts.append(f'<text x="{x}" y="{y + 16}" fill="#111111">{second}</text>')
        if column:
            arrow = 20 + (RANKS * (BOX + GAP) - GAP) / 2
            start = x - 175 + RANKS * BOX + (66 if STAGES[column - 1][0] == "compute" else 12)
            parts.append(f'<path d="M{start} {arrow}H{x - 14}m-5 -4l5 4l-5 4" fill="none" stroke="#333333"/>')
    parts.append("</svg>\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture())
