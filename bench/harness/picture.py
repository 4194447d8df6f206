"""Pictures of figures, by matplotlib, which is imported when one is drawn: --picture FILE."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_SUFFIXES = (".png", ".svg")


class Curve(NamedTuple):
    """y over x; dashed for what is compared with."""

    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def add_option(add: Callable, what: str) -> None:
    """Add --picture FILE."""
    add("--picture", type=Path, metavar="FILE", help=f"draw {what}: a .png or .svg file")


def check(options: argparse.Namespace) -> None:
    """Raise ValueError where no picture could be written."""
    path = options.picture
    if path is not None and (path.suffix not in _SUFFIXES or not path.absolute().parent.is_dir()):
        raise ValueError(f"--picture: must be a .png or .svg file in a folder that exists, got {path}")


def curves(axes: Any, found: Mapping[str, Curve], ylabel: str, *, log: bool = False) -> None:
    """Draw curves over bytes into one of matplotlib's axes; log: the y axis, too."""
    colors: dict[str, Any] = {}
    for name, curve in found.items():
        color = colors.setdefault(name.removesuffix(", raw"), None)
        style = {"linestyle": "--", "marker": "x"} if curve.dashed else {"marker": "o"}
        (line,) = axes.plot(curve.x, curve.y, label=name, markersize=3, color=color, **style)
        colors[name.removesuffix(", raw")] = line.get_color()
    axes.set_xscale("log", base=2)
    if log:
        axes.set_yscale("log")
    sizes = sorted({x for curve in found.values() for x in curve.x})
    ticks = sizes[:: max(1, -(-len(sizes) // 8))]
    axes.set_xticks(ticks, [short(x) for x in ticks])
    axes.set(xlabel="bytes", ylabel=ylabel)
    axes.grid(alpha=0.3)
    if found:
        axes.legend(fontsize="small")


def short(nbytes: float) -> str:
    """64, 4K, 1M, 2G: powers of 1024."""
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:g}{unit}"
    return f"{nbytes:g}"


def figure(columns: int, rows: int = 1) -> tuple[Any, Sequence[Any]]:
    """A figure and its axes, row by row."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(5.2 * columns, 3.6 * rows), layout="constrained")
    return made, made.subplots(rows, columns, squeeze=False).ravel()


def save(made: Any, path: Path) -> None:
    """Write a figure; the same figures give the same SVG."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "shardrt"}):
        made.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
