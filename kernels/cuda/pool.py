"""Pooling of planes (planes, height, width), as on the CPU."""

import numpy as np

from shardrt.kernels.cuda._launch import Array, blocks_for, launch

Pair = tuple[int, int]


def max_forward(x: Array, y: Array, index: Array, window: Pair, stride: Pair, padding: Pair) -> None:
    """y: the largest of each window, nan if one is; index: where the first such pixel is."""
    _run("max_forward", y.size, (x, y, index), x, y, (*window, *stride, *padding))


def max_backward(dy: Array, index: Array, dx: Array, window: Pair, stride: Pair, padding: Pair) -> None:
    """Compute dx from dy and the forward's indices."""
    _run("max_backward", dx.size, (dy, index, dx), dx, dy, (*window, *stride, *padding))


def mean_forward(x: Array, y: Array, window: Pair, stride: Pair, padding: Pair) -> None:
    """y: the mean of each window, in which pixels of the padding count as zeros."""
    _run("mean_forward", y.size, (x, y), x, y, (*window, *stride, *padding))


def mean_backward(dy: Array, dx: Array, window: Pair, stride: Pair, padding: Pair) -> None:
    """Compute dx from dy."""
    _run("mean_backward", dx.size, (dy, dx), dx, dy, (*window, *stride, *padding))


def _run(function: str, count: int, arrays: tuple, x: Array, y: Array, geometry: tuple) -> None:
    sizes = len(x), *map(np.int32, (*x.shape[1:], *y.shape[1:], *geometry))
    launch("pool", function, x.dtype, blocks_for(count, 1), (*arrays, *sizes))
