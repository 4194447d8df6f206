"""Charts as SVG text, made by hand: small, the same bytes for the same numbers, nothing loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle
from math import ceil, floor, inf, isfinite, log10

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#8a8a8a")
_FONT = "font-family:system-ui,sans-serif"
_NARROW = 0.5  # pixels
_GLYPH = 0.58  # of the font's size: how wide a letter is on average


@dataclass(frozen=True)
class Series:
    """A line through points; None among the values, or what is not finite, leaves a gap."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    dots: bool = False


@dataclass(frozen=True)
class Bar:
    """From `start` to `stop` on a time axis. faint: behind the others, with no label."""

    start: float
    stop: float
    label: str
    colour: str
    title: str = ""
    faint: bool = False


def lines(title: str, series: Sequence[Series], *, y: str, x: str = "step", from_zero: bool = False) -> str:
    """A line chart with a legend. Says so where there is nothing to draw.

    from_zero: the axis begins there, so that what hardly changes does not look like a jump.
    """
    runs = [(s, _unbroken(s)) for s in series]
    drawn = [point for _, own in runs for run in own for point in run]
    width, height, left, top, right, bottom = 460, 240, 62, 30, 10, 36
    if not drawn:
        return _svg(
            title, width, height, [_title(title), _text(width / 2, height / 2, "no values yet", "middle")]
        )
    x_ticks = ticks(min(a for a, _ in drawn), max(a for a, _ in drawn))
    y_low = 0.0 if from_zero else min(b for _, b in drawn)
    y_ticks = ticks(y_low, max(b for _, b in drawn))
    x_low, x_high = x_ticks[0], x_ticks[-1]

    def at(a: float, b: float) -> tuple[float, float]:
        across = (a - x_low) / (x_high - x_low)
        up = (b - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return left + across * (width - left - right), height - bottom - up * (height - top - bottom)

    parts = [_title(title)]
    for value in y_ticks:
        _, line = at(x_low, value)
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{line:.1f}" y2="{line:.1f}" stroke="#ddd"/>'
        )
        parts.append(_text(left - 5, line + 4, number(value, y_ticks), "end"))
    for value in x_ticks:
        parts.append(_text(at(value, 0)[0], height - bottom + 14, number(value, x_ticks), "middle"))
    parts.append(_text((left + width - right) / 2, height - 6, x, "middle"))
    parts.append(_text(width - right, 20, y, "end"))
    parts += _legend([s.label for s in series if s.label], left, height - 6)
    for colour, (one, own) in zip(COLOURS, runs, strict=False):
        for run in own:
            places = [at(a, b) for a, b in thinned(run)]
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            if one.dots or len(places) == 1:
                parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in places]
    return _svg(title, width, height, parts)


def bars(
    title: str,
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    *,
    unit: str,
    colours: Mapping[str, str] | None = None,
) -> str:
    """Horizontal bars, a row each, of one part or of several side by side: (row, [(part, value), ...]).

    colours: of some parts; the others take theirs in order.
    """
    parts_of = list(dict.fromkeys(part for _, own in rows for part, _ in own))
    colours = dict(zip(parts_of, cycle(COLOURS), strict=False)) | dict(colours or {})
    many = any(len(own) > 1 for _, own in rows)
    width, row, left, top = 460, 22, 190, 30
    legend = _legend(parts_of, 8, 0, [colours[part] for part in parts_of], width) if many else []
    height = top + row * max(1, len(rows)) + 8 + 16 * len(legend)
    most = max((sum(value for _, value in own) for _, own in rows), default=0) or 1.0
    drawn = [_title(title)]
    for line, (name, own) in enumerate(rows):
        y, across = top + row * line, float(left)
        drawn.append(_text(left - 5, y + 14, clipped(name, left - 10), "end"))
        for part, value in own:
            wide = (width - left - 76) * value / most
            told = f"{part}: {value:.4g} {unit}"
            drawn.append(_rect(across, y + 3, wide, row - 6, colours[part], told))
            across += wide
        drawn.append(_text(across + 5, y + 14, f"{sum(value for _, value in own):.4g} {unit}"))
    base = height - 16 * len(legend) + 6
    drawn += [f'<g transform="translate(0,{base + 16 * n})">{line}</g>' for n, line in enumerate(legend)]
    return _svg(title, width, height, drawn)


