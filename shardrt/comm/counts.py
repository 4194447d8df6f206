"""How many elements each rank sends to each in an all_to_all: ranks tell each other before they move any.

A row of counts is one rank's: what it receives from each rank, and then what it sends to each.
"""

from collections.abc import Sequence
from itertools import accumulate, product

import numpy as np

from shardrt.comm.errors import CollectiveMismatch

Counts = tuple[int, ...] | None  # elements by peer; None: as many for each

_SHOWN = 3  # pairs of ranks that a message lists


def row(received: Sequence[int], sent: Sequence[int], more: int = 0) -> np.ndarray:
    """The counts of one rank, int64, with one word more for the backend."""
    return np.array([*received, *sent, more], np.int64)


def compared(
    rows: Sequence[np.ndarray] | np.ndarray, number: int, tag: str, rank: int = 0
) -> list[list[int]]:
    """[s][r]: elements that rank s sends to rank r, from all ranks' rows.

    Raises CollectiveMismatch, of collective `number` for `what`, where rank r expects another number; on
    rank 0 it is the one that tells of it.
    """
    table = [row.tolist() for row in rows]
    ranks = len(table)
    received, sent = [row[:ranks] for row in table], [row[ranks : 2 * ranks] for row in table]
    if sent != [*map(list, zip(*received, strict=True))]:
        pairs = product(range(ranks), repeat=2)
        wrong = [(s, r) for s, r in pairs if sent[s][r] != received[r][s]]
        said = [
            f"rank {s} sends {sent[s][r]} elements to rank {r}, which expects {received[r][s]}"
            for s, r in wrong[:_SHOWN]
        ]
        more = [f"and {len(wrong) - _SHOWN} more pairs"] if len(wrong) > _SHOWN else []
        name = f"(unit {tag})" if tag else ""
        raise CollectiveMismatch(
            f"ranks differ in collective {number} of this communicator, all_to_all{name}: "
            f"{', '.join(said + more)}",
            is_leader=rank == 0,
        )
    return sent


def slices(counts: Sequence[int]) -> list[slice]:
    """Where the part of each rank lies in an array that holds so many elements of each, in order of rank."""
    return [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def equal(size: int, ranks: int) -> tuple[int, ...]:
    """The counts of `size` elements in equal parts."""
    return (size // ranks,) * ranks


class Queue:
    """What a rank sends to the others, one behind the other: to the next rank first.

    So ranks that go through theirs at the same pace do not all read from, or wait for, one.
    """

    def __init__(self, rank: int, sent: Sequence[int]) -> None:
        order = [*range(rank + 1, len(sent)), *range(rank)]
        ends = [0, *accumulate(sent[peer] for peer in order)]
        self.size = ends[-1]  # elements
        self._parts = {peer: (ends[i], ends[i + 1]) for i, peer in enumerate(order)}

    def window(self, peer: int, start: int, stop: int) -> tuple[slice, slice] | None:
        """Of elements [start, stop) of the queue those for `peer`, if any.

        As a slice of what it gets from this rank, and as one of the window.
        """
        first, last = self._parts[peer]
        begin, end = max(first, start), min(last, stop)
        if begin >= end:
            return None
        return slice(begin - first, end - first), slice(begin - start, end - start)
