"""Muon's elementwise passes over a piece of a matrix: before the matrix is orthogonalized, and after."""

from shardrt.kernels.cuda._launch import Array, accumulator, blocks_for, launch, type_name, vectors


def direction(grad: Array, m: Array, out: Array, momentum: float, nesterov: bool) -> None:
    """Set m = momentum m + (1 - momentum) grad, and out to what is orthogonalized: see the CPU's.

    grad may be of another type than m and out.
    """
    real = accumulator(m.dtype)
    args = grad, m, out, real(momentum), real(momentum if nesterov else 1), m.size, vectors(grad, m, out)
    _run("direction", m, args, type_name(grad.dtype))


def apply(param: Array, update: Array, keep: float, rate: float) -> None:
    """Set param = keep param - rate update. 1-D, equally long."""
    real = accumulator(param.dtype)
    args = param, update, real(keep), real(rate), param.size, vectors(param, update)
    _run("apply", param, args, type_name(param.dtype))


def _run(function: str, written: Array, args: tuple, gradient: str) -> None:
    blocks = blocks_for(written.size, 16 // written.dtype.itemsize)
    launch("muon", function, written.dtype, blocks, args, GRADIENT=gradient)
