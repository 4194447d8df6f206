"""The lines of a run as records, and as text in nccl-tests' columns. A figure whose check failed is nowhere.

A record is of one place; a line of the table has both, each with nccl-tests' columns (src/util.cu), and then
what is ours: the time of the raw library's call, and the ratio to it.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from ..harness.fit import fit
from ..harness.stats import slowest, spikes, stats, straggler
from ..harness.table import number
from ..harness.timing import Measured
from .ops import DTYPES, OPS, Case

_CASE = ("communicator", "op", "place", "dtype", "reduction", "root")
_PLACES = {"out": "out-of-place", "in": "in-place"}
STAMP = "%Y-%m-%d %H:%M:%S"


def record(
    communicator: str,
    case: Case,
    found: Mapping[str, Measured],
    over_ranks: Callable[[np.ndarray], np.ndarray],
    skip: int = 0,
) -> dict:
    """A place of a line by names; times in microseconds, bandwidths in 10^9 bytes per second.

    found: of "ours", and of "raw" where there is such a call. over_ranks: chooses the reported rank. A rank's
    time is the median of its rounds; `fastest` is the round that was disturbed least; of differences and
    ratios the median counts. skip: calls that the figures of single calls leave out.
    """
    right = [who for who, each in found.items() if not each.wrong]
    rounds = {who: 1e6 * over_ranks(found[who].seconds) for who in right}
    ranks = {who: 1e6 * np.median(found[who].seconds, axis=1) for who in right}
    times = {who: float(over_ranks(ranks[who])) for who in right}
    ours = ranks.get("ours")
    rate = case.op.alg(case.ranks) * case.nbytes / times["ours"] / 1e3 if ours is not None else None
    both = len(right) == len(found) == 2
    fastest = {who: rounds[who].min() for who in right}
    wrong = {who: found[who].wrong if who in found else None for who in ("ours", "raw")}
    figures = {
        "time_us": times.get("ours"),
        "average_us": None if ours is None else ours.mean(),
        "min_us": None if ours is None else ours.min(),
        "max_us": None if ours is None else ours.max(),
        "algorithm_gb_s": rate,
        "bus_gb_s": None if rate is None else rate * case.op.bus(case.ranks),
        "wrong": wrong["ours"],
        "raw_us": times.get("raw"),
        "raw_wrong": wrong["raw"],
        "overhead_us": np.median(rounds["ours"] - rounds["raw"]) if both else None,
        "ratio": np.median(rounds["ours"] / rounds["raw"]) if both else None,
        "fastest_us": fastest.get("ours"),
        "raw_fastest_us": fastest.get("raw"),
    }
    what = communicator, case.op.name, case.place, case.dtype, case.reduction, case.root
    of_case = dict(zip(_CASE, what, strict=True)) | {"bytes": case.nbytes, "count": case.count}
    line = of_case | {name: _rounded(value) for name, value in figures.items()}
    for who, prefix in (("ours", ""), ("raw", "raw_")):
        if who in found and found[who].each is not None:
            line[f"{prefix}each"] = each_of(found[who].each, skip) if who in right else None
    return line


def each_of(seconds: np.ndarray, skip: int) -> dict:
    """Figures of single calls, from seconds (ranks, calls), in microseconds."""
    times = 1e6 * seconds
    counted = times[:, skip:]
    found = stats(slowest(counted))
    late = straggler(counted)
    figures = {name: round(value, 3) for name, value in (asdict(found) | {"cv_pct": found.cv_pct}).items()}
    return figures | {
        "skipped": skip,
        "spikes": {call + skip: ranks for call, ranks in spikes(counted).items()},
        "straggler": late.rank,
        "straggler_percent": round(100 * late.spread, 1),
        "times": np.round(times, 3).tolist(),
    }


class Columns(NamedTuple):
    """Which columns there are besides nccl-tests' first: those of -I, the raw library's, the time of day."""

    each: bool
    raw: bool
    stamps: bool


def head(columns: Columns) -> str:
    """nccl-tests' three lines, with ours behind."""
    names = ["time", "algbw", "busbw", "#wrong"] + ["i_min", "i_max", "i_p99", "i_cv%"] * columns.each
    units = ["(us)", "(GB/s)", "(GB/s)", ""] + ["(us)", "(us)", "(us)", "(%)"] * columns.each
    more = " (+ per-iteration)" if columns.each else ""
    titles = "".join(f"  {name + more:^{len(_cells(names)) - 2}}" for name in _PLACES.values())
    what = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}".format
    lines = [
        what("", "", "", "", "") + titles,
        what("size", "count", "type", "redop", "root") + 2 * _cells(names),
        what("(B)", "(elements)", "", "", "") + 2 * _cells(units),
    ]
    if columns.raw:
        lines[0] += "".join(f"  {name:>{_RAW - 2}}" for name in _PLACES.values())
        lines[1] += 2 * _raw_cells("raw", "ours/")
        lines[2] += 2 * _raw_cells("(us)", "raw")
    if columns.stamps:
        lines[1] += f"{'timestamp':>21}"
        lines[2] += f"{STAMP:>21}"
    return "\n".join(line.rstrip() for line in lines)


