"""AdamW over ranges of a flat shard: one pass that reads and writes everything once."""

from typing import Any

import numpy as np

from shardrt.kernels.cpu._jit import fused
from shardrt.kernels.cpu._threads import run_rows

Array = Any


def step(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    starts: Array,
    stops: Array,
    lrs: Array,
    decays: Array,
    beta1: float,
    beta2: float,
    eps: float,
    step_count: int,
    grad_scale: float,
) -> None:
    """Update param, m and v, 1-D and equally long, in the ranges [starts, stops).

    Range k has learning rate lrs[k] and decoupled weight decay decays[k]. step_count, from 1, corrects the
    moments' bias; grad is multiplied by grad_scale as it is read.
    """
    real = param.dtype.type
    root = np.sqrt(1 - beta2**step_count)
    for start, stop, lr, decay in zip(starts, stops, lrs, decays, strict=True):
        piece = slice(int(start), int(stop))
        numbers = (
            real(1 - lr * decay),
            real(lr / (1 - beta1**step_count)),
            real(1 / root),
            real(beta1),
            real(1 - beta1),
            real(beta2),
            real(1 - beta2),
            real(eps),
            real(grad_scale),
        )
        size = piece.stop - piece.start
        run_rows(_step, size, size, param[piece], grad[piece], m[piece], v[piece], numbers)


def bytes_moved(count: int, itemsize: int = 4) -> int:
    """Bytes of a step: four arrays read, three written."""
    return 7 * count * itemsize


def flops(count: int) -> int:
    """Operations of a step, about."""
    return 14 * count


@fused
def _step(start, stop, param, grad, m, v, numbers):
    keep, rate, correction, beta1, rest1, beta2, rest2, eps, scale = numbers
    # Slices first: an index that might be negative would keep the loop from being vectorised.
    param, grad, m, v = param[start:stop], grad[start:stop], m[start:stop], v[start:stop]
    for i in range(param.size):
        g = grad[i] * scale
        first = beta1 * m[i] + rest1 * g
        second = beta2 * v[i] + rest2 * g * g
        m[i] = first
        v[i] = second
        param[i] = param[i] * keep - rate * (first / (np.sqrt(second) * correction + eps))
