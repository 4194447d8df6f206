"""Stochastic gradient descent with momentum over ranges of a flat shard."""

from typing import Any

from shardrt.kernels.cpu._jit import fused
from shardrt.kernels.cpu._threads import run_rows

Array = Any


def step(
    param: Array,
    grad: Array,
    momentum_buffer: Array | None,
    starts: Array,
    stops: Array,
    lrs: Array,
    decays: Array,
    momentum: float,
    dampening: float,
    nesterov: bool,
    first: bool,
) -> None:
    """Update param and momentum_buffer, 1-D, in the ranges [starts, stops); see optim.SGD for the rule.

    Range k has learning rate lrs[k] and weight decay decays[k], added to the gradient. `first`: the buffer
    holds nothing yet and becomes the gradient.
    """
    real = param.dtype.type
    for start, stop, lr, decay in zip(starts, stops, lrs, decays, strict=True):
        piece = slice(int(start), int(stop))
        size = piece.stop - piece.start
        numbers = real(lr), real(decay), real(momentum), real(0 if first else momentum)
        rest = real(1 if first else 1 - dampening)
        if momentum_buffer is None:
            run_rows(_plain, size, size, param[piece], grad[piece], numbers)
        else:
            arrays = param[piece], grad[piece], momentum_buffer[piece]
            run_rows(_momentum, size, size, *arrays, numbers, rest, nesterov)


def bytes_moved(count: int, itemsize: int = 4) -> int:
    """Bytes of a step with momentum: three arrays read, two written."""
    return 5 * count * itemsize


def flops(count: int) -> int:
    """Operations of a step, about."""
    return 6 * count


@fused
def _plain(start, stop, param, grad, numbers):
    lr, decay, _, _ = numbers
    param, grad = param[start:stop], grad[start:stop]
    for i in range(param.size):
        param[i] -= lr * (grad[i] + decay * param[i])


@fused
def _momentum(start, stop, param, grad, buffer, numbers, rest, nesterov):
    lr, decay, momentum, kept = numbers
    param, grad, buffer = param[start:stop], grad[start:stop], buffer[start:stop]
    for i in range(param.size):
        g = grad[i] + decay * param[i]
        b = kept * buffer[i] + rest * g
        buffer[i] = b
        param[i] -= lr * (g + momentum * b if nesterov else b)
