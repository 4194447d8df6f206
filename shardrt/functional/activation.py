"""Activations of a network's hidden layers. Elementwise on any shape; their input is saved for backward.

`inplace`, PyTorch's argument, changes nothing: no op writes to its input.
"""

import numpy as np

from shardrt.autograd import Function
from shardrt.functional._again import Repeatable
from shardrt.functional._arrays import (
    check_floats,
    chosen,
    compute,
    empty,
    empty_like,
    flat,
    kernels,
    rows,
    tensor,
)
from shardrt.functional._types import Array, Tensor
from shardrt.functional.elementwise import clamp, minimum, where
from shardrt.functional.shape import split
from shardrt.functional.unary import expm1, tanh
from shardrt.functional.words import torch_words


class Activation(Repeatable):
    """By two functions of kernels.activation: NAME_forward gives y of x, NAME_backward dx of dy and x."""

    kernel: str  # NAME
    again_cheap = (0,)

    def forward(self, x: Array) -> Array:
        self.saved = (x,)
        return self.again(0)

    def again(self, index: int) -> Array:
        (x,) = self.saved
        y = empty_like(x)
        getattr(kernels().activation, f"{self.kernel}_forward")(flat(x), flat(y))
        return y

    def backward(self, dy: Array) -> Array:
        (x,) = self.saved
        dx = empty_like(x)
        getattr(kernels().activation, f"{self.kernel}_backward")(flat(dy), flat(x), flat(dx))
        return dx


class GELUTanh(Activation):
    kernel = "gelu_tanh"


class GELUErf(Activation):
    kernel = "gelu_erf"


class SiLU(Activation):
    kernel = "silu"


class ReLU(Activation):
    kernel = "relu"
    again_cheap = ()


def gelu(x: "Tensor", approximate: str = "none") -> "Tensor":
    """Return x times the normal distribution function of x (Hendrycks, Gimpel: GELUs, 2016).

    Args:
        x: any shape, float32 or float64.
        approximate: "none", with the error function, or "tanh", the paper's approximation, which GPT-2 uses.

    Raises:
        ValueError: for another word.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> F.gelu(Tensor([-1.0, 0.0, 1.0])).numpy().round(3)
        array([-0.159,  0.   ,  0.841], dtype=float32)
    """
    ops = {"none": GELUErf, "tanh": GELUTanh}
    if approximate not in ops:
        raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    x = tensor(x)
    check_floats("gelu", x=x)
    return ops[approximate].apply(x)


def silu(x: "Tensor", inplace: bool = False) -> "Tensor":
    """Return x times its logistic function (Elfwing et al., Sigmoid-Weighted LUs, 2017). Floats only."""
    x = tensor(x)
    check_floats("silu", x=x)
    return SiLU.apply(x)


