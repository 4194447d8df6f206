"""Softmax over the last dimension."""

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import exp, larger, reordered
from shardrt.kernels.cpu._threads import run_rows


@cost("x -> y", flops=14)
def forward(x: Array, y: Array) -> None:
    """Compute y = exp(x - max) / sum, per row. x, y (rows, width)."""
    run_rows(_forward, x.shape[0], x.size, x, y)


@cost("dy y -> dx", flops=4)
def backward(dy: Array, y: Array, dx: Array) -> None:
    """Compute dx = y * (dy - sum(dy * y)), per row."""
    run_rows(_backward, y.shape[0], y.size, dy, y, dx)


@reordered
def _forward(start, stop, x, y):
    for row in range(start, stop):
        line, out = x[row], y[row]
        highest = line[0]
        for j in range(line.size):
            highest = larger(highest, line[j])
        total = x.dtype.type(0)
        for j in range(line.size):
            value = exp(line[j] - highest)
            out[j] = value
            total += value
        factor = x.dtype.type(1) / total
        for j in range(line.size):
            out[j] *= factor


@reordered
def _backward(start, stop, dy, y, dx):
    for row in range(start, stop):
        upper, line, out = dy[row], y[row], dx[row]
        dot = y.dtype.type(0)
        for j in range(line.size):
            dot += upper[j] * line[j]
        for j in range(line.size):
            out[j] = line[j] * (upper[j] - dot)
