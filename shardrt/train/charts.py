"""Charts by matplotlib: as SVG text, in a page or a separate file, which loads nothing; or as a picture.

matplotlib is imported where one is drawn. One version of it makes the same bytes of the same numbers.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import StringIO
from itertools import cycle
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Bar", "Series", "bars", "lines", "schedule", "svg"]

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#8a8a8a")
_MOST = 400  # stretches of a curve
_HUGE = 1e100  # no figure of a run; axes overflow far above
_FONT, _GLYPH = 9, 0.62  # points, which are pixels in SVG; of it, how wide a letter is on average
_LOOK = {
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "figure.constrained_layout.use": True,
    "figure.dpi": 72,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": _FONT,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # of names that the user gave
}


@dataclass(frozen=True)
class Series:
    """A line through points; values that are None, not finite, or huge leave a gap."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    dots: bool = False

    @classmethod
    def of(
        cls, label: str, records: Sequence[Mapping[str, Any]], key: str, *, dots: bool = False
    ) -> "Series":
        """One figure of the records of metrics.jsonl over their steps."""
        return cls(label, [r["step"] for r in records], [r.get(key) for r in records], dots)


@dataclass(frozen=True)
class Bar:
    """From `start` to `stop` on a time axis.

    Attributes:
        faint: behind the others, with no label.
    """

    start: float
    stop: float
    label: str
    colour: str
    title: str = ""
    faint: bool = False


@contextmanager
def look() -> Iterator[None]:
    """Charts that are drawn inside look alike, whatever the user's own settings of matplotlib."""
    from matplotlib import style

    with style.context(["default", _LOOK]):
        yield


@look()
def lines(title: str, series: Sequence[Series], *, y: str, from_zero: bool = False) -> "Axes":
    """A line chart over the steps, with a legend.

    Says so where there is nothing to draw.

    Args:
        from_zero: the axis begins at 0, so that small changes do not look like a jump.
    """
    axes = _axes(title, 460, 240)
    for one, colour in zip(series, cycle(COLOURS), strict=False):
        xs, ys = thinned(one)
        known = np.pad(np.isfinite(ys), 1)
        alone = known[1:-1] & ~known[:-2] & ~known[2:]  # no line leads there
        marked = np.flatnonzero(alone | one.dots).tolist()
        look = {"marker": "o", "markersize": 4, "markevery": marked} if marked else {}
        axes.plot(xs, ys, color=colour, linewidth=1.5, label=one.label, **look)
    if not any(np.isfinite(line.get_ydata()).any() for line in axes.lines):
        axes.text(0.5, 0.5, "no values yet", transform=axes.transAxes, ha="center")
    elif any(one.label for one in series):
        axes.legend()
    axes.set(xlabel="step", ylabel=y)
    axes.set_ylim(bottom=0 if from_zero else None)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return axes


@look()
def bars(
    title: str,
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    *,
    unit: str,
    colours: Mapping[str, str] | None = None,
) -> str:
    """Horizontal bars, a row each, of one part or of several side by side: (row, [(part, value), ...]).

    Args:
        colours: of some parts; the others take theirs in order.
    """
    parts = list(dict.fromkeys(part for _, own in rows for part, _ in own))
    colours = dict(zip(parts, cycle(COLOURS), strict=False)) | dict(colours or {})
    legend = {part: colours[part] for part in parts} if len(parts) > 1 else {}
    axes, tips = _axes(title, 460, 50 + 22 * len(rows) + 16 * ceil(len(legend) / 3)), []
    for row, (_, own) in enumerate(rows):
        total = 0.0
        for part, value in own:
            axes.barh(row, value, left=total, color=colours[part], gid=f"tip{len(tips)}")
            tips.append(f"{part}: {value:.4g} {unit}")
            total += value
        axes.text(total, row, f" {total:.4g} {unit}", va="center")
    axes.margins(x=0.2)  # for the text
    axes.xaxis.set_visible(False)
    _finish(axes, [name for name, _ in rows], legend)
    return svg(axes, tips)


