"""What a replay took: a line for each collective, group size and size; and what was exposed, by name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from shardrt.untrusted import printable

from ..harness.table import number
from .plan import Plan
from .run import ALONE, FILLED, MODES, Round

HEAD = (
    f"# {'':14} {'':5} {'':>12} {'':>6} {'us of a step, mean over ranks':>43} {'us, in':>10} {'GB/s':>17}\n"
    f"# {'call':14} {'ranks':>5} {'bytes':>12} {'count':>6} {'trace':>10} {'alone':>10} {'gaps':>10} "
    f"{'compute':>10} {'exposed':>10} {'alone':>8} {'compute':>8} {'#wrong':>6}"
)
_NAMES = 12  # of exposed collectives that are printed
Row = dict[str, float | int | str | None]


@dataclass
class Measured:
    """What one rank measured: rounds by mode, and wrong elements by call (Item.what)."""

    plan: Plan
    rounds: dict[str, list[Round]]
    wrong: dict[str, int]
    exposed: list[np.ndarray] = field(default_factory=list)  # by round of FILLED, by item

    def __post_init__(self) -> None:
        self.exposed = [exposed(self.plan, each) for each in self.rounds.get(FILLED, [])]


def exposed(plan: Plan, played: Round) -> np.ndarray:
    """Seconds by item in which it communicated and nothing of its rank computed.

    Where several communicate at a time, each has its part of it: together they are all.
    """
    found = np.zeros(len(plan.items))
    ends = []
    for place, item in enumerate(plan.items):
        if not np.isnan(played.began[place]):
            what = -1 if item.key is None else place
            ends += [(played.began[place], 1, what), (played.ended[place], -1, what)]
    computing, running, before = 0, set(), 0.0
    for moment, change, place in sorted(ends):
        if running and not computing:
            for each in running:
                found[each] += (moment - before) / len(running)
        before = moment
        if place < 0:
            computing += change
        elif change > 0:
            running.add(place)
        else:
            running.discard(place)
    return found


def of_rank(measured: Measured, names: bool) -> list[Row]:
    """A row for each (call, ranks, bytes), or with `names` for each name as well: microseconds of a step."""
    items = measured.plan.items
    groups: dict[tuple, list[int]] = {}
    for place, item in measured.plan.communication:
        key = item.call, len(item.key.members), item.nbytes, item.name * names
        groups.setdefault(key, []).append(place)
    rows = []
    for (call, ranks, nbytes, name), places in groups.items():
        priced = [items[place].seconds for place in places]
        row: Row = {"call": call, "ranks": ranks, "bytes": nbytes, "count": len(places)}
        row |= {"name": name} if names else {}
        row["trace_us"] = None if None in priced else 1e6 * sum(priced)
        for mode in MODES:
            row[f"{mode}_us"] = _middle(
                float((each.ended - each.began)[places].sum()) for each in measured.rounds.get(mode, [])
            )
        row["exposed_us"] = _middle(float(each[places].sum()) for each in measured.exposed)
        whats = {items[place].what for place in places}
        row["wrong"] = sum(measured.wrong.get(what, 0) for what in whats)
        rows.append(row)
    return rows


def _middle(seconds: Iterable[float]) -> float | None:
    given = list(seconds)
    return 1e6 * median(given) if given else None


def together(ranks: Sequence[Sequence[Row]]) -> list[Row]:
    """Rows of all ranks by what they are: means over the ranks that have them; of what is wrong no figure."""
    same: dict[tuple, list[Row]] = {}
    for rows in ranks:
        for row in rows:
            key = tuple(row.get(name) for name in ("call", "ranks", "bytes", "name"))
            same.setdefault(key, []).append(row)
    return [_mean(rows) for rows in same.values()]


def _mean(rows: list[Row]) -> Row:
    found = dict(rows[0])
    found["count"] = round(fmean(row["count"] for row in rows))
    found["wrong"] = wrong = sum(row["wrong"] for row in rows)
    for name in [name for name in found if name.endswith("_us")]:
        known = [row[name] for row in rows if row[name] is not None]
        right = len(known) == len(rows) and (not wrong or name == "trace_us")
        found[name] = round(fmean(known), 3) if right else None
    for mode in (ALONE, FILLED):
        took = found[f"{mode}_us"]
        moved = found["bytes"] * fmean(row["count"] for row in rows)
        found[f"{mode}_gb_s"] = round(moved / took / 1e3, 3) if took and moved else None
    return found


def text(row: Row) -> str:
    """A line of the table."""
    times = " ".join(number(row[f"{name}_us"], 10) for name in ("trace", *MODES, "exposed"))
    rates = " ".join(number(row[f"{name}_gb_s"], 8) for name in (ALONE, FILLED))
    what = f"{row['call']:14} {row['ranks']:5} {row['bytes']:12} {row['count']:6}"
    return f"  {what} {times} {rates} {row['wrong']:6}"


def exposed_names(rows: Sequence[Row]) -> list[Row]:
    """Of rows by name, those that were exposed for more than a hundredth of all that was; the most first."""
    found = [row for row in rows if row["exposed_us"]]
    total = sum(row["exposed_us"] for row in found)
    found = [row for row in found if row["exposed_us"] > total / 100]
    return sorted(found, key=lambda row: -row["exposed_us"])


def exposed_text(rows: Sequence[Row], computes: bool) -> list[str]:
    """Lines for a reader; computes: whether the trace has anything that computes."""
    if not computes:
        return ["# exposed: all, for nothing computes in the trace"] if rows else []
    lines = []
    for row in rows[:_NAMES]:
        rates = (number(row[f"{name}_gb_s"], 0) for name in (ALONE, FILLED))
        share = f"{100 * row['exposed_us'] / row['compute_us']:.0f} % of its time"
        name = str(row["name"])
        what = f"{name if name.startswith(str(row['call'])) else row['call'] + ' ' + name}, {row['bytes']} B"
        lines.append(
            f"# exposed: {printable(what):44.80} {row['exposed_us']:10.2f} us, {share}; "
            "GB/s {} alone, {} with compute".format(*rates)
        )
    if len(rows) > _NAMES:
        lines.append(f"# exposed: and {len(rows) - _NAMES} others, in --json")
    return lines


def totals(rows: Sequence[Row], measured: Sequence[dict]) -> dict[str, float | None]:
    """Milliseconds of a step, mean over ranks: communication and all; and how they compare with the trace.

    measured: of each rank, what `of_all` gives.
    """
    names = [name for name in measured[0]]
    found: dict[str, float | None] = {}
    for name in names:
        known = [each[name] for each in measured if each[name] is not None]
        found[name] = float(f"{fmean(known):.6g}") if len(known) == len(measured) else None
    trace = found["trace_ms"]
    for mode in MODES:
        took = found[f"{mode}_ms"]
        found[f"{mode}_ratio"] = round(took / trace, 4) if trace and took is not None else None
    return found


def of_all(measured: Measured, rate: float) -> dict[str, float | None]:
    """A rank's communication in all, its step, and its rates of compute."""
    items = [item for _, item in measured.plan.communication]
    places = [place for place, _ in measured.plan.communication]
    priced = [item.seconds for item in items]
    found = {"trace_ms": None if None in priced else 1e3 * sum(priced)}
    for mode in MODES:
        rounds = measured.rounds.get(mode, [])
        took = [float((each.ended - each.began)[places].sum()) for each in rounds]
        found[f"{mode}_ms"] = 1e3 * median(took) if took else None
        found[f"{mode}_step_ms"] = 1e3 * median(each.seconds for each in rounds) if rounds else None
    filled = measured.rounds.get(FILLED, [])
    computing = [place for place, item in enumerate(measured.plan.items) if item.key is None]
    rates = [
        each.flops / spent / 1e9
        for each in filled
        if (spent := float(np.nansum((each.ended - each.began)[computing])))
    ]
    found["compute_gflop_s"] = median(rates) if rates else None
    found["compute_alone_gflop_s"] = rate / 1e9
    found["exposed_ms"] = 1e3 * median(float(each.sum()) for each in measured.exposed) if filled else None
    return found


def last_lines(total: dict[str, float | None]) -> list[str]:
    """The lines below the table."""
    shown = []
    for mode, name in zip(MODES, ("alone", "with its gaps", "with compute"), strict=True):
        if total[f"{mode}_ms"] is not None:
            ratio = total[f"{mode}_ratio"]
            ratio = "" if ratio is None else f" ({ratio:.3f} of the trace's)"
            shown.append(f"{total[f'{mode}_ms']:.3f} ms {name}{ratio}")
    lines = []
    if total["compute_gflop_s"] is not None:
        lines.append(
            f"# compute: {total['compute_alone_gflop_s']:.1f} GFLOP/s of a rank without communication, "
            f"{total['compute_gflop_s']:.1f} with it; exposed communication: {total['exposed_ms']:.3f} ms of "
            f"a step of {total['compute_step_ms']:.3f} ms"
        )
    trace = "has no times" if total["trace_ms"] is None else f"{total['trace_ms']:.3f} ms"
    return [*lines, f"# communication of a rank: in the trace {trace}; here {', '.join(shown)}"]