def text(places: Sequence[dict], columns: Columns) -> str:
    """A line of the table, from the records of its places."""
    by_place = {record["place"]: record for record in places}
    first = places[0]
    what = first["bytes"], first["count"], DTYPES[first["dtype"]], first["reduction"], first["root"]
    line = "{:12}  {:12}  {:>8}  {:>6}  {:6}".format(*what)
    line += "".join(_place(by_place.get(place), columns.each) for place in _PLACES)
    if columns.raw:
        line += "".join(_raw(by_place.get(place)) for place in _PLACES)
    return line + (f"{time.strftime(STAMP):>21}" if columns.stamps else "")


def _place(record: dict | None, each: bool) -> str:
    record = record or {}
    names = ("time_us", "algorithm_gb_s", "bus_gb_s")
    cells = [_short(record.get(name), width) for name, width in zip(names, (7, 6, 6), strict=True)]
    cells.append("N/A" if record.get("wrong") is None else str(record["wrong"]))
    if each:
        figures = record.get("each") or {}
        cells += [_short(figures.get(name), 7) for name in ("min", "max", "p99", "cv_pct")]
    return _cells(cells)


def _raw(record: dict | None) -> str:
    record = record or {}
    ratio = record.get("ratio")
    if record.get("raw_wrong"):
        return _raw_cells(f"{record['raw_wrong']} wrong", "-")
    return _raw_cells(_short(record.get("raw_us"), 7), "-" if ratio is None else f"{ratio:.2f}")


def _cells(cells: Sequence[str]) -> str:
    """Of nccl-tests' widths."""
    return "".join(f"  {cell:>{6 if place in (1, 2, 3) else 7}}" for place, cell in enumerate(cells))


def _raw_cells(time_: str, ratio: str) -> str:
    return f"  {time_:>9} {ratio:>5}"


_RAW = len(_raw_cells("", ""))


def _short(value: float | None, width: int) -> str:
    """As nccl-tests prints a figure: with as many decimals, two at most, as fit."""
    if value is None:
        return "-"
    shapes = (f"{value:.2f}", f"{value:.1f}", f"{value:.0f}", f"{value:.{int(width >= 7)}e}")
    return next((shape for shape in shapes if len(shape) <= width), shapes[-1])


def fits(lines: Sequence[dict]) -> list[dict]:
    """A fit for all that was timed at enough sizes: ours, and the raw call."""
    grouped: dict[tuple, list[dict]] = {}
    for line in lines:
        grouped.setdefault(tuple(line[name] for name in _CASE), []).append(line)
    found = []
    for key, group in grouped.items():
        for who, name in (("ours", "time_us"), ("raw", "raw_us")):
            good = [(line["bytes"], line[name]) for line in group if line[name]]
            result = fit(*zip(*good, strict=True)) if good else None
            if result is None:
                continue
            figures = {
                "latency_us": _rounded(result.latency),
                "gb_s": None if result.bandwidth is None else _rounded(result.bandwidth / 1e3),
                "worst_percent": round(100 * result.worst, 1),
            }
            found.append(dict(zip(_CASE, key, strict=True)) | {"of": who} | figures)
    return found


