"""The lines of a run as records and text. A figure whose check failed is in none of them."""

import statistics
from collections.abc import Sequence

import numpy as np

from ..harness.table import number
from .case import Case, Ceilings

HEAD = (
    f"# {'':20} {'':16} {'':28} {'ours':>10} {'of roofline, %':>22} {'PyTorch':>10} {'/ ours':>20} "
    f"{'error':>8}\n"
    f"# {'op':20} {'pass':16} {'shape':28} {'ms':>10} {'':>22} {'ms':>10}"
)


def record(
    case: Case,
    dtype: str,
    ceilings: Ceilings,
    allowed: float,
    errors: dict[str, float],
    seconds: dict[str, list[float]],
) -> dict:
    """A line by the names of its columns. Ratios: the other's time over ours; quartiles are low and high.

    errors: by contestant, of its largest number. seconds: of a call in each round, for those that were right.
    """
    least = ceilings.seconds(case)
    ours, theirs = seconds.get("ours", []), seconds.get("torch", [])
    parts = [least / own for own in ours]
    ratios = [their / own for their, own in zip(theirs, ours, strict=False)]
    return {
        "op": case.op,
        "which": case.which,
        "shape": case.shape,
        "dtype": dtype,
        "bytes": case.nbytes,
        "flops": case.flops,
        "bound": ceilings.bound(case),
        "roofline_ms": _short(1e3 * least, 5),
        **_times("ours", ours),
        **_quartiles("of_roofline", parts),
        **_times("torch", theirs),
        **_quartiles("torch_ratio", ratios),
        "error": errors["ours"],
        "torch_error": errors["torch"],
        "allowed": allowed,
        "wrong": " ".join(who for who, error in errors.items() if not error <= allowed),  # nan is wrong
    }


def text(line: dict) -> str:
    """A line of the table."""
    roofline = f"{_spread(line, 'of_roofline', 100, 0):>16} {line['bound']}"
    wrong = f"  WRONG: {line['wrong']}" if line["wrong"] else ""
    return (
        f"  {line['op']:20} {line['which']:16} {line['shape']:28} {number(line['ours_ms'], 10)} {roofline} "
        f"{number(line['torch_ms'], 10)} {_spread(line, 'torch_ratio', 1, 2):>20} {line['error']:8.0e}{wrong}"
    )


def verdict(lines: Sequence[dict]) -> str:
    """One line: what was wrong, what is slower than PyTorch, what is below half of its roofline."""
    wrong = [f"{line['op']} {line['which']}" for line in lines if line["wrong"]]
    ratios = [line["torch_ratio"] for line in lines if line["torch_ratio"]]
    parts = [line["of_roofline"] for line in lines if line["of_roofline"]]
    return (
        f"# {len(lines)} lines, wrong: {', '.join(wrong) or 'none'}; "
        f"slower than PyTorch: {sum(ratio < 1 for ratio in ratios)} of {len(ratios)}; "
        f"below half of the roofline: {sum(part < 0.5 for part in parts)} of {len(parts)}"
    )


def _times(who: str, seconds: list[float]) -> dict[str, float | None]:
    """Median over rounds, and the round that was disturbed least."""
    if not seconds:
        return {f"{who}_ms": None, f"{who}_fastest_ms": None}
    middle, least = 1e3 * statistics.median(seconds), 1e3 * min(seconds)
    return {f"{who}_ms": _short(middle, 5), f"{who}_fastest_ms": _short(least, 5)}


def _quartiles(name: str, values: list[float]) -> dict[str, float | None]:
    """Median and quartiles over rounds."""
    found = [_short(q, 4) for q in np.quantile(values, [0.5, 0.25, 0.75])] if values else [None] * 3
    return dict(zip((name, f"{name}_low", f"{name}_high"), found, strict=True))


def _short(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _spread(line: dict, name: str, scale: float, digits: int) -> str:
    if line[name] is None:
        return "-"
    middle, low, high = (f"{scale * line[name + end]:.{digits}f}" for end in ("", "_low", "_high"))
    return f"{middle} ({low} to {high})"