def schedule(
    title: str, rows: dict[str, list[Bar]], legend: dict[str, str], *, axis: str, width: int = 960
) -> str:
    """Streams below each other over one time axis in milliseconds.

    Labels stand where they fit; where some do not, all are what stands behind the last point of the name.
    """
    left, top, row, right = 110, 34, 40, 12
    stop = max((bar.stop for own in rows.values() for bar in own), default=1.0) or 1.0
    height = top + row * len(rows) + 36
    scale = (width - left - right) / stop
    labelled = [bar for own in rows.values() for bar in own if not bar.faint]
    short = any(fitting(bar.label, (bar.stop - bar.start) * scale) != bar.label for bar in labelled)
    drawn = _legend(list(legend), left, 20, list(legend.values()))
    for line, (stream, own) in enumerate(rows.items()):
        y = top + row * line
        drawn.append(_text(left - 8, y + row / 2 + 4, clipped(stream, left - 12), "end", 12))
        drawn.append(f'<line x1="{left}" x2="{width - right}" y1="{y + row}" y2="{y + row}" stroke="#eee"/>')
        for bar in sorted(own, key=lambda bar: not bar.faint):
            x, wide = left + bar.start * scale, (bar.stop - bar.start) * scale
            if wide < _NARROW and not bar.label:
                continue
            drawn.append(_rect(x, y + 4, wide, row - 8, bar.colour, bar.title or bar.label, bar.faint))
            shown = bar.label.rpartition(".")[2] if short else bar.label
            label = fitting(shown, wide) if not bar.faint else ""
            if label:
                drawn.append(_text(x + wide / 2, y + row / 2 + 4, label, "middle", 11, "#fff"))
    base = top + row * len(rows)
    for value in (marks := [tick for tick in ticks(0.0, stop) if tick <= stop]):
        x = left + value * scale
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}" stroke="#888"/>')
        drawn.append(_text(x, base + 16, number(value, marks), "middle"))
    drawn.append(_text((left + width - right) / 2, base + 31, axis, "middle"))
    return _svg(title, width, height, drawn)


def file(drawn: str) -> str:
    """A chart as a file of its own; inside a page it needs no name space."""
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def thinned(points: list[tuple[float, float]], most: int = 800) -> list[tuple[float, float]]:
    """At most `most` of the points: the lowest and the highest of each stretch, so that no peak is lost."""
    if len(points) <= most:
        return points
    size = ceil(len(points) / (most // 2))
    kept = []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers, equally far apart, the first at most `low` and the last at least `high`."""
    if not high > low:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    rough = (high - low) / wanted
    size = 10.0 ** floor(log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * (1 - 1e-9))
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def number(value: float, among: Sequence[float]) -> str:
    """A tick's number, as short as tells it from its neighbours."""
    step = min((b - a for a, b in zip(among, among[1:], strict=False)), default=abs(value) or 1.0)
    most = max(map(abs, among))
    if most >= 1e6 or most < 1e-3:
        return f"{value:.3g}"
    return f"{value:.{max(0, -floor(log10(step) + 1e-9))}f}"


def fitting(label: str, wide: float, size: float = 11) -> str:
    """The label, or nothing where it is wider than `wide` pixels."""
    return label if _GLYPH * size * len(label) + 4 <= wide else ""


def clipped(text: str, wide: float, size: float = 11) -> str:
    """The text, its end cut off where it is wider than `wide` pixels."""
    room = int(wide / (_GLYPH * size))
    return text if len(text) <= room else text[: max(0, room - 1)] + "…"


def _unbroken(series: Series) -> list[list[tuple[float, float]]]:
    """The points of a series, cut where a value is missing."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(series.xs, series.ys, strict=True):
        if y is not None and isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _svg(title: str, width: float, height: float, parts: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'style="{_FONT}"><title>{escape(title)}</title>\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _title(text: str) -> str:
    return f'<text x="8" y="20" font-size="13" font-weight="600" fill="#222">{escape(text)}</text>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: float = 11, fill: str = "#444") -> str:
    placed = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    return f"<text {placed}>{escape(text)}</text>"


def _rect(x: float, y: float, w: float, h: float, colour: str, title: str, faint: bool = False) -> str:
    edge = ' stroke="#fff" stroke-width="0.5"' if w > 3 and not faint else ""
    look = f'fill="{colour}"{edge}' + (' fill-opacity="0.25"' if faint else "")
    box = f'x="{x:.2f}" y="{y:.1f}" width="{max(w, 0.3):.2f}" height="{h:.1f}"'
    return f"<rect {box} {look}><title>{escape(title)}</title></rect>"


def _legend(
    labels: list[str], left: float, y: float, colours: Sequence[str] = COLOURS, width: float = inf
) -> list[str]:
    """Lines of coloured squares with labels, each up to `width` pixels wide."""
    lines, x = [""], left
    for label, colour in zip(labels, colours, strict=False):
        wide = 13 + _GLYPH * 11 * len(label) + 12
        if x + wide > width:
            lines.append("")
            x = left
        lines[-1] += _rect(x, y - 8, 9, 9, colour, label) + _text(x + 13, y, label)
        x += wide
    return lines
