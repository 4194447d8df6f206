"""GELU in both forms, SiLU and ReLU, on flat arrays: y of x, and dx of dy and x; and the error function.

The tanh form of GELU (Hendrycks and Gimpel, 2016) is x * sigmoid(2 u), which needs one exponential.
"""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import erf, exp, fused
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu.cast import narrowed, widened

ROOT = 0.7978845608028654  # sqrt(2 / pi)
CUBE = 0.044715
_HALF_ROOT = 0.7071067811865476  # sqrt(1 / 2)
_DENSITY = 0.3989422804014327  # 1 / sqrt(2 pi)


@cost("x -> y", flops=18)
def gelu_tanh_forward(x: Array, y: Array) -> None:
    """Compute y = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).

    x may be uint16, bits of bfloat16, and then y as well.
    """
    kernel = _gelu_tanh_forward_low if x.dtype == np.uint16 else _gelu_tanh_forward
    kernel = _gelu_tanh_forward_bits if y.dtype == np.uint16 else kernel
    run_rows(kernel, x.size, x.size, x, y)


@cost("dy x -> dx", flops=28)
def gelu_tanh_backward(dy: Array, x: Array, dx: Array) -> None:
    """Compute dx from dy and x."""
    run_rows(_gelu_tanh_backward, x.size, x.size, dy, x, dx)


@cost("x -> y", flops=18)
def gelu_erf_forward(x: Array, y: Array) -> None:
    """Compute y = x / 2 * (1 + erf(x / sqrt(2)))."""
    run_rows(_gelu_erf_forward, x.size, x.size, x, y)


@cost("dy x -> dx", flops=28)
def gelu_erf_backward(dy: Array, x: Array, dx: Array) -> None:
    """Compute dx from dy and x."""
    run_rows(_gelu_erf_backward, x.size, x.size, dy, x, dx)


@cost("x -> y", flops=12)
def silu_forward(x: Array, y: Array) -> None:
    """Compute y = x * sigmoid(x)."""
    run_rows(_silu_forward, x.size, x.size, x, y)


@cost("dy x -> dx", flops=16)
def silu_backward(dy: Array, x: Array, dx: Array) -> None:
    """Compute dx from dy and x."""
    run_rows(_silu_backward, x.size, x.size, dy, x, dx)


@cost("x -> y", flops=1)
def relu_forward(x: Array, y: Array) -> None:
    """Compute y = max(x, 0)."""
    run_rows(_relu_forward, x.size, x.size, x, y)


@cost("dy x -> dx", flops=1)
def relu_backward(dy: Array, x: Array, dx: Array) -> None:
    """Compute dx from dy and x; 0 where x is 0."""
    run_rows(_relu_backward, x.size, x.size, dy, x, dx)


@cost("x -> y", flops=14)
def erf_forward(x: Array, y: Array) -> None:
    """Compute y = erf(x): in float32 with an absolute error of 4e-7 at the most, in float64 libm's."""
    run_rows(_erf_forward, x.size, x.size, x, y)


@fused
def _gelu_tanh_forward(start, stop, x, y):
    x, y = x[start:stop], y[start:stop]
    one, cube, twice = x.dtype.type(1), x.dtype.type(CUBE), x.dtype.type(-2 * ROOT)
    for i in range(x.size):
        v = x[i]
        y[i] = v / (one + exp(twice * (v + cube * v * v * v)))


@fused
def _gelu_tanh_forward_low(start, stop, x, y):
    x, y = x[start:stop], y[start:stop]
    one, cube, twice = y.dtype.type(1), y.dtype.type(CUBE), y.dtype.type(-2 * ROOT)
    for i in range(x.size):
        v = widened(x[i])
        y[i] = v / (one + exp(twice * (v + cube * v * v * v)))


@fused
def _gelu_tanh_forward_bits(start, stop, x, y):
    x, y = x[start:stop], y[start:stop]
    one, cube, twice = np.float32(1), np.float32(CUBE), np.float32(-2 * ROOT)
    for i in range(x.size):
        v = widened(x[i])
        y[i] = narrowed(v / (one + exp(twice * (v + cube * v * v * v))))


@fused
def _gelu_tanh_backward(start, stop, dy, x, dx):
    dy, x, dx = dy[start:stop], x[start:stop], dx[start:stop]
    one, cube, twice = x.dtype.type(1), x.dtype.type(CUBE), x.dtype.type(-2 * ROOT)
    slope, cubes = x.dtype.type(2 * ROOT), x.dtype.type(3 * CUBE)
    for i in range(x.size):
        v = x[i]
        s = one / (one + exp(twice * (v + cube * v * v * v)))
        dx[i] = dy[i] * (s + v * s * (one - s) * slope * (one + cubes * v * v))


@fused
def _gelu_erf_forward(start, stop, x, y):
    x, y = x[start:stop], y[start:stop]
    one, half, root = x.dtype.type(1), x.dtype.type(0.5), x.dtype.type(_HALF_ROOT)
    for i in range(x.size):
        y[i] = half * x[i] * (one + erf(x[i] * root))


@fused
def _gelu_erf_backward(start, stop, dy, x, dx):
    dy, x, dx = dy[start:stop], x[start:stop], dx[start:stop]
    one, half, root = x.dtype.type(1), x.dtype.type(0.5), x.dtype.type(_HALF_ROOT)
    density = x.dtype.type(_DENSITY)
    for i in range(x.size):
        v = x[i]
        dx[i] = dy[i] * (half * (one + erf(v * root)) + v * density * exp(-half * v * v))


@fused
def _silu_forward(start, stop, x, y):
    x, y = x[start:stop], y[start:stop]
    one = x.dtype.type(1)
    for i in range(x.size):
        y[i] = x[i] / (one + exp(-x[i]))


@fused
def _silu_backward(start, stop, dy, x, dx):
    dy, x, dx = dy[start:stop], x[start:stop], dx[start:stop]
    one = x.dtype.type(1)
    for i in range(x.size):
        v = x[i]
        s = one / (one + exp(-v))
        dx[i] = dy[i] * s * (one + v * (one - s))


@fused
def _relu_forward(start, stop, x, y):
    x, y = x[start:stop], y[start:stop]
    zero = x.dtype.type(0)
    for i in range(x.size):
        y[i] = zero if x[i] <= zero else x[i]  # nan stays nan


@fused
def _erf_forward(start, stop, x, y):
    x, y = x[start:stop], y[start:stop]
    for i in range(x.size):
        y[i] = erf(x[i])


@fused
def _relu_backward(start, stop, dy, x, dx):
    dy, x, dx = dy[start:stop], x[start:stop], dx[start:stop]
    zero = x.dtype.type(0)
    for i in range(x.size):
        dx[i] = dy[i] if x[i] > zero else zero
