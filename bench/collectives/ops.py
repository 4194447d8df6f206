"""What each collective takes, gives, and counts as bandwidth. Knows no communicator and no library.

All of them go from a `source` to a `target`, as in MPI. In place, one is part of the other. Formulas and the
meaning of size and count are those of nccl-tests (doc/PERFORMANCE.md; gather, scatter and sendrecv: src/).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from shardrt import dtypes

from ..harness.values import factors, values

PLACES = ("out", "in")
REDUCTIONS = ("sum", "prod", "min", "max", "avg")
NONE, NOBODY = "none", -1  # reduction and root of what has none, as nccl-tests prints them
_ALIGNED = 16  # bytes of which nccl-tests makes a rank's slice a multiple
# by NumPy's name: nccl-tests' name
DTYPES = {name: name for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64")}
DTYPES |= {"float16": "half", "float32": "float", "float64": "double", "bfloat16": "bfloat16"}
Expected = Callable[["Case", int, np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Op:
    """One collective. `of_slices`: its count is that of a rank's slice, and its size that of all slices.

    bus: what the algorithm bandwidth is multiplied by, for so many ranks. expected: the target's elements at
    some indices, from (case, rank, indices, round). from_root: only the root gives. to_root: only it gets.
    widens: the sums of 16-bit types are float32.
    """

    name: str
    of_slices: bool
    whole_source: bool
    whole_target: bool
    bus: Callable[[int], float]
    expected: Expected
    places: tuple[str, ...] = PLACES
    reduces: bool = False
    widens: bool = False
    from_root: bool = False
    to_root: bool = False

    @property
    def rooted(self) -> bool:
        """Whether one rank has a role of its own."""
        return self.from_root or self.to_root

    def source_size(self, count: int, ranks: int) -> int:
        """Elements that a rank puts in."""
        return count * ranks if self.whole_source else count

    def target_size(self, count: int, ranks: int) -> int:
        """Elements that a rank gets."""
        return count * ranks if self.whole_target else count


@dataclass(frozen=True)
class Case:
    """One line of the table. nbytes: of the larger of source and target, a whole number of elements."""

    op: Op
    dtype: str
    place: str
    nbytes: int
    ranks: int
    reduction: str = NONE
    root: int = NOBODY

    @property
    def count(self) -> int:
        """Elements as the library's call takes them."""
        return self.nbytes // (itemsize(self.dtype) * (self.ranks if self.op.of_slices else 1))

    @property
    def target_dtype(self) -> str:
        """Of what comes out, by name: sums of bfloat16 are float32."""
        return "float32" if self.op.widens and self.dtype in dtypes.LOW else self.dtype

    @property
    def tolerance(self) -> float:
        """A mean is no small integer: it is rounded."""
        return 1e-6 if self.reduction == "avg" else 0.0

    def gives(self, rank: int) -> bool:
        """Whether it puts anything in."""
        return not self.op.from_root or rank == self.root

    def gets(self, rank: int) -> bool:
        """Whether it gets anything out."""
        return not self.op.to_root or rank == self.root

    def given(self, rank: int | np.ndarray, indices: np.ndarray, round_: int, dtype: str = "") -> np.ndarray:
        """What a rank puts in there, as `dtype` (the case's)."""
        if self.reduction == "prod":
            return factors(rank, self.ranks, indices, round_, dtype or self.dtype)
        return values(rank, indices, round_, dtype or self.dtype)

    def expected(self, rank: int, start: int, stop: int, round_: int) -> np.ndarray:
        """Elements [start, stop) of what must come out on a rank, as `target_dtype`; a mean as float64."""
        return self.op.expected(self, rank, np.arange(start, stop, dtype=np.uint64), round_)


def itemsize(dtype: str) -> int:
    """Bytes of an element on the wire."""
    return dtypes.storage(dtype).itemsize


def rounded(op: Op, dtype: str, nbytes: int, ranks: int) -> int:
    """`nbytes` down to slices of a whole number of 16 bytes, or of elements where that is nothing."""
    parts = ranks if op.of_slices else 1
    aligned = nbytes // parts // _ALIGNED * _ALIGNED
    return parts * (aligned or nbytes // parts // itemsize(dtype) * itemsize(dtype))


def _gathered(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    count = np.uint64(case.count)
    return case.given(indices // count, indices % count, round_)


def _reduced(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    parts = [case.given(peer, indices, round_, case.target_dtype) for peer in range(case.ranks)]
    if case.reduction == "avg":
        return sum(part.astype(np.float64) for part in parts) / case.ranks
    pairwise = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
    return reduce(pairwise[case.reduction], parts)


def _own_reduced(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    return _reduced(case, rank, indices + np.uint64(rank * case.count), round_)


def _of_root(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    return case.given(case.root, indices, round_)


def _own_of_root(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    return case.given(case.root, indices + np.uint64(rank * case.count), round_)


def _exchanged(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    count = np.uint64(case.count)
    return case.given(indices // count, indices % count + np.uint64(rank) * count, round_)


def _of_neighbour(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    return case.given((rank - 1) % case.ranks, indices, round_)


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _one(ranks: int) -> float:
    return 1.0


OPS = {
    op.name: op
    for op in (
        Op("all_gather", True, False, True, _others, _gathered),
        Op("reduce_scatter", True, True, False, _others, _own_reduced, reduces=True, widens=True),
        Op("all_reduce", False, False, False, lambda ranks: 2 * _others(ranks), _reduced, reduces=True),
        Op("broadcast", False, False, False, _one, _of_root, from_root=True),
        Op("all_to_all", True, True, True, _others, _exchanged, places=("out",)),
        Op("reduce", False, False, False, _one, _reduced, reduces=True, to_root=True),
        Op("gather", True, False, True, _others, _gathered, to_root=True),
        Op("scatter", True, True, False, _others, _own_of_root, from_root=True),
        Op("sendrecv", False, False, False, _one, _of_neighbour, places=("out",)),
    )
}
