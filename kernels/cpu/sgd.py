"""Stochastic gradient descent with momentum over ranges of a flat shard."""

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import fused
from shardrt.kernels.cpu._threads import run_rows


@cost(
    "param grad momentum_buffer ranges -> param momentum_buffer",
    flops=lambda param, momentum_buffer: (4 if momentum_buffer is None else 8) * param.size,
)
def step(
    param: Array,
    grad: Array,
    momentum_buffer: Array | None,
    ranges: Array,
    momentum: float,
    nesterov: bool,
) -> None:
    """Update param and momentum_buffer, 1-D, in ranges of them; see optim.SGD for the rule.

    ranges: float64 (count, 6), in order, without overlap: start, stop, learning rate, weight decay (added to
    the gradient), how much of the buffer is kept, how much of the gradient is added to it. Nothing is kept of
    a buffer that holds nothing yet.
    """
    real = param.dtype.type
    for start, stop, *own in ranges.tolist():
        piece = slice(int(start), int(stop))
        size = piece.stop - piece.start
        numbers = (*map(real, own), real(momentum))
        if momentum_buffer is None:
            run_rows(_plain, size, size, param[piece], grad[piece], numbers)
        else:
            arrays = param[piece], grad[piece], momentum_buffer[piece]
            run_rows(_momentum, size, size, *arrays, numbers, nesterov)


@fused
def _plain(start, stop, param, grad, numbers):
    lr, decay, _, _, _ = numbers
    param, grad = param[start:stop], grad[start:stop]
    for i in range(param.size):
        param[i] -= lr * (grad[i] + decay * param[i])


@fused
def _momentum(start, stop, param, grad, buffer, numbers, nesterov):
    lr, decay, kept, added, momentum = numbers
    param, grad, buffer = param[start:stop], grad[start:stop], buffer[start:stop]
    for i in range(param.size):
        g = grad[i] + decay * param[i]
        b = kept * buffer[i] + added * g
        buffer[i] = b
        param[i] -= lr * (g + momentum * b if nesterov else b)
