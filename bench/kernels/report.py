"""The lines of a run as text, CSV and JSON. A figure whose check failed is in none of them."""

from collections.abc import Sequence

from bench import table
from bench.kernels.measure import Line
from bench.table import number

HEAD = (
    f"# {'':20} {'':16} {'':28} {'ours':>10} {'of roofline, %':>22} {'PyTorch':>10} {'/ ours':>20} "
    f"{'error':>8}\n"
    f"# {'op':20} {'pass':16} {'shape':28} {'ms':>10} {'':>22} {'ms':>10}"
)
_COLUMNS = (
    "op which shape dtype bytes flops bound roofline_ms ours_ms ours_fastest_ms of_roofline of_roofline_low "
    "of_roofline_high torch_ms torch_fastest_ms torch_ratio torch_ratio_low torch_ratio_high error "
    "torch_error allowed wrong"
).split()


def record(line: Line) -> dict:
    """A line by the names of its columns. Ratios: the other's time over ours; quartiles are low and high."""
    case, nothing = line.case, (None, None, None)
    torch = line.over_ours("torch") or nothing
    times = [line.time("ours"), line.fastest("ours")]
    return dict(
        zip(
            _COLUMNS,
            (
                *(case.op, case.which, case.shape, line.dtype, case.nbytes, case.flops, line.bound),
                *map(_ms, [line.least, *times]),
                *map(_short, line.of_roofline() or nothing),
                *(_ms(line.time("torch")), _ms(line.fastest("torch")), *map(_short, torch)),
                *(line.errors.get(who) for who in ("ours", "torch")),
                *(line.allowed, " ".join(who for who in line.errors if not line.right(who))),
            ),
            strict=True,
        )
    )


def text(line: Line) -> str:
    """A line of the table."""
    r = record(line)
    percent = [None if value is None else 100 * value for value in line.of_roofline() or (None,) * 3]
    roofline = f"{_spread(*percent, 0):>16} {r['bound']}"
    theirs = _spread(r["torch_ratio"], r["torch_ratio_low"], r["torch_ratio_high"], 2)
    wrong = f"  WRONG: {r['wrong']}" if r["wrong"] else ""
    return (
        f"  {r['op']:20} {r['which']:16} {r['shape']:28} {number(r['ours_ms'], 10)} {roofline} "
        f"{number(r['torch_ms'], 10)} {theirs:>20} {r['error']:8.0e}{wrong}"
    )


def as_csv(lines: Sequence[Line]) -> str:
    """With a head, one line each."""
    return table.as_csv(_COLUMNS, map(record, lines))


def verdict(lines: Sequence[Line]) -> str:
    """One line: what was wrong, what is slower than PyTorch, what is below half of its roofline."""
    wrong = [line.case.name for line in lines if not all(map(line.right, line.errors))]
    ratios = [found[0] for line in lines if (found := line.over_ours("torch"))]
    parts = [found[0] for line in lines if (found := line.of_roofline())]
    return (
        f"# {len(lines)} lines, wrong: {', '.join(wrong) or 'none'}; "
        f"slower than PyTorch: {sum(ratio < 1 for ratio in ratios)} of {len(ratios)}; "
        f"below half of the roofline: {sum(part < 0.5 for part in parts)} of {len(parts)}"
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{1e3 * seconds:.5g}")


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _spread(middle: float | None, low: float | None, high: float | None, digits: int) -> str:
    if middle is None:
        return "-"
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
