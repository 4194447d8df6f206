"""The matrix of ranks as text, as data and as a picture."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..harness import picture
from ..harness.table import number

FIGURES = {"matrix_latency": ("p50_us", "us"), "matrix_bandwidth": ("gb_s", "GB/s")}


@dataclass(frozen=True)
class Matrix:
    """A figure of every ordered pair of ranks by one way: rows[sender][receiver]; None: wrong, or no pair."""

    test: str
    communicator: str
    how: str
    bytes: int
    unit: str
    rows: list[list[float | None]]

    def text(self) -> str:
        """With numbers of rows and columns."""
        lines = [
            f"\n{self.test} {self.communicator} {self.how}, {self.bytes} bytes, {self.unit}: row to column",
            " " * 6 + "".join(f"{name:>10}" for name in range(len(self.rows))),
        ]
        for name, row in enumerate(self.rows):
            lines.append(f"{name:>6}" + "".join(number(value, 10) for value in row))
        return "\n".join(lines)


def matrices(lines: Iterable[dict]) -> list[Matrix]:
    """Of the lines of tests named in FIGURES, each of one pair."""
    found: dict[tuple, dict[tuple[int, int], float | None]] = {}
    for line in lines:
        if line["test"] in FIGURES:
            key = line["test"], line["communicator"], line["how"], line["bytes"]
            sender, receiver = map(int, line["pair"].split("-"))
            found.setdefault(key, {})[sender, receiver] = line[FIGURES[line["test"]][0]]
    made = []
    for key, cells in found.items():
        ranks = range(1 + max(max(pair) for pair in cells))
        rows = [[cells.get((sender, receiver)) for receiver in ranks] for sender in ranks]
        made.append(Matrix(*key, FIGURES[key[0]][1], rows))
    return made


def draw(found: Sequence[Matrix], path: Path) -> None:
    """Heat maps with their numbers: a row for each test, communicator and size, a column for each way.

    Those of a row have one colour scale. Raises OSError.
    """
    from matplotlib.figure import Figure

    rows: dict[tuple, list[Matrix]] = {}
    for matrix in found:
        rows.setdefault((matrix.test, matrix.communicator, matrix.bytes), []).append(matrix)
    wide, side = max(map(len, rows.values())), max(3.0, 0.6 * len(found[0].rows))
    figure = Figure(figsize=(wide * side + 1, len(rows) * (side + 1)), layout="constrained")
    for place, own in enumerate(rows.values()):
        panels = [figure.add_subplot(len(rows), wide, place * wide + i + 1) for i in range(len(own))]
        images = [_panel(axes, matrix, _most(own)) for axes, matrix in zip(panels, own, strict=True)]
        figure.colorbar(images[0], ax=panels, label=own[0].unit)
    picture.save(figure, path)


def _panel(axes: Any, matrix: Matrix, most: float) -> Any:
    """One heat map, from 0 to `most`."""
    cells = np.array(matrix.rows, float)  # None: nan, which has no colour
    image = axes.imshow(cells, vmin=0, vmax=most)
    for (row, column), value in np.ndenumerate(cells):
        if np.isfinite(value):
            ink = "white" if value < 0.6 * most else "black"  # viridis is dark below
            axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=ink)
    axes.grid(visible=False)
    ticks = range(len(cells))
    axes.set(xticks=ticks, yticks=ticks, xlabel="receiver", ylabel="sender")
    test = matrix.test.removeprefix("matrix_")
    axes.set_title(f"{test}, {matrix.bytes} bytes\n{matrix.communicator} {matrix.how}")
    return image


def _most(own: Sequence[Matrix]) -> float:
    """The largest number of several matrices; 1 where there is none."""
    return max((value for matrix in own for row in matrix.rows for value in row if value), default=1.0)
