"""Seven schedules: p ranks, m micro-batches and v stages per rank become a table.

Stages lie in a loop (rank r has r, r + p, r + 2p ..) or as a V (r and 2p - 1 - r). A schedule says only in
which order a rank turns to its stages; each stage takes micro-batches in ascending order, so their numbers
follow. The orders are those of PyTorch (torch/distributed/pipelining/schedules.py).

    table = schedule("Interleaved1F1B", 4, 8, 2)     # by PyTorch's names
    table.check().activations                        # at most, of each rank
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from numbers import Integral

from shardrt.parallel.table import PARTS, Action, Table, table_of

__all__ = ["SCHEDULES", "schedule"]

Order = list[tuple[str, int]]  # kind and stage

_LARGEST = 10**6  # forwards in a table: some seconds to make


def gpipe(p: int, m: int, v: int = 1) -> Table:
    """All forwards, then all backwards. GPipe, arXiv 1811.06965, section 2.2."""
    _fits("GPipe", p, m, v, stages=1)
    return _numbered(m, ([("F", r)] * m + [("B", r)] * m for r in range(p)))


def one_f_one_b(p: int, m: int, v: int = 1) -> Table:
    """As many forwards as there are ranks behind, then alternating one forward and one backward.

    PipeDream-flush: arXiv 2006.09503, section 3.2; 2104.04473, section 2.2.1.
    """
    _fits("1F1B", p, m, v, stages=1)
    forwards, backwards = ([[(kind, r)] * m for r in range(p)] for kind in "FB")
    return _numbered(m, map(_by_turns, range(p)[::-1], forwards, backwards))


def interleaved_1f1b(p: int, m: int, v: int = 1) -> Table:
    """1F1B over v stages per rank, in rounds: the micro-batches of a round go through a stage, then the next.

    arXiv 2104.04473, section 2.2.2, where a round has p micro-batches. Here, as in PyTorch, there are m // p
    rounds of m / (m // p), and m must divide so; fewer than p micro-batches are one round.
    """
    each = _round("Interleaved1F1B", p, m, v)
    rows = []
    for r in range(p):
        forwards, backwards = _rounds("F", p, m, v, r, each), _rounds("B", p, m, v, r, each)
        rows.append(_by_turns((v - 1) * each + 2 * (p - 1 - r), forwards, backwards))
    return _numbered(m, rows)


def zb_h1(p: int, m: int, v: int = 1) -> Table:
    """1F1B with late weight gradients, in the memory of its first rank: arXiv 2401.10241, section 2.1."""
    _fits("ZB-H1", p, m, v, stages=1)
    return interleaved_zero_bubble(p, m)


def interleaved_zero_bubble(p: int, m: int, v: int = 1) -> Table:
    """ZB-H1 over v stages per rank, in the rounds of Interleaved1F1B; PyTorch's own, by arXiv 2401.10241.

    A rank further back has as many fewer forwards ahead, and as many more weight gradients late: r on rank r.
    """
    each = _round("InterleavedZeroBubble", p, m, v)
    rows = []
    for r in range(p):
        forwards, inputs, weights = (_rounds(kind, p, m, v, r, each) for kind in "FIW")
        rows.append(_by_turns((v - 1) * each + p - 1 - r, forwards, inputs, [*[None] * r, *weights]))
    return _numbered(m, rows)


def zbv_zero_bubble(p: int, m: int, v: int = 2) -> Table:
    """Two stages per rank, as a V: the last stage is on the first rank, and its backward can begin at once.

    ZB-V, arXiv 2401.10241, section 6, made by hand for F = I = W and 2p - 1 micro-batches or more; of a table
    for so many, fewer leave out the others.
    """
    _fits("ZBVZeroBubble", p, m, v, stages=2)
    n = max(m, 2 * p - 1)
    rows = []
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        back_down, back_up = [("I", down), ("W", down)], [("I", up), ("W", up)]
        row = [("F", down)] * (2 * (p - r) - 1) + [("F", up), ("F", down)] * r
        row += [("F", up), *back_up] * (p - r)
        row += [("F", down), *back_down, ("F", up), *back_up] * (n - 2 * p + 1 + r)
        row += [*back_down, ("F", up), *back_up] * (p - 1 - r)
        row += [("I", down), ("I", up)] * r + back_down * (p - r) + [("W", up)] * r + [("W", down)] * r
        rows.append(row)
    return _numbered(m, rows)


def dual_pipe_v(p: int, m: int, v: int = 2) -> Table:
    """Two stages per rank, as a V, alternating a forward of one with a backward of the other.

    DualPipe, arXiv 2412.19437, section 3.2.1, cut in half: the eight steps of dualpipev.py in
    github.com/deepseek-ai/DualPipe. F and B of a pair run one after the other here. It takes 2p micro-batches
    or more.
    """
    _fits("DualPipeV", p, m, v, stages=2)
    if m < 2 * p:
        raise ValueError(f"DualPipeV: micro-batches must be at least {2 * p}, the number of stages, got {m}")
    rows = []
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        row = [("F", down)] * (2 * (p - 1 - r)) + [("F", down), ("F", up)] * (r + 1)
        row += [("I", up), ("W", up), ("F", up)] * (p - 1 - r)
        row += [("F", down), ("B", up), ("F", up), ("B", down)] * (m - 2 * p + r + 1)
        row += [("B", up), ("F", up), ("B", down)] * (p - 1 - r)
        ends = [up, down] * (r + 1)  # of the backwards of these, the second half is split
        row += [("B", stage) for stage in ends[: r + 1]] + [("I", stage) for stage in ends[r + 1 :]]
        late = [("W", stage) for stage in ends[r + 1 :] + [down] * (p - 1 - r)]
        rows.append(row + _by_turns(0, late, [("I", down)] * (p - 1 - r)))
    return _numbered(m, rows)


SCHEDULES: dict[str, Callable[..., Table]] = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "Interleaved1F1B": interleaved_1f1b,
    "ZB-H1": zb_h1,
    "InterleavedZeroBubble": interleaved_zero_bubble,
    "ZBVZeroBubble": zbv_zero_bubble,
    "DualPipeV": dual_pipe_v,
}


def schedule(name: str, p: int, m: int, v: int | None = None) -> Table:
    """The table of a schedule by PyTorch's name, "1F1B" or "Schedule1F1B", in letters of either case.

    Args:
        p: ranks.
        m: micro-batches.
        v: stages per rank; None: 2 for a V, else 1.

    Raises:
        ValueError: for names that there are not, and for numbers that the schedule can't be made of.
        TypeError: for other things.
    """
    if not isinstance(name, str):
        raise TypeError(f"schedule: name must be a string, got {type(name).__name__}")
    names = {known.lower(): known for known in SCHEDULES}
    known = names.get(name.lower().removeprefix("schedule"))
    if known is None:
        raise ValueError(f"schedule: unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    return SCHEDULES[known](p, m) if v is None else SCHEDULES[known](p, m, v)


def _fits(name: str, p: int, m: int, v: int, stages: int | None = None) -> None:
    for word, number in (("ranks", p), ("micro-batches", m), ("stages per rank", v)):
        if not isinstance(number, Integral):
            raise TypeError(f"{name}: the number of {word} must be an integer, got {number!r}")
        if number < 1:
            raise ValueError(f"{name}: the number of {word} must be at least 1, got {number}")
    if int(p) * int(m) * int(v) > _LARGEST:
        raise ValueError(
            f"{name}: {p} ranks, {m} micro-batches and {v} stages per rank are too large a table; their "
            f"product must be at most {_LARGEST}"
        )
    if stages is not None and v != stages:
        raise ValueError(f"{name}: stages per rank must be {stages}, got {v}")


def _round(name: str, p: int, m: int, v: int) -> int:
    """Micro-batches of a round: those that a rank takes through one stage before it turns to its next."""
    _fits(name, p, m, v)
    rounds = max(1, m // p)
    if m % rounds:
        raise ValueError(
            f"{name}: micro-batches must divide into {rounds} equal rounds on {p} ranks, as multiples of "
            f"{p} do; got {m}"
        )
    return m // rounds


def _rounds(kind: str, p: int, m: int, v: int, rank: int, each: int) -> Order:
    """A kind of action for all stages of a rank, in rounds; backwards begin at the last stage."""
    stages = range(rank, p * v, p) if kind == "F" else range(rank, p * v, p)[::-1]
    return [(kind, stages[i // each % v]) for i in range(m * v)]


def _by_turns(ahead: int, forwards: Order, *others: Sequence[tuple[str, int] | None]) -> Order:
    """So many forwards first; then alternating one forward and one of each of the others, to the end."""
    turns = zip_longest(forwards[ahead:], *others)
    return forwards[:ahead] + [action for turn in turns for action in turn if action is not None]


def _numbered(m: int, orders: Iterable[Order]) -> Table:
    """The table: a stage's actions of a kind are of micro-batches 0, 1 ..; those from m on are left out."""
    rows = []
    for order in orders:
        count: Counter[tuple[str, int]] = Counter()
        row = []
        for kind, stage in order:
            row.append(Action(kind, stage, count[PARTS[kind][0], stage]))
            count.update((part, stage) for part in PARTS[kind])
        rows.append([action for action in row if action.micro_batch < m])
    return table_of(rows)
