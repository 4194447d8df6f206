"""The few elementwise passes that the runtime itself makes, on flat arrays."""

import numpy as np

from shardrt.kernels.cuda._launch import Array, accumulator, blocks_for, empty, launch, vectors


def add(first: Array, second: Array, out: Array) -> None:
    """Compute out = first + second."""
    _run("add", out, (first, second, out))


def scale_(x: Array, factor: float) -> None:
    """Scale in place: x *= factor."""
    _run("scale", x, (x, accumulator(x.dtype)(factor)))


def scale_by_(x: Array, factor: Array) -> None:
    """Scale in place: x *= factor, one float64 that the host need not know; 1 leaves x untouched."""
    grid = blocks_for(x.size, 16 // x.dtype.itemsize)
    launch("elementwise", "scale_by", x.dtype, grid, (x, factor, x.size, vectors(x)))


def unscale_(x: Array, factor: float) -> bool:
    """Scale x *= factor, in one pass with the answer: whether every element was finite. Waits for it."""
    wrong = empty(1, np.int32)
    wrong.fill(0)
    _run("unscale", x, (x, accumulator(x.dtype)(factor), wrong))
    return not int(wrong[0])


def clamp_(x: Array, limit: float) -> None:
    """Clip in place: x = min(max(x, -limit), limit); nan stays nan."""
    _run("clamp", x, (x, accumulator(x.dtype)(limit)))


def _run(function: str, x: Array, args: tuple) -> None:
    grid = blocks_for(x.size, 16 // x.dtype.itemsize)
    arrays = [arg for arg in args if getattr(arg, "dtype", None) == x.dtype and getattr(arg, "ndim", 0)]
    launch("elementwise", function, x.dtype, grid, (*args, x.size, vectors(*arrays)))