@look()
def schedule(
    title: str, rows: dict[str, list[Bar]], legend: dict[str, str], *, axis: str, width: int = 960
) -> str:
    """Streams below each other over one time axis in milliseconds.

    Labels stand where they fit; where some do not, all are what stands after the last point of the name.
    """
    from matplotlib.patches import Rectangle

    axes, tips = _axes("", width, 80 + 40 * len(rows)), []
    stop = max((bar.stop for own in rows.values() for bar in own), default=1.0) or 1.0
    pixels = (width - 110) / stop  # per millisecond, next to the names of the rows
    labelled = [bar for own in rows.values() for bar in own if not bar.faint]
    short = not all(_fits(bar.label, (bar.stop - bar.start) * pixels) for bar in labelled)
    for row, own in enumerate(rows.values()):
        for bar in sorted(own, key=lambda bar: not bar.faint):
            long = bar.stop - bar.start
            edge = 0.5 if long * pixels > 3 and not bar.faint else 0
            drawn = {"facecolor": bar.colour, "edgecolor": "white", "linewidth": edge}
            drawn |= {"alpha": 0.25 if bar.faint else 1, "gid": f"tip{len(tips)}", "clip_on": False}
            axes.add_patch(Rectangle((bar.start, row - 0.4), max(long, 0.3 / pixels), 0.8, **drawn))
            tips.append(bar.title or bar.label)
            label = bar.label.rpartition(".")[2] if short else bar.label
            if not bar.faint and _fits(label, long * pixels):
                middle = bar.start + long / 2
                axes.text(middle, row, label, ha="center", va="center", color=_ink(bar.colour))
    axes.set(xlabel=axis, xlim=(0, stop), ylim=(-0.5, len(rows) - 0.5))
    _finish(axes, list(rows), legend)
    return svg(axes, tips, title)


@look()
def svg(axes: "Axes", tips: Sequence[str] = (), title: str = "") -> str:
    """A chart as SVG text.

    Args:
        tips: a browser's tooltips for the bars, in their order.
    """
    from matplotlib import rcParams

    title, made = title or axes.get_title(loc="left"), StringIO()
    rcParams["svg.hashsalt"] = title  # names inside a chart are its own
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    axes.figure.savefig(made, format="svg", metadata=nothing)
    text = made.getvalue()
    text = text[text.index("<svg") :].replace(">", f' role="img"><title>{escape(title)}</title>', 1)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)  # the next chart in the page has the same
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r' (?:d|x|y)="[^"<>]*"', lambda one: re.sub(r"(\.\d\d)\d+", r"\1", one[0]), text)
    return re.sub(r' id="tip(\d+)">', lambda one: f"><title>{escape(tips[int(one[1])])}</title>", text)


def thinned(one: Series) -> tuple[np.ndarray, np.ndarray]:
    """Its points, NaN in gaps; of many the lowest, the highest and a gap of each stretch: no peak is lost."""
    xs, ys = np.array(one.xs, np.float64), np.array(one.ys, np.float64)
    ys[~(np.abs(ys) < _HUGE)] = np.nan
    if len(ys) <= 3 * _MOST:
        return xs, ys
    kept = set()
    for stretch in np.array_split(np.arange(len(ys)), _MOST):
        own = ys[stretch]
        gaps = np.isnan(own)
        ends = np.where(gaps, np.inf, own).argmin(), np.where(gaps, -np.inf, own).argmax()
        kept |= {int(stretch[place]) for place in (*ends, gaps.argmax())}
    places = sorted(kept)
    return xs[places], ys[places]


def _ink(colour: str) -> str:
    """Of a label on this colour: white where it can be read, by a contrast of 3 (WCAG 2.2)."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    light = float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
    return "white" if 1.05 / (light + 0.05) >= 3 else "#222222"


def _fits(label: str, wide: float) -> bool:
    return _GLYPH * _FONT * len(label) + 4 <= wide


def _axes(title: str, width: float, height: float) -> "Axes":
    from matplotlib.figure import Figure

    axes = Figure(figsize=(width / 72, height / 72)).add_subplot()
    axes.set_title(title, fontsize=11, fontweight="bold")
    return axes


def _finish(axes: "Axes", rows: Sequence[str], legend: Mapping[str, str]) -> None:
    """The rows' names, the first one above, and the colours' below."""
    from matplotlib.patches import Patch

    axes.set_yticks(range(len(rows)), rows)
    axes.grid(visible=False)
    axes.invert_yaxis()
    patches = [Patch(color=colour, label=name) for name, colour in legend.items()]
    if patches:
        columns = int(axes.figure.bbox.width / 150)
        axes.figure.legend(handles=patches, loc="outside lower left", ncols=columns, handlelength=1)
