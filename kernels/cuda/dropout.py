"""Dropout whose mask is a function of (seed, call, element): backward makes it again, nothing is stored."""

from typing import Any

import numpy as np

from shardrt.kernels.cuda._launch import accumulator, blocks_for, launch, vectors

Array = Any


def forward(x: Array, y: Array, p: float, seed: int, call: int, offset: int) -> None:
    """y = x / (1 - p) where element offset + i of stream `call` is at least p, else 0. Flat arrays."""
    threshold = np.uint64(p * 2.0**32)  # of 33 bits: p may be 1
    scale = accumulator(x.dtype)(0 if p == 1 else 1 / (1 - p))
    words = map(np.uint64, (seed, call, offset))
    args = (x, y, threshold, scale, *words, x.size, vectors(x, y))
    launch("dropout", "dropout", x.dtype, blocks_for(x.size, 4), args)


def backward(dy: Array, dx: Array, p: float, seed: int, call: int, offset: int) -> None:
    """dx from dy, by the mask of forward."""
    forward(dy, dx, p, seed, call, offset)


def bytes_moved(count: int, itemsize: int = 4) -> int:
    """Bytes of forward, and of backward."""
    return 2 * count * itemsize


def flops(count: int) -> int:
    """Integer operations, about."""
    return 25 * count
