"""Sums, means and largest elements over some axes or all."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shardrt import dtypes
from shardrt.autograd import Function
from shardrt.functional._arrays import asarray, broadcast, empty_like, floating, tensor
from shardrt.functional.elementwise import div

if TYPE_CHECKING:
    from shardrt.tensor import Tensor

Array = Any
Axes = int | Sequence[int] | None


class Sum(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
        self.saved = (x.shape, axes)
        low = x.dtype.name in dtypes.LOW
        total = asarray(x.sum(axis=axes, keepdims=keepdims, dtype=np.float32 if low else None))
        return total.astype(x.dtype) if low else total

    def backward(self, dy: Array) -> tuple:
        shape, axes = self.saved
        return broadcast(dy.reshape(_kept(shape, axes)), shape), None, None


def sum(x: "Tensor", axis: Axes = None, keepdims: bool = False) -> "Tensor":
    """The sum over `axis`: one, several, or all where it is None."""
    x = tensor(x)
    return Sum.apply(x, _axes(axis, x.ndim), keepdims)


def mean(x: "Tensor", axis: Axes = None, keepdims: bool = False) -> "Tensor":
    """The mean over `axis`: one, several, or all where it is None. Integers become float32."""
    x = floating(x)
    count = prod(x.shape[i] for i in _axes(axis, x.ndim))
    return div(sum(x, axis, keepdims), count)


class Max(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
        y = asarray(x.max(axis=axes, keepdims=keepdims))
        self.saved = (x, y, axes)
        return y

    def backward(self, dy: Array) -> tuple:
        x, y, axes = self.saved
        shape = _kept(x.shape, axes)
        largest = x == y.reshape(shape)
        share = dy.reshape(shape) / largest.sum(axis=axes, keepdims=True, dtype=dy.dtype)
        return np.multiply(share, largest, out=empty_like(x)), None, None


def max(x: "Tensor", axis: Axes = None, keepdims: bool = False) -> "Tensor":
    """The largest element over `axis`. Equal ones share the gradient. ValueError if there is no element."""
    x = tensor(x)
    return Max.apply(x, _axes(axis, x.ndim), keepdims)


def _axes(axis: Axes, ndim: int) -> tuple[int, ...]:
    return tuple(range(ndim)) if axis is None else np.lib.array_utils.normalize_axis_tuple(axis, ndim)


def _kept(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(shape))
