"""SVG by hand: the shapes, colours and background that the pictures of docs/learn share.

A picture has a white background with round corners, so it can be read on a dark page, too.
"""

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

RANKS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")  # one colour for each rank, on every picture
DARK, GREY, LIGHT, EMPTY = "#111111", "#666666", "#bbbbbb", "#f2f2f2"
PARAMETERS, GRADIENTS, OPTIMIZER = "#4c78a8", "#f58518", "#54a24b"  # colours where ranks have none


class Drawing:
    """A picture of `width` x `height` pixels. The methods draw one shape each."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = EMPTY,
        text: str = "",
        *,
        ink: str = "",
        dashed: bool = False,
        opacity: float = 1.0,
        rx: float = 0,
    ) -> None:
        """A rectangle, with text in its middle."""
        dash = ' stroke-dasharray="3 2"' if dashed else ""
        faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        corner = f' rx="{rx:g}"' if rx else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{faint}{corner} '
            f'stroke="#888888"{dash}/>'
        )
        if text:
            dark = fill in (EMPTY, "#ffffff") or opacity < 0.6
            self.text(x + width / 2, y + height / 2 + 4, text, ink or (DARK if dark else "#ffffff"), "middle")

    def text(
        self, x: float, y: float, text: str, fill: str = DARK, anchor: str = "start", *, bold: bool = False
    ) -> None:
        """One line of text. y: its base line."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def path(self, d: str, stroke: str = "#333333", width: float = 1, *, dashed: bool = False) -> None:
        """A line along an SVG path."""
        dash = ' stroke-dasharray="3 2"' if dashed else ""
        self.parts.append(f'<path d="{d}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{dash}/>')

    def arrow(
        self, x: float, y: float, to_x: float, to_y: float, stroke: str = "#333333", *, dashed: bool = False
    ) -> None:
        """A straight arrow."""
        length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        u, v = (to_x - x) / length * 6, (to_y - y) / length * 6
        self.path(f"M{x:g} {y:g}L{to_x:g} {to_y:g}", stroke, dashed=dashed)
        left, right = (to_x - u - v / 2, to_y - v + u / 2), (to_x - u + v / 2, to_y - v - u / 2)
        self.parts.append(
            f'<path d="M{to_x:g} {to_y:g}L{left[0]:.4g} {left[1]:.4g}L{right[0]:.4g} {right[1]:.4g}z" '
            f'fill="{stroke}"/>'
        )

    def key(self, x: float, y: float, entries: list[tuple[str, str]], step: float = 0) -> None:
        """Squares of colour with what they mean, in one line. step: pixels for each; 0: by its text."""
        for fill, text in entries:
            self.box(x, y - 10, 12, 12, fill)
            self.text(x + 18, y, text, DARK)
            x += step or 36 + 6.6 * len(text)

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def write(picture: Callable[[], object]) -> None:
    """The main program of a picture: write it to the file that the command line names."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FILE.svg")
    Path(sys.argv[1]).write_text(str(picture()), encoding="utf-8")
