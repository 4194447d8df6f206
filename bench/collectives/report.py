"""The lines of a run as records and text. A figure whose check failed is in none of them."""

from collections.abc import Callable, Sequence

import numpy as np

from ..harness.fit import fit
from ..harness.table import number
from .ops import Case

_HEADS = (
    (f"# {'':6} {'':14} {'':5} {'':8} {'':4} {'':4} {'bytes':>10} {'elements':>10} {'us, over ranks':>32} "),
    (f"# {'comm':6} {'op':14} {'place':5} {'type':8} {'red':4} {'root':>4} {'size':>10} {'count':>10} "),
)
HEAD = (
    f"{_HEADS[0]}{'GB/s':>15} {'#wrong':>10} {'us':>10} {'us':>9} {'times':>8}\n"
    f"{_HEADS[1]}{'time':>10} {'min':>10} {'max':>10} {'alg':>7} {'bus':>7} {'ours':>5} {'raw':>4} "
    f"{'raw call':>10} {'ours-raw':>9} {'ours/raw':>8}"
)
_CASE = ("communicator", "op", "place", "dtype", "reduction", "root")


def record(
    communicator: str,
    case: Case,
    wrong: dict[str, int | None],
    seconds: dict[str, np.ndarray],
    over_ranks: Callable[[np.ndarray], np.ndarray],
) -> dict:
    """A line by the names of its columns; times in microseconds, bandwidths in 10^9 bytes per second.

    wrong: elements, of "ours" and "raw" where there is such a call; None where nothing was checked. seconds:
    of a call, (ranks, rounds). over_ranks: chooses the reported rank. A rank's time is the median of its
    rounds; `fastest` is the round that was disturbed least; of differences and ratios the median counts.
    """
    right = [who for who in wrong if not wrong[who]]
    rounds = {who: 1e6 * over_ranks(seconds[who]) for who in right}
    ranks = {who: 1e6 * np.median(seconds[who], axis=1) for who in right}
    times = {who: float(over_ranks(ranks[who])) for who in right}
    ours = ranks.get("ours")
    rate = case.nbytes / times["ours"] / 1e3 if ours is not None else None
    both = len(right) == len(wrong) == 2
    fastest = {who: rounds[who].min() for who in right}
    figures = {
        "time_us": times.get("ours"),
        "average_us": None if ours is None else ours.mean(),
        "min_us": None if ours is None else ours.min(),
        "max_us": None if ours is None else ours.max(),
        "algorithm_gb_s": rate,
        "bus_gb_s": None if rate is None else rate * case.op.bus(case.ranks),
        "wrong": wrong.get("ours"),
        "raw_us": times.get("raw"),
        "raw_wrong": wrong.get("raw"),
        "overhead_us": np.median(rounds["ours"] - rounds["raw"]) if both else None,
        "ratio": np.median(rounds["ours"] / rounds["raw"]) if both else None,
        "fastest_us": fastest.get("ours"),
        "raw_fastest_us": fastest.get("raw"),
    }
    what = communicator, case.op.name, case.place, case.dtype, case.reduction, case.root
    of_case = dict(zip(_CASE, what, strict=True)) | {"bytes": case.nbytes, "count": case.count}
    return of_case | {name: _rounded(value) for name, value in figures.items()}


def text(r: dict) -> str:
    """A line of the table."""
    times = " ".join(number(r[name], 10) for name in ("time_us", "min_us", "max_us"))
    rates = " ".join(number(r[name], 7) for name in ("algorithm_gb_s", "bus_gb_s"))
    wrong = f"{_or_dash(r['wrong']):>5} {_or_dash(r['raw_wrong']):>4}"
    ratio = _or_dash(r["ratio"] and f"{r['ratio']:.3f}")
    raw = f"{number(r['raw_us'], 10)} {number(r['overhead_us'], 9)} {ratio:>8}"
    return f"  {_what(r)} {r['bytes']:10} {r['count']:10} {times} {rates} {wrong} {raw}"


def _what(r: dict) -> str:
    """The case of a line or of a fit."""
    return (
        f"{r['communicator']:6} {r['op']:14} {r['place']:5} {r['dtype']:8} {r['reduction']:4} {r['root']:4}"
    )


def fits(lines: Sequence[dict]) -> list[dict]:
    """A fit for all that was timed at enough sizes: ours, and the raw call."""
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in _CASE), []).append(line)
    found = []
    for key, group in groups.items():
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


def verdict(lines: Sequence[dict]) -> str:
    """One line: wrong elements."""
    checked = sum((line["wrong"], line["raw_wrong"]) != (None, None) for line in lines)
    wrong, raw_wrong = (sum(line[name] or 0 for line in lines) for name in ("wrong", "raw_wrong"))
    return (
        f"# wrong elements: {wrong}{' OK' if checked and not wrong else ''} "
        f"({checked} of {len(lines)} lines checked; raw calls: {raw_wrong})"
    )


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else round(float(value), 3)


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
