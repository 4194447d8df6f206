"""The few elementwise passes that the runtime itself makes, on flat arrays."""

import numpy as np

from shardrt.kernels.cost import Answer, Array, cost
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows

_BLOCK = 65536  # elements for which one answer is kept


@cost("first second -> out", flops=1)
def add(first: Array, second: Array, out: Array) -> None:
    """Compute out = first + second."""
    np.add(first, second, out=out)


@cost("x -> x", flops=1)
def scale_(x: Array, factor: float) -> None:
    """Scale in place: x *= factor."""
    np.multiply(x, x.dtype.type(factor), out=x)


@cost("x factor -> x", flops=1)
def scale_by_(x: Array, factor: Array) -> None:
    """Scale in place: x *= factor, one float64; x is not touched where it is 1."""
    if factor.item() != 1:
        scale_(x, factor.item())


@cost("x -> x", flops=2, value=Answer("finite", True), scratch=False)
def unscale_(x: Array, factor: float) -> bool:
    """Scale in place: x *= factor, in one pass with the answer: whether every element was finite before."""
    wrong = np.empty(-(-x.size // _BLOCK), np.int64)
    run_rows(_unscale_blocks, wrong.size, x.size, x, x.dtype.type(factor), wrong)
    return not wrong.any()


@exact
def _unscale_blocks(start, stop, x, factor, wrong):
    for block in range(start, stop):
        piece = x[block * _BLOCK : min((block + 1) * _BLOCK, x.size)]
        count = 0
        for i in range(piece.size):
            count += not np.isfinite(piece[i])
            piece[i] *= factor
        wrong[block] = count


@cost("x -> x", flops=2)
def clamp_(x: Array, limit: float) -> None:
    """Clip in place: x = min(max(x, -limit), limit); nan stays nan."""
    np.clip(x, -x.dtype.type(limit), x.dtype.type(limit), out=x)
