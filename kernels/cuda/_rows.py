"""How rows are shared out among threads, for the kernels that begin with rows.cuh."""

from typing import NamedTuple

from shardrt.kernels.cuda._launch import THREADS, Array, vectors

_WARP, _HELD = 32, 8  # as in rows.cuh
_WIDEST = 512  # threads of a block that reads its row from memory
_BLOCKS = 512  # of sums over rows, about: more than a GPU runs at once, not too many partial sums


class Split(NamedTuple):
    """Which of a kernel's three forms runs, on what."""

    form: str
    grid: int
    threads: int
    vectors: bool


def split(rows: int, width: int, *arrays: Array) -> Split:
    """For arrays (rows, width) of one type, and others as wide: a warp or a block keeps a row, if it fits."""
    size = 16 // arrays[0].dtype.itemsize
    whole = vectors(*arrays) and width % size == 0
    if whole and width <= size * _HELD * _WARP:
        return Split("warps", -(-rows // 4), 4 * _WARP, True)
    if whole and width <= size * _HELD * THREADS:
        return Split("blocks", rows, THREADS, True)
    return read_again(rows, width, *arrays)


def read_again(rows: int, width: int, *arrays: Array) -> Split:
    """As split, for a block per row that reads it from memory as often as it needs it."""
    aligned = vectors(*arrays)
    pieces = -(-width * arrays[0].dtype.itemsize // 16) if aligned else width
    threads = min(_WIDEST, -(-max(pieces, 1) // _WARP) * _WARP)
    return Split("any", rows, threads, aligned)


def columns(rows: int, width: int, *arrays: Array) -> tuple[Split, int]:
    """How sums over rows are shared out, and the rows of a block, which depend on their number only.

    The forms are named after the vectors of columns that a thread keeps.
    """
    each = min(64, max(8, -(-rows // _BLOCKS)))
    blocks = -(-rows // each)
    size = 16 // arrays[0].dtype.itemsize
    pieces = width // size
    for kept, most in ((1, 256), (2, 512)):
        if vectors(*arrays) and width % size == 0 and pieces <= kept * most:
            threads = -(-pieces // (kept * _WARP)) * _WARP
            return Split(str(kept), blocks, threads, True), each
    return read_again(rows, width, *arrays)._replace(grid=blocks), each
