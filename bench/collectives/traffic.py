"""How much each rank sends to each in an uneven all-to-all, as alltoallv of nccl-tests has it.

Environment variables, as there: NCCL_TESTS_ALLTOALLV_SPREAD (0: the same to each rank, 1: in proportion to
the distance to it; 1), or NCCL_TESTS_ALLTOALLV_MATRIX_FILE, bytes from rank i to rank j in row i, column j,
multiplied by NCCL_TESTS_ALLTOALLV_MATRIX_SCALE (1).
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

_PREFIX = "NCCL_TESTS_ALLTOALLV_"
_ALIGNED = 16  # bytes of which each rank sends a multiple to each
_LARGEST = 1 << 20  # bytes of a matrix file
_MOST = 1e12  # by which its bytes are multiplied


@dataclass(frozen=True)
class Traffic:
    """rows[i][j]: bytes from rank i to rank j. per_pair: on average, 0 where a file says all."""

    rows: tuple[tuple[int, ...], ...]
    per_pair: int = 0

    def sent(self, rank: int) -> tuple[int, ...]:
        """Bytes that a rank sends to each."""
        return self.rows[rank]

    def received(self, rank: int) -> tuple[int, ...]:
        """Bytes that a rank receives from each."""
        return tuple(row[rank] for row in self.rows)

    @property
    def largest(self) -> int:
        """Bytes of the rank that sends or receives most."""
        return max(max(sum(self.sent(rank)), sum(self.received(rank))) for rank in range(len(self.rows)))


def traffic(ranks: int) -> Callable[[int], Traffic]:
    """Gives the traffic for a size in bytes. Raises ValueError for what the environment says wrongly."""
    file = os.environ.get(f"{_PREFIX}MATRIX_FILE")
    if file:
        found = of_matrix(_matrix(Path(file), ranks), _number("MATRIX_SCALE", 1.0, _MOST))
        return lambda nbytes: found
    return partial(spread, ranks, _number("SPREAD", 1.0, 1.0))


def spread(ranks: int, share: float, nbytes: int) -> Traffic:
    """Of `nbytes` that each rank sends, `share` in proportion to distance, the rest evenly."""
    per_pair = nbytes // ranks // _ALIGNED * _ALIGNED
    total, distances = per_pair * ranks, ranks * (ranks - 1) // 2

    def to(distance: int) -> int:
        near, far = total / ranks, distance * total / distances  # in this order, for equal rounding
        return int((1 - share) * near + share * far) // _ALIGNED * _ALIGNED

    if ranks == 1:
        return Traffic(((total,),), per_pair)
    rows = tuple(tuple(to((j - i) % ranks) for j in range(ranks)) for i in range(ranks))
    return Traffic(rows, per_pair)


def of_matrix(rows: list[list[float]], scale: float) -> Traffic:
    """Bytes as a file has them, scaled."""
    return Traffic(tuple(tuple(int(value * scale) // _ALIGNED * _ALIGNED for value in row) for row in rows))


def _number(name: str, default: float, most: float) -> float:
    text = os.environ.get(f"{_PREFIX}{name}", "")
    try:
        number = float(text) if text else default
    except ValueError:
        number = math.nan
    if not 0 <= number <= most:
        raise ValueError(f"{_PREFIX}{name}: must be a number from 0 to {most:g}, got {text!r}")
    return number


def _matrix(file: Path, ranks: int) -> list[list[float]]:
    """The first rows and columns of a file of numbers, one for each rank."""
    name = f"{_PREFIX}MATRIX_FILE {file}"
    if file.exists() and not file.is_file():
        raise ValueError(f"{name}: is no regular file")
    if file.stat().st_size > _LARGEST:
        raise ValueError(f"{name}: is larger than {_LARGEST} bytes")
    try:
        rows = [[float(word) for word in line.split()] for line in file.read_text("ascii").splitlines()]
    except ValueError:
        raise ValueError(f"{name}: must hold numbers alone") from None
    rows = [row for row in rows if row]
    if len(rows) < ranks or any(len(row) != len(rows) for row in rows):
        raise ValueError(f"{name}: must be a square of at least {ranks} rows")
    if not all(0 <= value < 1 << 50 for row in rows for value in row):
        raise ValueError(f"{name}: must hold bytes, from 0 to 2^50")
    return [row[:ranks] for row in rows[:ranks]]
