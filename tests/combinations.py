"""Few combinations in the place of all, and many cases in one test where each takes less than a test."""

from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from itertools import combinations, product


def pairwise(*choices: Collection[Hashable]) -> list[tuple]:
    """Combinations of one of each of `choices` in which any two choices of different kinds meet; greedy."""

    def pairs(row: tuple) -> set:
        return set(combinations(enumerate(row), 2))

    every = list(product(*choices))
    missing = set().union(*map(pairs, every))
    chosen = []
    while missing:
        best = max(every, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


@contextmanager
def noting(*case: object) -> Iterator[None]:
    """What fails inside a with block says of which case it is."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case {', '.join(map(str, case))}")
        raise
