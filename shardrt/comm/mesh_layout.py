"""MeshLayout: along which digits of their numbers ranks differ.

On a mesh of shape (2, 4, 2) a rank's number has three digits, as a time of day has: its place along the last
axis counts 1, along the one before 2, along the first 8. A digit is a pair (what it counts, what the next one
counts), here (8, 16), (2, 8), (1, 2); a rank's is number % next // counts. MeshLayout that follow one another are
one: (2, 8) and (1, 2) are (1, 8). So a mesh that is folded another way has digits as well, (4, 16) and (1, 4)
here, and who asks whether, or where, ranks differ need not know by which axes.
"""

from math import prod
from typing import Any

import numpy as np

# The largest first; of no two one ends where another begins, or overlap.
MeshLayout = tuple[tuple[int, int], ...]


def layout_of(ranks: np.ndarray) -> MeshLayout | None:
    """Those in which a set of ranks takes every value, while others are equal; None where it is no such."""
    left = np.sort(ranks, axis=None)
    first, left = int(left[0]), left - left[0]
    found: MeshLayout = ()
    while left.size > 1:
        counts = int(left[1])
        values = np.argmin(left == np.arange(left.size) * counts) or left.size  # that follow one another
        following = counts * int(values)
        each = np.arange(values) * counts
        whole = left.size % values == 0 and (left.reshape(-1, values) % following == each).all()
        if not whole or first % following // counts:
            return None
        found, left = ((counts, following), *found), left[::values]
    return found


def union(*several: MeshLayout) -> MeshLayout:
    """Those in any of these."""
    merged: list[tuple[int, int]] = []
    for counts, following in sorted(digit for layout in several for digit in layout):
        if merged and counts <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], following)
        else:
            merged.append((counts, following))
    return tuple(reversed(merged))


def overlap(first: MeshLayout, second: MeshLayout) -> bool:
    """Whether ranks that differ in the one may be those that differ in the other."""
    return any(max(a[0], b[0]) < min(a[1], b[1]) for a in first for b in second)


def without(layout: MeshLayout, others: MeshLayout) -> MeshLayout:
    """What is left of digits. Raises ValueError where the others are no divisors of them."""
    for counts, following in others:
        pieces = [
            piece
            for low, high in layout
            for piece in ((low, min(high, counts)), (max(low, following), high))
            if piece[0] < piece[1]
        ]
        if any(high % low for low, high in pieces):
            raise ValueError(f"digits {others} of ranks cut across {layout}")
        layout = tuple(pieces)
    return union(layout)


def index_in(layout: MeshLayout, rank: Any) -> Any:
    """The place of a rank, or of each of an array of them, among those that differ in these digits."""
    number = rank * 0
    for counts, following in layout:
        number = number * (following // counts) + rank % following // counts
    return number


def size_of(layout: MeshLayout) -> int:
    """How many ranks differ in these digits."""
    return prod(following // counts for counts, following in layout)
