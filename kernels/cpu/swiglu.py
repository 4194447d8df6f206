"""SwiGLU (Shazeer, GLU Variants Improve Transformer, 2020): silu(a) * b, a next to b in each row."""

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import exp, fused
from shardrt.kernels.cpu._threads import run_rows


@cost("x -> y", flops=7)  # for each element of x, two of which make one of y
def forward(x: Array, y: Array) -> None:
    """Compute y = a * sigmoid(a) * b. x (rows, 2 * width), a before b; y (rows, width)."""
    run_rows(_forward, x.shape[0], x.size, x, y)


@cost("dy x -> dx", flops=20)
def backward(dy: Array, x: Array, dx: Array) -> None:
    """Compute dx from dy and x, both halves in one pass; dx may be x."""
    run_rows(_backward, x.shape[0], x.size, dy, x, dx)


@fused
def _forward(start, stop, x, y):
    one, width = x.dtype.type(1), y.shape[1]
    for row in range(start, stop):
        gate, up, out = x[row, :width], x[row, width:], y[row]
        for i in range(width):
            out[i] = gate[i] / (one + exp(-gate[i])) * up[i]


@fused
def _backward(start, stop, dy, x, dx):
    one, width = x.dtype.type(1), dy.shape[1]
    for row in range(start, stop):
        gate, up, upper = x[row, :width], x[row, width:], dy[row]
        dgate, dup = dx[row, :width], dx[row, width:]
        for i in range(width):
            a, b = gate[i], up[i]
            s = one / (one + exp(-a))
            dgate[i] = upper[i] * b * s * (one + a * (one - s))
            dup[i] = upper[i] * a * s
