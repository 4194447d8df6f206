"""SwiGLU (Shazeer, GLU Variants Improve Transformer, 2020): silu(a) * b, a next to b in each row."""

import numpy as np

from shardrt.kernels.cuda._launch import THREADS, Array, launch, vectors


def forward(x: Array, y: Array) -> None:
    """Compute y = a * sigmoid(a) * b. x (rows, 2 * width), a before b; y (rows, width)."""
    _run("forward", y.shape, x, y)


def backward(dy: Array, x: Array, dx: Array) -> None:
    """Compute dx from dy and x, both halves in one pass; dx may be x."""
    _run("backward", dy.shape, dy, x, dx)


def _run(function: str, shape: tuple[int, int], *arrays: Array) -> None:
    rows, width = shape
    size = 16 // arrays[0].dtype.itemsize
    whole = width % size == 0 and vectors(*arrays)
    threads = min(THREADS, -(-width // (32 * size if whole else 32)) * 32)
    launch("swiglu", function, arrays[0].dtype, rows, (*arrays, np.int32(width), whole), threads=threads)
