"""Functions of one tensor, element by element."""

from math import pi
from math import sqrt as sqrt_of
from typing import Any

import numpy as np

from shardrt.autograd import Function
from shardrt.functional._arrays import check_floats, compute, empty_like, flat, floating, kernels, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.elementwise import mul

Operand = Any  # Tensor, array, or number


class OfInput(Function):
    """A ufunc whose gradient is a function of dy and its input."""

    ufunc: Any
    strided = True

    def forward(self, x: Array) -> Array:
        self.saved = (x,)
        return compute(self.ufunc, x)

    def backward(self, dy: Array) -> Array:
        return self.gradient(dy, *self.saved)

    def gradient(self, dy: Array, saved: Array) -> Array:
        raise NotImplementedError


class OfResult(OfInput):
    """A ufunc whose gradient is a function of dy and its result."""

    def forward(self, x: Array) -> Array:
        y = compute(self.ufunc, x)
        self.saved = (y,)
        return y


class Abs(OfInput):
    ufunc = np.absolute

    def gradient(self, dy: Array, x: Array) -> Array:
        return compute(np.multiply, dy, compute(np.sign, x))


def abs(x: Operand) -> "Tensor":
    """The absolute value; the gradient at 0 is 0."""
    return Abs.apply(tensor(x))


class Step(Function):
    """A function that is constant between its steps."""

    strided = True

    def forward(self, x: Array, ufunc: Any) -> Array:
        return compute(ufunc, x)

    def backward(self, dy: Array) -> tuple:
        dx = empty_like(dy)
        dx.fill(0)
        return dx, None


def sign(x: Operand) -> "Tensor":
    """-1, 0 or 1; its gradient is 0."""
    return Step.apply(tensor(x), np.sign)


def floor(x: Operand) -> "Tensor":
    """The next integer below, as a float; its gradient is 0."""
    return Step.apply(floating(x), np.floor)


def ceil(x: Operand) -> "Tensor":
    """The next integer above, as a float; its gradient is 0."""
    return Step.apply(floating(x), np.ceil)


def round(x: Operand) -> "Tensor":
    """The nearest integer as a float, the even one of two; its gradient is 0."""
    return Step.apply(floating(x), np.rint)


class Sin(OfInput):
    ufunc = np.sin

    def gradient(self, dy: Array, x: Array) -> Array:
        return compute(np.multiply, dy, compute(np.cos, x))


def sin(x: Operand) -> "Tensor":
    """The sine of radians; integers become float32."""
    return Sin.apply(floating(x))


class Cos(OfInput):
    ufunc = np.cos

    def gradient(self, dy: Array, x: Array) -> Array:
        dx = compute(np.multiply, dy, compute(np.sin, x))
        return np.negative(dx, out=dx)


def cos(x: Operand) -> "Tensor":
    """The cosine of radians; integers become float32."""
    return Cos.apply(floating(x))


class Erf(Function):
    def forward(self, x: Array) -> Array:
        self.saved = (x,)
        y = empty_like(x)
        kernels().activation.erf_forward(flat(x), flat(y))
        return y

    def backward(self, dy: Array) -> Array:
        (x,) = self.saved
        dx = compute(np.multiply, x, x)
        np.negative(dx, out=dx)
        np.exp(dx, out=dx)
        dx *= 2 / sqrt_of(pi)
        dx *= dy
        return dx


def erf(x: Operand) -> "Tensor":
    """The error function; integers become float32, in which a CPU is off by 4e-7 at the most."""
    x = floating(x)
    check_floats("erf", x=x)
    return Erf.apply(x)


class Expm1(OfResult):
    ufunc = np.expm1

    def gradient(self, dy: Array, y: Array) -> Array:
        dx = compute(np.multiply, dy, y)
        dx += dy
        return dx


def expm1(x: Operand) -> "Tensor":
    """exp(x) - 1, exact near 0; integers become float32."""
    return Expm1.apply(floating(x))


class Log1p(OfInput):
    ufunc = np.log1p

    def gradient(self, dy: Array, x: Array) -> Array:
        return compute(np.divide, dy, compute(np.add, x, 1))


def log1p(x: Operand) -> "Tensor":
    """log(1 + x), exact near 0; integers become float32."""
    return Log1p.apply(floating(x))


class RSqrt(Function):
    strided = True

    def forward(self, x: Array) -> Array:
        y = compute(np.sqrt, x)
        np.divide(1, y, out=y)
        self.saved = (y,)
        return y

    def backward(self, dy: Array) -> Array:
        (y,) = self.saved
        dx = compute(np.multiply, y, y)
        dx *= y
        dx *= -0.5
        dx *= dy
        return dx


def rsqrt(x: Operand) -> "Tensor":
    """1 over the square root; integers become float32."""
    return RSqrt.apply(floating(x))


def square(x: Operand) -> "Tensor":
    """Return x times x."""
    return mul(x, x)


class Exp(OfResult):
    ufunc = np.exp

    def gradient(self, dy: Array, y: Array) -> Array:
        return compute(np.multiply, dy, y)


def exp(x: Operand) -> "Tensor":
    """Return e to the power of x; integers become float32."""
    return Exp.apply(floating(x))


class Log(OfInput):
    ufunc = np.log

    def gradient(self, dy: Array, x: Array) -> Array:
        return compute(np.divide, dy, x)


def log(x: Operand) -> "Tensor":
    """The natural logarithm; integers become float32."""
    return Log.apply(floating(x))


class Sqrt(OfResult):
    ufunc = np.sqrt

    def gradient(self, dy: Array, y: Array) -> Array:
        dx = compute(np.divide, dy, y)
        dx *= 0.5
        return dx


def sqrt(x: Operand) -> "Tensor":
    """The square root; integers become float32."""
    return Sqrt.apply(floating(x))


class Tanh(OfResult):
    ufunc = np.tanh

    def gradient(self, dy: Array, y: Array) -> Array:
        dx = compute(np.multiply, y, y)
        np.subtract(1, dx, out=dx)
        dx *= dy
        return dx


def tanh(x: Operand) -> "Tensor":
    """The hyperbolic tangent; integers become float32."""
    return Tanh.apply(floating(x))
