"""Numbers quantised in blocks to 8 or 4 bits, bitwise as on the CPU. One warp has a block at a time."""

import numpy as np

from shardrt.kernels import packed as form
from shardrt.kernels.cuda._launch import Array, blocks_for, launch


def pack(x: Array, out: Array, bits: int, block: int) -> None:
    """Quantise x (count,), float32, into out (packed_bytes(count, bits, block),), uint8. As on the CPU."""
    ends = _ends(x.size, bits, block)
    args = (x, out[:ends].view(np.uint32), out[ends:], x.size, block)
    _run("pack", bits, x.size, args)


def unpack(packed: Array, out: Array, bits: int, block: int) -> None:
    """Write the numbers of packed (rows, bytes) to out (rows * count,), float32: one row after the other."""
    rows, nbytes = packed.shape
    count = out.size // rows
    _run("unpack", bits, count, (packed, out, nbytes, _ends(count, bits, block), count, block), rows)


def sum_rows(packed: Array, out: Array, bits: int, block: int, scale: float, accumulate: bool) -> None:
    """Set out (count,) = (out if `accumulate`) + scale * the sum of packed's rows, in order, in float32."""
    rows, nbytes = packed.shape
    ends = _ends(out.size, bits, block)
    args = (packed, out, rows, nbytes, ends, out.size, block, np.float32(scale), bool(accumulate))
    _run("sum_rows", bits, out.size, args)


def subtract(packed: Array, x: Array, bits: int, block: int) -> None:
    """Subtract the numbers of packed (bytes,) from x (count,): the error is left. A nan block leaves 0."""
    _run("subtract", bits, x.size, (packed, x, _ends(x.size, bits, block), x.size, block))


def _ends(count: int, bits: int, block: int) -> int:
    """Bytes of the scales, behind which the codes begin. Raises ValueError for bits and block."""
    form.check(bits, block)
    return 4 * form.blocks_of(count, block)


def _run(function: str, bits: int, count: int, args: tuple, rows: int = 1) -> None:
    launch("quantise", function, np.float32, (blocks_for(count, 8), rows), args, CODES=str(bits))
