"""Few combinations in the place of all of them."""

from collections.abc import Collection, Hashable
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