class SwiGLU(Repeatable):
    again_cheap = (0,)

    def forward(self, x: Array) -> Array:
        self.saved = (x,)
        return self.again(0)

    def again(self, index: int) -> Array:
        (x,) = self.saved
        y = empty((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
        kernels().swiglu.forward(rows(x), rows(y))
        return y

    def backward(self, dy: Array) -> Array:
        (x,) = self.saved
        dx = empty_like(x)
        kernels().swiglu.backward(rows(dy), rows(x), rows(dx))
        return dx


def swiglu(x: "Tensor") -> "Tensor":
    """silu(a) * b of the two halves of the last dimension (Shazeer, GLU Variants Improve Transformer, 2020).

    Args:
        x: (..., 2 * width), a before b, as one linear layer makes them; gives (..., width). float32 or
            float64.

    Raises:
        ValueError: for an odd last dimension.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> F.swiglu(Tensor([[0.0, 2.0, 3.0, 3.0]])).numpy().round(3)
        array([[0.   , 5.285]], dtype=float32)
    """
    x = tensor(x)
    check_floats("swiglu", x=x)
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(f"swiglu: x must be (..., 2 * width), got {x.shape}")
    return SwiGLU.apply(x)


def relu(x: "Tensor", inplace: bool = False) -> "Tensor":
    """Return x where it is positive, else 0; the gradient at 0 is 0. float32 or float64."""
    x = tensor(x)
    check_floats("relu", x=x)
    return ReLU.apply(x)


def sigmoid(x: "Tensor") -> "Tensor":
    """The logistic function, 1 / (1 + exp(-x)), by the hyperbolic tangent, which does not overflow."""
    return tanh(tensor(x) * 0.5) * 0.5 + 0.5


class LeakyReLU(Function):
    strided = True

    def forward(self, x: Array, slope: float) -> Array:
        self.saved = (x, slope)
        return chosen(x > 0, x, compute(np.multiply, x, slope), x.shape, x.dtype)

    def backward(self, dy: Array) -> tuple:
        x, slope = self.saved
        return chosen(x > 0, dy, compute(np.multiply, dy, slope), dy.shape, dy.dtype), None


def leaky_relu(x: "Tensor", negative_slope: float = 0.01, inplace: bool = False) -> "Tensor":
    """Return x where it is positive, else negative_slope * x. Floats only."""
    x = tensor(x)
    check_floats("leaky_relu", x=x)
    return LeakyReLU.apply(x, float(negative_slope))


def elu(x: "Tensor", alpha: float = 1.0, inplace: bool = False) -> "Tensor":
    """Return x where it is positive, else alpha * (exp(x) - 1) (Clevert et al., 2016). Floats only."""
    x = tensor(x)
    check_floats("elu", x=x)
    return where(x > 0, x, expm1(minimum(x, 0.0)) * alpha)


class Softplus(Function):
    strided = True

    def forward(self, x: Array) -> Array:
        self.saved = (x,)
        return compute(np.logaddexp, x, 0)

    def backward(self, dy: Array) -> Array:
        (x,) = self.saved
        dx = compute(np.tanh, x * x.dtype.type(0.5))
        dx *= 0.5
        dx += 0.5
        dx *= dy
        return dx


def softplus(x: "Tensor", beta: float = 1.0, threshold: float = 20.0) -> "Tensor":
    """log(1 + exp(beta x)) / beta, or x where beta x is above the threshold. Floats only.

    The logarithm does not overflow, so it is taken above 20, PyTorch's threshold, too: there they differ by
    2e-9 at the most.
    """
    x = tensor(x)
    check_floats("softplus", x=x)
    y = Softplus.apply(x) if beta == 1 else Softplus.apply(x * beta) * (1 / beta)
    return y if threshold == 20 else where((x * beta).data > threshold, x, y)


def logsigmoid(x: "Tensor") -> "Tensor":
    """The logarithm of the logistic function, exact where that is 0 or 1. Floats only."""
    return -softplus(-tensor(x))


@torch_words
def glu(x: "Tensor", axis: int = -1) -> "Tensor":
    """Return a * sigmoid(b) of the halves along an axis (Dauphin et al., 2017). ValueError: an odd size."""
    x = tensor(x)
    if x.ndim == 0 or x.shape[axis] % 2:
        raise ValueError(f"glu: axis {axis} of x must have an even size, got {x.shape}")
    first, second = split(x, x.shape[axis] // 2, axis)
    return first * sigmoid(second)


def relu6(x: "Tensor", inplace: bool = False) -> "Tensor":
    """Return x between 0 and 6."""
    return clamp(x, 0.0, 6.0)


def hardsigmoid(x: "Tensor", inplace: bool = False) -> "Tensor":
    """(x + 3) / 6 between 0 and 1."""
    return clamp(tensor(x) * (1 / 6) + 0.5, 0.0, 1.0)


def hardswish(x: "Tensor", inplace: bool = False) -> "Tensor":
    """Return x * hardsigmoid(x) (Howard et al., MobileNetV3, 2019)."""
    return tensor(x) * hardsigmoid(x)


def mish(x: "Tensor", inplace: bool = False) -> "Tensor":
    """Return x * tanh(softplus(x)) (Misra, 2020)."""
    return tensor(x) * tanh(softplus(x))
