"""The lines of the sections copies, disk and optimizer: a rate over all ranks next to its ceiling."""

from collections.abc import Sequence
from typing import Any

COLUMNS = {
    "section": "<9",
    "name": "<43",
    "GB_s": "8.3f",
    "slowest_rank_GB_s": "18.3f",
    "ceiling": "<15",
    "ceiling_GB_s": "12.3f",
    "percent": "7.1f",
    "check": "<24",
}


def line(
    section: str,
    name: str,
    rates: Sequence[float] = (),
    *,
    wrong: int = 0,
    ceiling: str = "",
    ceiling_rate: float | None = None,
    check: str = "",
) -> dict[str, Any]:
    """A line by the names of its figures; None where a rank found a wrong byte, or nothing was measured.

    rates: bytes per second of each rank; their sum counts. wrong: ranks whose check failed.
    ceiling_rate: bytes per second over all ranks, of what `ceiling` names.
    """
    total = sum(rates) if rates and not wrong else None
    return {
        "section": section,
        "name": name,
        "GB_s": None if total is None else total / 1e9,
        "slowest_rank_GB_s": None if total is None else min(rates) / 1e9,
        "ceiling": ceiling,
        "ceiling_GB_s": None if ceiling_rate is None else ceiling_rate / 1e9,
        "percent": 100 * total / ceiling_rate if total is not None and ceiling_rate else None,
        "check": check,
        "wrong": wrong,
    }
