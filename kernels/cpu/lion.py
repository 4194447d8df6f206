"""Lion over ranges of a flat shard: one pass that reads and writes everything once."""

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import fused
from shardrt.kernels.cpu._threads import run_rows


@cost("param grad m ranges -> param m", flops=9)
def step(param: Array, grad: Array, m: Array, ranges: Array) -> None:
    """Update param and m, 1-D and equally long, in ranges of them.

    ranges: float64 (count, 6), in order, without overlap: start, stop, what the weights are multiplied by,
    learning rate, beta1 (m's part of the direction) and beta2 (what is kept of m). The direction is the sign,
    0 of 0 and nan of nan.
    """
    real = param.dtype.type
    for start, stop, keep, rate, beta1, beta2 in ranges.tolist():
        piece = slice(int(start), int(stop))
        numbers = tuple(map(real, (keep, rate, beta1, 1 - beta1, beta2, 1 - beta2, 0, 1)))
        size = piece.stop - piece.start
        run_rows(_step, size, size, param[piece], grad[piece], m[piece], numbers)


@fused
def _step(start, stop, param, grad, m, numbers):
    keep, rate, beta1, rest1, beta2, rest2, zero, one = numbers
    param, grad, m = param[start:stop], grad[start:stop], m[start:stop]
    for i in range(param.size):
        g = grad[i]
        mixed = beta1 * m[i] + rest1 * g
        sign = one if mixed > zero else -one if mixed < zero else mixed
        m[i] = beta2 * m[i] + rest2 * g
        param[i] = param[i] * keep - rate * sign
