"""Sums, means, norms, largest and smallest elements over some axes or all; sums along an axis."""

from collections.abc import Sequence
from math import inf, prod, sqrt

import numpy as np

from shardrt import dtypes
from shardrt.autograd import Function
from shardrt.functional._arrays import asarray, broadcast, chosen, compute, empty_like, floating, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.elementwise import div, sub
from shardrt.functional.unary import abs, square
from shardrt.functional.words import also, torch_words

Axes = int | Sequence[int] | None


class Sum(Function):
    strided = True

    def forward(self, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
        self.saved = (x.shape, axes)
        low = dtypes.low(x.dtype)
        total = asarray(x.sum(axis=axes, keepdims=keepdims, dtype=np.float32 if low else None))
        return total.astype(x.dtype) if low else total

    def backward(self, dy: Array) -> tuple:
        shape, axes = self.saved
        return broadcast(dy.reshape(_kept(shape, axes)), shape), None, None


@torch_words
def sum(x: "Tensor", axis: Axes = None, keepdims: bool = False) -> "Tensor":
    """The sum over `axis`: one, several, or all where it is None."""
    x = tensor(x)
    return Sum.apply(x, _axes(axis, x.ndim), keepdims)


@torch_words
def mean(x: "Tensor", axis: Axes = None, keepdims: bool = False) -> "Tensor":
    """The mean over `axis`: one, several, or all where it is None. Integers become float32."""
    x = floating(x)
    count = prod(x.shape[i] for i in _axes(axis, x.ndim))
    return div(sum(x, axis, keepdims), count)


@torch_words
def var(x: "Tensor", axis: Axes = None, *, correction: int = 1, keepdims: bool = False) -> "Tensor":
    """The variance: squared deviations from the mean, over their count less `correction`, as in PyTorch."""
    x = floating(x)
    count = prod(x.shape[i] for i in _axes(axis, x.ndim)) - correction
    return div(sum(square(sub(x, mean(x, axis, True))), axis, keepdims), _at_least_0(count))


@torch_words
def std(x: "Tensor", axis: Axes = None, *, correction: int = 1, keepdims: bool = False) -> "Tensor":
    """The root of `var`; where all elements are equal the gradient is 0."""
    x = floating(x)
    count = prod(x.shape[i] for i in _axes(axis, x.ndim)) - correction
    return div(norm(sub(x, mean(x, axis, True)), 2, axis, keepdims), sqrt(_at_least_0(count)))


class Norm(Function):
    strided = True

    def forward(self, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
        squares = compute(np.multiply, x, x)
        y = asarray(np.sqrt(squares.sum(axis=axes, keepdims=True)))
        self.saved = (x, y)
        return y if keepdims else y.reshape([n for i, n in enumerate(y.shape) if i not in axes])

    def backward(self, dy: Array) -> tuple:
        x, y = self.saved
        share = dy.reshape(y.shape) / chosen(y == 0, 1, y, y.shape, y.dtype)
        return compute(np.multiply, x, share), None, None


@torch_words
def norm(x: "Tensor", p: float | str = "fro", axis: Axes = None, keepdims: bool = False) -> "Tensor":
    """The norm over `axis` of order p. The gradient at 0 is 0.

    Args:
        p: 2 or "fro", the root of the sum of squares; 1, the sum of absolutes; inf or -inf, the largest or
            smallest absolute.

    Raises:
        ValueError: for another p.
    """
    x = floating(x)
    if p in ("fro", 2):
        return Norm.apply(x, _axes(axis, x.ndim), keepdims)
    others = {1: sum, inf: max, -inf: min}
    if p not in others:
        raise ValueError(f"norm: p must be 'fro', 2, 1, inf or -inf, got {p!r}; (abs(x)**p).sum(axis)**(1/p)")
    return others[p](abs(x), axis, keepdims)


class LogSumExp(Function):
    strided = True

    def forward(self, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
        largest = asarray(x.max(axis=axes, keepdims=True))
        largest = chosen(np.isfinite(largest), largest, 0, largest.shape, x.dtype)
        total = np.exp(compute(np.subtract, x, largest)).sum(axis=axes, keepdims=True)
        with np.errstate(divide="ignore"):  # the logarithm of 0 where all are -inf
            y = asarray(np.log(total)) + largest
        self.saved = (x, y)
        return y if keepdims else y.reshape([n for i, n in enumerate(y.shape) if i not in axes])

    def backward(self, dy: Array) -> tuple:
        x, y = self.saved
        dx = compute(np.subtract, x, y)
        np.exp(dx, out=dx)
        dx *= dy.reshape(y.shape)
        return dx, None, None


@torch_words
def logsumexp(x: "Tensor", axis: Axes = None, keepdims: bool = False) -> "Tensor":
    """log(sum(exp(x))), the largest element taken out first. ValueError if there is no element."""
    x = floating(x)
    return LogSumExp.apply(x, _axes(axis, x.ndim), keepdims)


class CumSum(Function):
    strided = True

    def forward(self, x: Array, axis: int) -> Array:
        self.saved = (axis,)
        return np.cumsum(x, axis)

    def backward(self, dy: Array) -> tuple:
        (axis,) = self.saved
        return np.flip(np.cumsum(np.flip(dy, axis), axis), axis), None


@torch_words
def cumsum(x: "Tensor", axis: int) -> "Tensor":
    """The sum of all elements up to each, along an axis."""
    x = tensor(x)
    return CumSum.apply(x, *_axes(axis, x.ndim))


_ALSO_WHERE = {"dim": (None, "x.max(axis) gives the values, x.argmax(axis) where they are; min alike")}


class Max(Function):
    strided = True
    smallest = False

    def forward(self, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
        y = asarray((x.min if self.smallest else x.max)(axis=axes, keepdims=keepdims))
        self.saved = (x, y, axes)
        return y

    def backward(self, dy: Array) -> tuple:
        x, y, axes = self.saved
        shape = _kept(x.shape, axes)
        reached = x == y.reshape(shape)
        share = dy.reshape(shape) / reached.sum(axis=axes, keepdims=True, dtype=dy.dtype)
        return np.multiply(share, reached, out=empty_like(x)), None, None


@also(_ALSO_WHERE)
def max(x: "Tensor", axis: Axes = None, keepdims: bool = False) -> "Tensor":
    """The largest element over `axis`. Equal ones share the gradient. ValueError if there is no element."""
    x = tensor(x)
    return Max.apply(x, _axes(axis, x.ndim), keepdims)


class Min(Max):
    smallest = True


@also(_ALSO_WHERE)
def min(x: "Tensor", axis: Axes = None, keepdims: bool = False) -> "Tensor":
    """The smallest element over `axis`. Equal ones share the gradient. ValueError if there is no element."""
    x = tensor(x)
    return Min.apply(x, _axes(axis, x.ndim), keepdims)


def _at_least_0(count: int) -> int:
    return count if count > 0 else 0


def _axes(axis: Axes, ndim: int) -> tuple[int, ...]:
    if isinstance(axis, bool):  # PyTorch's x.var(False), for one
        raise TypeError(f"axis must be integers or None, got {axis}; pass other arguments by name")
    return tuple(range(ndim)) if axis is None else np.lib.array_utils.normalize_axis_tuple(axis, ndim)


def _kept(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(shape))