def fit_text(row: dict) -> str:
    """A line of the table of fits."""
    rate = "flat" if row["gb_s"] is None else f"{row['gb_s']:.2f} GB/s"
    return (
        f"# {_what(row)} {row['of']:4} {row['latency_us']:10.2f} us + size / {rate:12} "
        f"(off by {row['worst_percent']:.0f} % at most)"
    )


def each_texts(lines: Sequence[dict]) -> list[str]:
    """What -I found, a line for ours and for the raw call of each case; nothing without -I."""
    found = [
        (line, who, line.get(name)) for line in lines for who, name in (("ours", "each"), ("raw", "raw_each"))
    ]
    found = [(line, who, each) for line, who, each in found if each]
    if not found:
        return []
    head = f"# {'each call':50} {'bytes':>10}      {'p50':>9} {'p90':>9} {'p99':>9} {'cv%':>6} {'spikes':>6}"
    return ["#", f"{head}  slowest rank", *(_each_text(*each) for each in found)]


def _each_text(line: dict, who: str, each: dict) -> str:
    times = " ".join(number(each[name], 9) for name in ("p50", "p90", "p99"))
    late = f"{each['straggler']} by {each['straggler_percent']:.1f} %"
    return (
        f"# {_what(line):50} {line['bytes']:10} {who:4} {times} {each['cv_pct']:6.1f} "
        f"{len(each['spikes']):6}  {late}"
    )


def _what(r: dict) -> str:
    """The case of a line or of a fit."""
    dtype, reduction = DTYPES[r["dtype"]], r["reduction"]
    return f"{r['communicator']:6} {r['op']:14} {r['place']:5} {dtype:8} {reduction:6} {r['root']:4}"


def bus_of(lines: Sequence[dict]) -> float:
    """The mean bus bandwidth of all places that were right; 0 where there is none."""
    rates = [line["bus_gb_s"] for line in lines if line["bus_gb_s"] is not None]
    return sum(rates) / len(rates) if rates else 0.0


def least_bandwidth() -> float | None:
    """The average bus bandwidth below which a run fails: 0.9 of NCCL_TESTS_MIN_BW. Raises ValueError."""
    text = os.environ.get("NCCL_TESTS_MIN_BW")
    if not text:
        return None
    try:
        return 0.9 * float(text)
    except ValueError:
        raise ValueError(f"NCCL_TESTS_MIN_BW: must be GB/s, got {text!r}") from None


def bandwidths(lines: Sequence[dict]) -> dict[tuple[str, str], float]:
    """The average bus bandwidth of each communicator and op."""
    sections: dict[tuple[str, str], list[dict]] = {}
    for line in lines:
        sections.setdefault((line["communicator"], OPS[line["op"]].title), []).append(line)
    return {section: bus_of(own) for section, own in sections.items()}


def verdict(lines: Sequence[dict], least: float | None = None) -> list[str]:
    """nccl-tests' last lines: wrong elements and the average bus bandwidth; of several ops one for each."""
    checked = sum((line["wrong"], line["raw_wrong"]) != (None, None) for line in lines)
    wrong, raw_wrong = (sum(line[name] or 0 for line in lines) for name in ("wrong", "raw_wrong"))
    right = "FAILED" if wrong or raw_wrong else "OK"
    more = f" ({checked} of {len(lines)} places checked; raw calls: {raw_wrong})"
    found = [f"# {'Out of bounds values':20} : {wrong} {right if checked else 'unchecked'}{more}"]
    rates = bandwidths(lines)
    for section, rate in rates.items():
        name = f"  ({' '.join(section)})" if len(rates) > 1 else ""
        enough = "" if least is None else " OK" if rate >= least else " FAILED"
        found.append(f"# {'Avg bus bandwidth':20} : {rate:g}{enough}{name}")
    return found


def _rounded(value: float | None) -> float | None:
    """As many decimals as nccl-tests' JSON has."""
    return value if value is None or isinstance(value, int) else round(float(value), 6)
