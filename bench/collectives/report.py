"""The lines of a run as text, CSV and JSON. A figure whose check failed is in none of them."""

from collections.abc import Sequence

from bench import table
from bench.collectives.fit import Fit, fit
from bench.collectives.measure import Line
from bench.table import number

_HEADS = (
    (f"# {'':6} {'':14} {'':5} {'':8} {'':4} {'':4} {'bytes':>10} {'elements':>10} {'us, over ranks':>32} "),
    (f"# {'comm':6} {'op':14} {'place':5} {'type':8} {'red':4} {'root':>4} {'size':>10} {'count':>10} "),
)
HEAD = (
    f"{_HEADS[0]}{'GB/s':>15} {'#wrong':>10} {'us':>10} {'us':>9} {'times':>8}\n"
    f"{_HEADS[1]}{'time':>10} {'min':>10} {'max':>10} {'alg':>7} {'bus':>7} {'ours':>5} {'raw':>4} "
    f"{'raw call':>10} {'ours-raw':>9} {'ours/raw':>8}"
)
_CASE = "communicator op place dtype reduction root".split()
_COLUMNS = [
    *_CASE,
    *"bytes count time_us average_us min_us max_us algorithm_gb_s bus_gb_s wrong raw_us raw_wrong".split(),
    *"overhead_us ratio overhead_allowed_us fastest_us raw_fastest_us".split(),
]


def record(line: Line) -> dict:
    """A line by the names of its columns; times in microseconds, bandwidths in 10^9 bytes per second."""
    case = line.case
    times = (line.time, line.average, line.least, line.most)
    figures = (
        *_key(line),
        *(case.nbytes, case.count),
        *(_scaled(seconds, 1e6) for seconds in times),
        *(_scaled(rate, 1e-9) for rate in (line.algorithm, line.bus)),
        *(line.wrong, _scaled(line.raw, 1e6), line.raw_wrong),
        *(_scaled(line.overhead, 1e6), _scaled(line.ratio, 1)),
        *(_scaled(s, 1e6) for s in (line.overhead_allowed, line.fastest, line.raw_fastest)),
    )
    return dict(zip(_COLUMNS, figures, strict=True))


def text(line: Line) -> str:
    """A line of the table."""
    r = record(line)
    times = " ".join(number(r[name], 10) for name in ("time_us", "min_us", "max_us"))
    rates = " ".join(number(r[name], 7) for name in ("algorithm_gb_s", "bus_gb_s"))
    wrong = f"{_count(r['wrong']):>5} {_count(r['raw_wrong']):>4}"
    raw = f"{number(r['raw_us'], 10)} {number(r['overhead_us'], 9)} {_ratio(r['ratio']):>8}"
    what = (
        f"{r['communicator']:6} {r['op']:14} {r['place']:5} {r['dtype']:8} {r['reduction']:4} {r['root']:4}"
    )
    return f"  {what} {r['bytes']:10} {r['count']:10} {times} {rates} {wrong} {raw}"


def _key(line: Line) -> tuple:
    case = line.case
    return (line.communicator, case.op.name, case.place, case.dtype, case.reduction, case.root)


def as_csv(lines: Sequence[Line]) -> str:
    """With a head, one line each."""
    return table.as_csv(_COLUMNS, map(record, lines))


def fits(lines: Sequence[Line]) -> list[dict]:
    """A fit for all that was timed at enough sizes: ours, and the raw call."""
    groups: dict[tuple, list[Line]] = {}
    for line in lines:
        groups.setdefault(_key(line), []).append(line)
    found = []
    for key, group in groups.items():
        for who, name in (("ours", "time"), ("raw", "raw")):
            good = [(line.case.nbytes, getattr(line, name)) for line in group if getattr(line, name)]
            result = fit(*zip(*good, strict=True)) if good else None
            if result is not None:
                found.append(dict(zip(_CASE, key, strict=True)) | {"of": who} | _rounded(result))
    return found


def fit_text(row: dict) -> str:
    """A line of the table of fits."""
    rate = "flat" if row["gb_s"] is None else f"{row['gb_s']:.2f} GB/s"
    return (
        f"# {row['communicator']:6} {row['op']:14} {row['place']:5} {row['dtype']:8} {row['reduction']:4} "
        f"{row['root']:4} {row['of']:4} "
        f"{row['latency_us']:10.2f} us + size / {rate:12} (off by {row['worst_percent']:.0f} % at most)"
    )


def verdict(lines: Sequence[Line]) -> str:
    """One line: wrong elements, and how many overheads are above what we allow."""
    checked = [line for line in lines if (line.wrong, line.raw_wrong) != (None, None)]
    wrong = sum(line.wrong or 0 for line in lines)
    raw_wrong = sum(line.raw_wrong or 0 for line in lines)
    compared = [line for line in lines if line.overhead is not None]
    above = sum(line.overhead > line.overhead_allowed for line in compared)
    return (
        f"# wrong elements: {wrong}{' OK' if checked and not wrong else ''} "
        f"({len(checked)} of {len(lines)} lines checked; raw calls: {raw_wrong}); "
        f"more than 5 us + 1 % over the raw call: {above} of {len(compared)}"
    )


def _rounded(found: Fit) -> dict:
    return {
        "latency_us": round(1e6 * found.latency, 3),
        "gb_s": None if found.bandwidth is None else round(found.bandwidth / 1e9, 3),
        "worst_percent": round(100 * found.worst, 1),
    }


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else round(value * factor, 3)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
