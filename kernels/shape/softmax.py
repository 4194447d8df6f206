"""What softmax costs."""

from shardrt.kernels.shape._cost import Array, Cost, by_rows


def forward(x: Array, y: Array) -> Cost:
    return by_rows((x,), (y,), 14)


def backward(dy: Array, y: Array, dx: Array) -> Cost:
    return by_rows((dy, y), (dx,), 4)
