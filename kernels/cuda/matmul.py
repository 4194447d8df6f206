"""Matmuls by cublasLt: sums in float32 (float64 for float64), added to `out` if asked for."""

from shardrt.kernels.cuda import _launch
from shardrt.kernels.cuda._launch import Array


def matmul(a: Array, b: Array, out: Array, *, accumulate: bool = False) -> None:
    """Set out = a @ b, plus out if `accumulate`: 2-D, transposed or strided as it comes; 3-D, batched.

    out may be float32 where a and b have 16 bits, as gradients of parameters are.
    """
    if 0 in (*a.shape, *b.shape):
        if not accumulate:
            out.fill(0)
        return
    _launch.backend().matmuls.gemm(readable(a), readable(b), out, accumulate=accumulate)


def gram(a: Array, out: Array) -> None:
    """Set out = a @ a.T, 2-D, or 3-D, of each matrix: a matmul."""
    matmul(a, a.swapaxes(-1, -2), out)


def readable(x: Array) -> Array:
    """Return x itself if one of its last two axes is dense, else a copy."""
    return x if x.dtype.itemsize in x.strides[-2:] else x.copy()
