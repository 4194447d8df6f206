"""Counts of an all_to_all: how many elements each rank sends to each. Ranks compare them before data move.

A row of counts belongs to one rank: its received counts by rank, then its sent counts by rank.
"""

from collections.abc import Sequence
from itertools import accumulate, product

import numpy as np

from shardrt.comm.errors import CollectiveMismatch

Counts = tuple[int, ...] | None  # elements by peer; None: the same number for each peer

_SHOWN = 3  # pairs of ranks that a message lists


def row(received: Sequence[int], sent: Sequence[int], more: int = 0) -> np.ndarray:
    """The counts of one rank, int64, and one more word for the backend."""
    return np.array([*received, *sent, more], np.int64)


def compared(
    rows: Sequence[np.ndarray] | np.ndarray, number: int, tag: str, rank: int = 0
) -> list[list[int]]:
    """The table of counts from all ranks' rows: rank s sends table[s][r] elements to rank r.

    The error of rank 0 is the leader.

    Raises:
        CollectiveMismatch: for collective `number` of `tag`, if rank r expects another count.
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
    """The slice of each rank in an array with so many elements of each rank, in order of ranks."""
    return [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def equal(size: int, ranks: int) -> tuple[int, ...]:
    """The counts of `size` elements in equal parts."""
    return (size // ranks,) * ranks


class Queue:
    """The elements that a rank sends to the other ranks, in one sequence: first those for the next rank.

    So ranks that go through their queues at the same pace do not all read from, or wait for, one rank.
    """

    def __init__(self, rank: int, sent: Sequence[int]) -> None:
        order = [*range(rank + 1, len(sent)), *range(rank)]
        ends = [0, *accumulate(sent[peer] for peer in order)]
        self.size = ends[-1]  # elements
        self._parts = {peer: (ends[i], ends[i + 1]) for i, peer in enumerate(order)}

    def window(self, peer: int, start: int, stop: int) -> tuple[slice, slice] | None:
        """The elements for `peer` in the window [start, stop) of the queue; None if there are none.

        Returns:
            Two slices: of the peer's part, and of the window.
        """
        first, last = self._parts[peer]
        begin, end = max(first, start), min(last, stop)
        if begin >= end:
            return None
        return slice(begin - first, end - first), slice(begin - start, end - start)
