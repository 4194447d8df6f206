"""What SwiGLU costs."""

from shardrt.kernels.shape._cost import Array, Cost, by_rows


def forward(x: Array, y: Array) -> Cost:
    return by_rows((x,), (y,), 7)  # for each element of x, two of which make one of y


def backward(dy: Array, x: Array, dx: Array) -> Cost:
    return by_rows((dy, x), (dx,), 20)
