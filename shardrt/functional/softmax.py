"""Softmax and its logarithm along one axis. For a loss see loss.py, which needs neither."""

import numpy as np

from shardrt.autograd import Function
from shardrt.functional._arrays import check_floats, empty_like, kernels, rows, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.shape import transpose
from shardrt.functional.words import also


class Softmax(Function):
    def forward(self, x: Array) -> Array:
        y = empty_like(x)
        kernels().softmax.forward(rows(x), rows(y))
        self.saved = (y,)
        return y

    def backward(self, dy: Array) -> Array:
        (y,) = self.saved
        dx = empty_like(y)
        kernels().softmax.backward(rows(dy), rows(y), rows(dx))
        return dx


@also({"dtype": (None, "F.cast(x, dtype) before")}, dim="axis")
def softmax(x: "Tensor", axis: int = -1) -> "Tensor":
    """exp(x) over its sum along `axis`, the largest element subtracted first. float32 or float64.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> F.softmax(Tensor([[1.0, 1.0, 1.0, 1.0]])).numpy()
        array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
    """
    return _along(Softmax, "softmax", x, axis)


class LogSoftmax(Function):
    def forward(self, x: Array) -> Array:
        y = np.subtract(x, x.max(axis=-1, keepdims=True), out=empty_like(x))
        y -= np.log(np.exp(y).sum(axis=-1, keepdims=True))
        self.saved = (y,)
        return y

    def backward(self, dy: Array) -> Array:
        (y,) = self.saved
        dx = np.exp(y, out=empty_like(y))
        dx *= -dy.sum(axis=-1, keepdims=True)
        dx += dy
        return dx


@also({"dtype": (None, "F.cast(x, dtype) before")}, dim="axis")
def log_softmax(x: "Tensor", axis: int = -1) -> "Tensor":
    """The logarithm of softmax, which loses nothing where softmax is 0. float32 or float64."""
    return _along(LogSoftmax, "log_softmax", x, axis)


def _along(op: type[Function], name: str, x: "Tensor", axis: int) -> "Tensor":
    """Along the last axis, where the kernels work; another one is exchanged with it."""
    x = tensor(x)
    check_floats(name, x=x)
    if x.ndim == 0:
        raise ValueError(f"{name}: x must have at least one dimension")
    (axis,) = np.lib.array_utils.normalize_axis_tuple(axis, x.ndim)
    if axis == x.ndim - 1:
        return op.apply(x)
    return transpose(op.apply(transpose(x, axis, -1)), axis, -1)
