"""Rotary position embedding, as on the CPU."""

import numpy as np

from shardrt.kernels.cuda._launch import THREADS, Array, accumulator, launch, vectors


def forward(x: Array, cos: Array, sin: Array, y: Array, heads: int) -> None:
    """Compute y = x with the first `heads` heads of every row turned, as on the CPU.

    cos and sin are float32 for 16-bit x.
    """
    _rotate(x, cos, sin, y, heads, 1)


def backward(dy: Array, cos: Array, sin: Array, dx: Array, heads: int) -> None:
    """Compute dx from dy: turned back; dx may be dy."""
    _rotate(dy, cos, sin, dx, heads, -1)


def _rotate(x: Array, cos: Array, sin: Array, y: Array, heads: int, sign: int) -> None:
    (rows, width), (time, half) = x.shape, cos.shape
    size = 16 // x.dtype.itemsize
    whole = half % size == 0 and width % size == 0 and vectors(x, cos, sin, y)
    pieces = max(1, (width - heads * half) // (size if whole else 1))
    threads = min(THREADS, -(-pieces // 32) * 32)
    numbers = (int(time), np.int32(width), np.int32(heads), np.int32(half), accumulator(x.dtype)(sign), whole)
    launch("rotary", "rotate", x.dtype, rows, (x, cos, sin, y, *numbers), threads=threads)
