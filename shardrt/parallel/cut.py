"""Where a list of costs is split into neighbouring parts: numbers only, no models and no ranks."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Where each of `parts` parts begins, none of them empty.

    The largest sum of a part is as small as can be; of all such splits the sum of squares is.

    Args:
        costs: at least as many as parts, none negative.
    """
    limit = _best(costs, parts, inf, lambda before, cost: max(before, cost))[0]
    return _best(costs, parts, limit, lambda before, cost: before + cost * cost)[1]


def _best(
    costs: Sequence[float], parts: int, limit: float, joined: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """(the least value of a split whose parts are within `limit`, that split).

    joined(value of the parts before, cost of one more): the value of both.
    """
    sums = [0.0, *accumulate(costs)]
    best: list[tuple[float, list[int]]] = [(0.0, [])] + [(inf, [])] * len(costs)  # of the first 0, 1, 2, ...
    for _ in range(parts):
        before, best = best, [(inf, [])]
        for stop in range(1, len(sums)):
            found = [
                (joined(before[start][0], cost), before[start][1], start)
                for start in range(stop)
                if (cost := sums[stop] - sums[start]) <= limit and before[start][0] < inf
            ]
            value, begins, start = min(found, default=(inf, [], 0))
            best.append((value, [*begins, start]))
    return best[-1]


def loop(stages: int, ranks: int) -> list[int]:
    """The rank of each stage: 0, 1, 2, 0, 1, 2."""
    return [stage % ranks for stage in range(stages)]


def vee(stages: int, ranks: int) -> list[int]:
    """The rank of each stage, there and back: 0, 1, 2, 2, 1, 0."""
    once = [*range(ranks), *reversed(range(ranks))]
    return [once[stage % len(once)] for stage in range(stages)]
