"""Dropout whose mask is a function of (seed, call, element): backward makes it again, nothing is stored."""

import numpy as np

from shardrt.kernels.cuda._launch import Array, accumulator, blocks_for, launch, vectors


def forward(
    x: Array, y: Array, p: float, seed: int, call: int, offset: int, place: Array | None = None
) -> None:
    """Set y = x / (1 - p) where element offset + i of stream `call` is at least p, else 0: see the CPU's."""
    threshold = np.uint64(p * 2.0**32)  # of 33 bits: p may be 1
    scale = accumulator(x.dtype)(0 if p == 1 else 1 / (1 - p))
    words = np.uint64(seed), np.uint64(call), place, np.uint64(offset)
    args = (x, y, threshold, scale, *words, x.size, vectors(x, y))
    launch("dropout", "dropout", x.dtype, blocks_for(x.size, 4), args)


def backward(
    dy: Array, dx: Array, p: float, seed: int, call: int, offset: int, place: Array | None = None
) -> None:
    """Compute dx from dy, by the mask of forward."""
    forward(dy, dx, p, seed, call, offset, place)
