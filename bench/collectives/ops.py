"""What each collective takes, gives, and counts as bandwidth. Knows no communicator and no library.

All of them go from a `source` to a `target`, as in MPI. In place, one is part of the other. Formulas and the
meaning of size and count are those of nccl-tests (doc/PERFORMANCE.md).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.collectives.values import values
from shardrt import dtypes

ROOT = 0  # of a broadcast
PLACES = ("out", "in")
DTYPES = ("float32", "bfloat16", "float64", "int64")
Expected = Callable[[int, int, int, np.ndarray, int, str], np.ndarray]


@dataclass(frozen=True)
class Op:
    """One collective. `of_slices`: its count is that of a rank's slice, and its size that of all slices.

    bus: what the algorithm bandwidth is multiplied by, for so many ranks. expected: the target's elements at
    some indices, from (rank, ranks, count, indices, round, dtype). sums: what it adds it widens to float32.
    """

    name: str
    of_slices: bool
    whole_source: bool
    whole_target: bool
    bus: Callable[[int], float]
    expected: Expected
    places: tuple[str, ...] = PLACES
    dtypes: tuple[str, ...] = DTYPES
    sums: bool = False

    def source_size(self, count: int, ranks: int) -> int:
        """Elements that a rank puts in."""
        return count * ranks if self.whole_source else count

    def target_size(self, count: int, ranks: int) -> int:
        """Elements that a rank gets."""
        return count * ranks if self.whole_target else count


@dataclass(frozen=True)
class Case:
    """One line of the table. nbytes: of the larger of source and target."""

    op: Op
    dtype: str
    place: str
    nbytes: int
    ranks: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element on the wire."""
        return dtypes.storage(self.dtype).itemsize

    @property
    def count(self) -> int:
        """Elements as the library's call takes them. Raises ValueError where the size does not divide."""
        parts = self.itemsize * (self.ranks if self.op.of_slices else 1)
        if self.nbytes % parts:
            ranks = f" for each of {self.ranks} ranks" if self.op.of_slices else ""
            raise ValueError(
                f"-b, -e, -f: {self.nbytes} bytes are no whole number of {self.dtype}{ranks}, for "
                f"{self.op.name}; take multiples of {parts} bytes"
            )
        return self.nbytes // parts

    @property
    def source_dtype(self) -> np.dtype:
        """Of the array that is put in: the bits of bfloat16 are uint16."""
        return dtypes.storage(self.dtype)

    @property
    def target_dtype(self) -> np.dtype:
        """Of the array that comes out: sums of bfloat16 are float32."""
        if self.op.sums and self.dtype in dtypes.LOW:
            return np.dtype(np.float32)
        return self.source_dtype

    def expected(self, rank: int, start: int, stop: int, round_: int) -> np.ndarray:
        """Elements [start, stop) of what must come out on a rank, in the target's dtype."""
        indices = np.arange(start, stop, dtype=np.uint64)
        return self.op.expected(rank, self.ranks, self.count, indices, round_, self.target_name)

    @property
    def target_name(self) -> str:
        """`target_dtype` by its name here: bfloat16 that only travels stays bfloat16."""
        return self.dtype if self.target_dtype == self.source_dtype else str(self.target_dtype)


def _gathered(rank: int, ranks: int, count: int, indices: np.ndarray, round_: int, dtype: str) -> np.ndarray:
    return values(indices // np.uint64(count), indices % np.uint64(count), round_, dtype)


def _reduced(rank: int, ranks: int, count: int, indices: np.ndarray, round_: int, dtype: str) -> np.ndarray:
    return sum(values(peer, indices, round_, dtype) for peer in range(ranks))


def _scattered(rank: int, ranks: int, count: int, indices: np.ndarray, round_: int, dtype: str) -> np.ndarray:
    return _reduced(rank, ranks, count, indices + np.uint64(rank * count), round_, dtype)


def _sent(rank: int, ranks: int, count: int, indices: np.ndarray, round_: int, dtype: str) -> np.ndarray:
    return values(ROOT, indices, round_, dtype)


def _exchanged(rank: int, ranks: int, count: int, indices: np.ndarray, round_: int, dtype: str) -> np.ndarray:
    peer, index = indices // np.uint64(count), indices % np.uint64(count)
    return values(peer, index + np.uint64(rank * count), round_, dtype)


def _ring(ranks: int) -> float:
    return (ranks - 1) / ranks


NUMBERS = ("float32", "float64", "int64")  # that an all_reduce adds; it does not take bits of bfloat16
OPS = {
    op.name: op
    for op in (
        Op("all_gather", True, False, True, _ring, _gathered),
        Op("reduce_scatter", True, True, False, _ring, _scattered, sums=True),
        Op("all_reduce", False, False, False, lambda ranks: 2 * _ring(ranks), _reduced, dtypes=NUMBERS),
        Op("broadcast", False, False, False, lambda ranks: 1.0, _sent),
        Op("all_to_all", True, True, True, _ring, _exchanged, places=("out",)),
    )
}
