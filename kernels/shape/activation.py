"""What GELU, SiLU, ReLU and the error function cost."""

from shardrt.kernels.shape._cost import Array, Cost, flat


def gelu_tanh_forward(x: Array, y: Array) -> Cost:
    return flat((x,), (y,), 18)


def gelu_tanh_backward(dy: Array, x: Array, dx: Array) -> Cost:
    return flat((dy, x), (dx,), 28)


def gelu_erf_forward(x: Array, y: Array) -> Cost:
    return flat((x,), (y,), 18)


def gelu_erf_backward(dy: Array, x: Array, dx: Array) -> Cost:
    return flat((dy, x), (dx,), 28)


def silu_forward(x: Array, y: Array) -> Cost:
    return flat((x,), (y,), 12)


def silu_backward(dy: Array, x: Array, dx: Array) -> Cost:
    return flat((dy, x), (dx,), 16)


def relu_forward(x: Array, y: Array) -> Cost:
    return flat((x,), (y,), 1)


def erf_forward(x: Array, y: Array) -> Cost:
    return flat((x,), (y,), 14)


def relu_backward(dy: Array, x: Array, dx: Array) -> Cost:
    return flat((dy, x), (dx,), 1)
