"""GELU in both forms, SiLU, ReLU and the error function on flat arrays, as on the CPU."""

from shardrt.kernels.cuda._launch import Array, blocks_for, launch, vectors


def gelu_tanh_forward(x: Array, y: Array) -> None:
    """Compute y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""
    _run("gelu_tanh_forward", x, y)


def gelu_tanh_backward(dy: Array, x: Array, dx: Array) -> None:
    """Compute dx from dy and x."""
    _run("gelu_tanh_backward", dy, x, dx)


def gelu_erf_forward(x: Array, y: Array) -> None:
    """Compute y = x / 2 * (1 + erf(x / sqrt(2)))."""
    _run("gelu_erf_forward", x, y)


def gelu_erf_backward(dy: Array, x: Array, dx: Array) -> None:
    """Compute dx from dy and x."""
    _run("gelu_erf_backward", dy, x, dx)


def silu_forward(x: Array, y: Array) -> None:
    """Compute y = x * sigmoid(x)."""
    _run("silu_forward", x, y)


def silu_backward(dy: Array, x: Array, dx: Array) -> None:
    """Compute dx from dy and x."""
    _run("silu_backward", dy, x, dx)


def relu_forward(x: Array, y: Array) -> None:
    """Compute y = max(x, 0)."""
    _run("relu_forward", x, y)


def relu_backward(dy: Array, x: Array, dx: Array) -> None:
    """Compute dx from dy and x; 0 where x is 0."""
    _run("relu_backward", dy, x, dx)


def erf_forward(x: Array, y: Array) -> None:
    """Compute y = erf(x)."""
    _run("erf_forward", x, y)


def _run(function: str, *arrays: Array) -> None:
    x = arrays[0]
    grid = blocks_for(x.size, 16 // x.dtype.itemsize)
    launch("activation", function, x.dtype, grid, (*arrays, x.size, vectors(*arrays)))
