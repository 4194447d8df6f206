"""What each collective takes, gives, and counts as bandwidth. Knows no communicator and no library.

All of them go from a `source` to a `target`, as in MPI. In place, one is part of the other. Formulas and the
meaning of size and count are those of nccl-tests (doc/PERFORMANCE.md and GetBw in src/*.cu).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ..harness.values import NARROW, decoded, encoded, factors, sparse, storage, values
from .traffic import Traffic

PLACES = ("out", "in")
REDUCTIONS = ("sum", "prod", "min", "max", "avg", "mulsum")
NONE, NOBODY = "none", -1  # reduction and root of what has none, as nccl-tests prints them
ALIGNED = 16  # bytes of which nccl-tests makes a rank's slice a multiple
# by NumPy's name: nccl-tests' name
_WHOLE = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
DTYPES = {name: name for name in _WHOLE}
DTYPES |= {"float16": "half", "float32": "float", "float64": "double", "bfloat16": "bfloat16"}
DTYPES |= {"float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"}
_UNIT = {
    "bfloat16": 2.0**-8,
    "float16": 2.0**-11,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}  # roundoff
Expected = Callable[["Case", int, np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Op:
    """One collective. `of_slices`: its count is that of a rank's slice, and its size that of all slices.

    title: nccl-tests' name of it. bus: what the algorithm bandwidth is multiplied by, for so many ranks.
    expected: the target's elements at some indices, from (case, rank, indices, round); numbers where it
    reduces. from_root: only the root gives. to_root: only it gets. alg: the part of size that counts as
    moved.
    """

    name: str
    title: str
    of_slices: bool
    whole_source: bool
    whole_target: bool
    bus: Callable[[int], float]
    expected: Expected
    places: tuple[str, ...] = PLACES
    reduces: bool = False
    from_root: bool = False
    to_root: bool = False
    alg: Callable[[int], float] = lambda ranks: 1.0

    @property
    def rooted(self) -> bool:
        """Whether one rank has a role of its own."""
        return self.from_root or self.to_root


@dataclass(frozen=True)
class Case:
    """One place of a line of the table.

    nbytes: of the larger of source and target, a whole number of elements; of uneven ops that of the rank
    that has most. traffic: bytes from rank to rank, where they are uneven.
    """

    op: Op
    dtype: str
    place: str
    nbytes: int
    ranks: int
    reduction: str = NONE
    root: int = NOBODY
    traffic: Traffic | None = None

    @property
    def count(self) -> int:
        """Elements as the library's call takes them; of uneven ops those of a pair on average."""
        if self.traffic is not None:
            return self.traffic.per_pair // itemsize(self.dtype)
        return self.nbytes // (itemsize(self.dtype) * (self.ranks if self.op.of_slices else 1))

    def sent(self, rank: int) -> list[int]:
        """Elements that a rank sends to each rank, of an uneven op."""
        return [nbytes // itemsize(self.dtype) for nbytes in self.traffic.sent(rank)]

    def received(self, rank: int) -> list[int]:
        """Elements that it receives from each."""
        return [nbytes // itemsize(self.dtype) for nbytes in self.traffic.received(rank)]

    def source_size(self, rank: int) -> int:
        """Elements that a rank puts in."""
        if self.traffic is not None:
            return sum(self.sent(rank))
        return self.count * self.ranks if self.op.whole_source else self.count

    def target_size(self, rank: int) -> int:
        """Elements that a rank gets."""
        if self.traffic is not None:
            return sum(self.received(rank))
        return self.count * self.ranks if self.op.whole_target else self.count

    @property
    def tolerance(self) -> float:
        """Relative, of a mean of floats, which is no small integer.

        Of NARROW types two ranks' elements are multiplied by 1/n and added, and each of these rounds.
        """
        if self.reduction != "avg" or self.dtype in _WHOLE:
            return 0.0
        return 3 * _UNIT[self.dtype] if self.dtype in NARROW else 1e-7 * max(10, self.ranks)

    def scalar(self, rank: int) -> int:
        """What "mulsum" multiplies a rank's elements by before they are summed (NCCL's PreMulSum)."""
        return 1 + rank % 2 if self.reduction == "mulsum" else 1

    def gives(self, rank: int) -> bool:
        """Whether it puts anything in."""
        return not self.op.from_root or rank == self.root

    def gets(self, rank: int) -> bool:
        """Whether it gets anything out."""
        return not self.op.to_root or rank == self.root

    def given(self, rank: int | np.ndarray, indices: np.ndarray, round_: int) -> np.ndarray:
        """The elements that a rank puts in there."""
        if self.reduction == "prod":
            return encoded(factors(rank, self.ranks, indices, round_), self.dtype)
        if self.reduction in ("sum", "avg", "mulsum") and self.dtype in NARROW:
            return encoded(sparse(rank, self.ranks, indices, round_), self.dtype)
        return values(rank, indices, round_, self.dtype)

    def expected(self, rank: int, start: int, stop: int, round_: int, dtype: str = "") -> np.ndarray:
        """Elements [start, stop) of what must come out on a rank, as `dtype` (the case's).

        Of a mean the numbers, float64.
        """
        found = self.op.expected(self, rank, np.arange(start, stop, dtype=np.uint64), round_)
        return encoded(found, dtype or self.dtype) if self.op.reduces and not self.tolerance else found


def itemsize(dtype: str) -> int:
    """Bytes of an element on the wire."""
    return storage(dtype).itemsize


def rounded(op: Op, dtype: str, nbytes: int, ranks: int) -> int:
    """`nbytes` down to slices of a whole number of 16 bytes, or of elements where that is nothing."""
    parts = ranks if op.of_slices else 1
    aligned = nbytes // parts // ALIGNED * ALIGNED
    return parts * (aligned or nbytes // parts // itemsize(dtype) * itemsize(dtype))


def _gathered(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    count = np.uint64(case.count)
    return case.given(indices // count, indices % count, round_)


def _reduced(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    def part(peer: int) -> np.ndarray:
        numbers = decoded(case.given(peer, indices, round_), case.dtype)
        return numbers if case.reduction == "prod" else numbers * numbers.dtype.type(case.scalar(peer))

    parts = [part(peer) for peer in range(case.ranks)]
    if case.reduction == "avg" and case.tolerance:
        return sum(part.astype(np.float64) for part in parts) / case.ranks
    pairwise = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}
    found = reduce(pairwise.get(case.reduction, np.add), parts)
    return found // found.dtype.type(case.ranks) if case.reduction == "avg" else found


def _own_reduced(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    return _reduced(case, rank, indices + np.uint64(rank * case.count), round_)


def _of_root(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    return case.given(case.root, indices, round_)


def _own_of_root(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    return case.given(case.root, indices + np.uint64(rank * case.count), round_)


def _exchanged(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    count = np.uint64(case.count)
    return case.given(indices // count, indices % count + np.uint64(rank) * count, round_)


def _exchanged_unevenly(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    """Of each rank the elements behind those that it sends to lower ranks."""
    ends = np.cumsum(case.received(rank), dtype=np.uint64)
    peers = np.searchsorted(ends, indices, side="right")
    first = ends - np.array(case.received(rank), np.uint64)
    there = np.array([sum(case.sent(peer)[:rank]) for peer in range(case.ranks)], np.uint64)
    return case.given(peers, indices - first[peers] + there[peers], round_)


def _of_neighbour(case: Case, rank: int, indices: np.ndarray, round_: int) -> np.ndarray:
    return case.given((rank - 1) % case.ranks, indices, round_)


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _one(ranks: int) -> float:
    return 1.0


def _twice(ranks: int) -> float:
    return 2 * _others(ranks)


_OUT = ("out",)
OPS = {
    op.name: op
    for op in (
        Op("all_gather", "AllGather", True, False, True, _others, _gathered),
        Op("reduce_scatter", "ReduceScatter", True, True, False, _others, _own_reduced, reduces=True),
        Op("all_reduce", "AllReduce", False, False, False, _twice, _reduced, reduces=True),
        Op("broadcast", "Broadcast", False, False, False, _one, _of_root, from_root=True),
        Op("all_to_all", "AlltoAll", True, True, True, _others, _exchanged, places=_OUT),
        Op("alltoallv", "AlltoAllv", True, True, True, _others, _exchanged_unevenly, places=_OUT),
        Op("reduce", "Reduce", False, False, False, _one, _reduced, reduces=True, to_root=True),
        Op("gather", "Gather", True, False, True, _others, _gathered, to_root=True),
        Op("scatter", "Scatter", True, True, False, _others, _own_of_root, from_root=True),
        Op("sendrecv", "SendRecv", False, False, False, _one, _of_neighbour, places=_OUT),
        Op("hypercube", "HyperCube", True, False, True, _one, _gathered, alg=_others),
    )
}
