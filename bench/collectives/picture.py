"""The picture of a run: bus bandwidth over size, and with -I the percentiles of single calls."""

from collections.abc import Sequence
from pathlib import Path

from ..harness import picture
from ..harness.picture import Curve

_USUAL = ("none", "float32", "sum")  # left out of names
_PERCENTILES = ("p50", "p90", "p99")


def draw(lines: Sequence[dict], path: Path) -> None:
    """Draw what is right of the lines of a run."""
    sections: dict[str, list[dict]] = {}
    for line in lines:
        words = line["communicator"], line["op"], line["place"], line["dtype"], line["reduction"]
        name = " ".join(word for word in words if word not in _USUAL)
        sections.setdefault(name, []).append(line)
    each = any(line.get("each") for line in lines)
    made, axes = picture.figure(2 if each else 1)
    picture.curves(axes[0], _bandwidths(sections), "bus bandwidth, GB/s")
    if each:
        picture.curves(axes[1], _percentiles(sections), "time of a call, us", log=True)
    picture.save(made, path)


def _bandwidths(sections: dict[str, list[dict]]) -> dict[str, Curve]:
    """By section, ours and the raw library's: as much faster as its time is less."""
    found = {}
    for name, lines in sections.items():
        good = [line for line in lines if line["bus_gb_s"] is not None]
        found[name] = Curve([line["bytes"] for line in good], [line["bus_gb_s"] for line in good])
        both = [line for line in good if line["raw_us"]]
        if both:
            raw = [line["bus_gb_s"] * line["time_us"] / line["raw_us"] for line in both]
            found[f"{name}, raw"] = Curve([line["bytes"] for line in both], raw, dashed=True)
    return found


def _percentiles(sections: dict[str, list[dict]]) -> dict[str, Curve]:
    found = {}
    for name, lines in sections.items():
        good = [line for line in lines if line.get("each")]
        for percentile in _PERCENTILES if good else ():
            times = [line["each"][percentile] for line in good]
            found[f"{name}, {percentile}"] = Curve([line["bytes"] for line in good], times)
    return found
