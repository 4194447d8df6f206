"""Muon's elementwise passes over a piece of a matrix: before the matrix is orthogonalized, and after."""

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows


@cost("grad m -> m out", flops=6)
def direction(grad: Array, m: Array, out: Array, momentum: float, nesterov: bool) -> None:
    """Set m = momentum m + (1 - momentum) grad, and out to what is orthogonalized. 1-D, equally long.

    That is momentum m + (1 - momentum) grad again with Nesterov's momentum, else m.
    """
    real = m.dtype.type
    kept, ahead = real(momentum), real(momentum if nesterov else 1)
    numbers = kept, real(1) - kept, ahead, real(1) - ahead
    run_rows(_direction, m.size, m.size, grad, m, out, numbers)


@exact
def _direction(start, stop, grad, m, out, numbers):
    kept, added, ahead, rest = numbers
    grad, m, out = grad[start:stop], m[start:stop], out[start:stop]
    for i in range(m.size):
        mean = kept * m[i] + added * grad[i]
        m[i] = mean
        out[i] = ahead * mean + rest * grad[i]


@cost("param update -> param", flops=3)
def apply(param: Array, update: Array, keep: float, rate: float) -> None:
    """Set param = keep param - rate update. 1-D, equally long."""
    real = param.dtype.type
    run_rows(_apply, param.size, param.size, param, update, real(keep), real(rate))


@exact
def _apply(start, stop, param, update, keep, rate):
    param, update = param[start:stop], update[start:stop]
    for i in range(param.size):
        param[i] = keep * param[i] - rate * update[i]
