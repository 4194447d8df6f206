"""Extents of one whole: their overlaps, whether some are the whole, and values put into the whole.

Files and their readers need this.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from shardrt.nn.extents import Extent, Extents, contiguous, spans

__all__ = ["miscounted", "overlaps", "within"]


def overlaps(extents: Extents, other: Extent) -> Iterator[tuple[int, int, int]]:
    """(place, other_place, count) of each overlap: `count` neighbours, from there on in each of them."""
    place = 0
    for extent in extents:
        for number in within(extent, other.first, other.stop):
            first, at = extent.begin(number), place + number * extent.length
            for theirs in within(other, first, first + extent.length):
                begin, there = other.begin(theirs), theirs * other.length
                low, high = max(first, begin), min(first + extent.length, begin + other.length)
                yield at + low - first, there + low - begin, high - low
        place += extent.size


def miscounted(pieces: Iterable[Extent], size: int) -> tuple[int, int] | None:
    """(element, in how many pieces it is) of the first of `size` that is not in exactly one; None if all are.

    Pieces of several runs have one stride, and no piece goes beyond `size`. Takes time in proportion to the
    number of pieces. With z**e for element e, a piece is the polynomial

        z**first * (1 - z**length) * (1 - z**(count * stride)) / ((1 - z) * (1 - z**stride))

    and pieces are the whole where their numerators, of four terms each, add up to the numerator of the whole.
    """
    pieces = list(pieces)
    stride = max((extent.stride for extent in pieces if extent.count > 1), default=1)
    terms: Counter[int] = Counter()
    for sign, all_extents in ((1, pieces), (-1, contiguous(0, size))):
        for extent in all_extents:
            first, length, across = extent.first, extent.length, extent.count * stride
            terms[first] += sign
            terms[first + length] -= sign
            terms[first + across] -= sign
            terms[first + across + length] += sign
    wrong = min((element for element, count in terms.items() if count), default=None)
    return None if wrong is None else (wrong, 1 + terms[wrong])


def within(extent: Extent, start: int, stop: int) -> range:
    """The numbers of the runs of which something lies in [start, stop)."""
    low = (start - extent.first - extent.length) // extent.stride + 1
    high = -((extent.first - stop) // extent.stride)
    return range(max(low, 0), min(high, extent.count))


def put(extents: Extents, whole: np.ndarray, values: np.ndarray) -> None:
    """Set the elements, in an array of the whole parameter, to `values` (1-D)."""
    flat = whole.reshape(-1)
    for place, first, length in spans(extents):
        flat[first : first + length] = values[place : place + length]
