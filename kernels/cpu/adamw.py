"""AdamW over ranges of a flat shard: one pass that reads and writes everything once."""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu import cast
from shardrt.kernels.cpu._jit import fused, fused_part
from shardrt.kernels.cpu._threads import run_rows


@cost("param grad m v ranges -> param m v rounded", flops=14)
def step(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    ranges: Array,
    rounded: Array | None = None,
    kind: str = "",
) -> None:
    """Update param, m and v, 1-D and equally long, in ranges of them. m may be uint16: the bits of bfloat16.

    ranges: float64 (count, 8), in order, without overlap: start, stop, what the weights are multiplied by,
    what the step is multiplied by, 1 / the root of the second moment's bias, beta1, beta2 and eps.
    rounded: as long; there the ranges become what they are in param rounded to `kind`: numbers, or if it is
    uint16 bits.
    """
    real = param.dtype.type
    for start, stop, keep, rate, correction, beta1, beta2, eps in ranges.tolist():
        piece = slice(int(start), int(stop))
        numbers = tuple(map(real, (keep, rate, correction, beta1, 1 - beta1, beta2, 1 - beta2, eps)))
        size = piece.stop - piece.start
        kernel = _step_low if m.dtype == np.uint16 else _step
        run_rows(kernel, size, size, param[piece], grad[piece], m[piece], v[piece], numbers)
        if rounded is not None:
            cast.narrow(param[piece], rounded[piece], kind)


@fused_part
def _updated(p, g, m, v, numbers):
    """A parameter and its two moments after a step."""
    keep, rate, correction, beta1, rest1, beta2, rest2, eps = numbers
    first = beta1 * m + rest1 * g
    second = beta2 * v + rest2 * g * g
    return p * keep - rate * (first / (np.sqrt(second) * correction + eps)), first, second


@fused
def _step(start, stop, param, grad, m, v, numbers):
    # Slices first: an index that might be negative would keep the loop from being vectorised.
    param, grad, m, v = param[start:stop], grad[start:stop], m[start:stop], v[start:stop]
    for i in range(param.size):
        param[i], m[i], v[i] = _updated(param[i], grad[i], m[i], v[i], numbers)


@fused
def _step_low(start, stop, param, grad, m, v, numbers):
    """As _step. What is kept of the first moment is rounded, what goes into the update is not."""
    param, grad, m, v = param[start:stop], grad[start:stop], m[start:stop], v[start:stop]
    for i in range(param.size):
        param[i], first, v[i] = _updated(param[i], grad[i], cast.widened(m[i]), v[i], numbers)
        m[i] = cast.narrowed(first)
