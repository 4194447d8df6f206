"""Matmuls, batched, with broadcasting of the batch. For a layer's weight see linear.py."""

from math import prod

import numpy as np

from shardrt.autograd import Function, Variable, contiguous
from shardrt.functional._arrays import check_floats, empty, kernels, sum_to, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.shape import reshape


class MatMul(Function):
    handles = (0, 1)
    strided = True  # BLAS reads a transposed matrix as it is
    expensive = True

    def forward(self, x: Variable, y: Variable) -> Array:
        self.saved = (x if self.needs[1] else None, y if self.needs[0] else None, x.shape, y.shape)
        return _product(x.lent(), y.lent())

    def resume(self, kept: tuple, x: Variable, y: Variable) -> Array:
        self.saved = (x if self.needs[1] else None, y if self.needs[0] else None, x.shape, y.shape)
        return kept[0]

    def backward(self, dz: Array) -> tuple:
        x, y, x_shape, y_shape = self.saved
        dx = sum_to(_product(dz, y.lent().swapaxes(-1, -2)), x_shape) if self.needs[0] else None
        dy = sum_to(_product(x.lent().swapaxes(-1, -2), dz), y_shape) if self.needs[1] else None
        return dx, dy


def matmul(x: "Tensor", y: "Tensor") -> "Tensor":
    """Return x @ y: (..., m, k) with (..., k, n); a vector is a row on the left, a column on the right.

    Raises:
        ValueError: for a number or for sizes that don't fit.
        TypeError: unless both are float32 or float64.
    """
    x, y = tensor(x), tensor(y)
    check_floats("matmul", x=x, y=y)
    if x.ndim == 0 or y.ndim == 0:
        raise ValueError(f"matmul: x and y must have at least one dimension, got {x.shape} and {y.shape}")
    if x.shape[-1] != y.shape[max(0, y.ndim - 2)]:
        raise ValueError(
            f"matmul: x {x.shape} has {x.shape[-1]} columns, which must be the number of rows of y {y.shape}"
        )
    if x.ndim == 1:
        z = matmul(reshape(x, (1, *x.shape)), y)
        return reshape(z, z.shape[:-2] + z.shape[-1:] if y.ndim > 1 else ())
    if y.ndim == 1:
        z = matmul(x, reshape(y, (*y.shape, 1)))
        return reshape(z, z.shape[:-1])
    if x.ndim > 2 and y.ndim == 2:  # one large matmul instead of many small ones
        z = MatMul.apply(reshape(x, (-1, x.shape[-1])), y)
        return reshape(z, (*x.shape[:-1], y.shape[-1]))
    return MatMul.apply(x, y)


def _product(x: Array, y: Array) -> Array:
    """Return x @ y, the batch broadcast, in a new array."""
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    z = empty((*batch, x.shape[-2], y.shape[-1]), x.dtype)
    if z.ndim == 2:
        kernels().matmul.matmul(_matrix(x), _matrix(y), z)
    else:
        count = prod(batch)
        x, y = (np.broadcast_to(a, batch + a.shape[-2:]).reshape(count, *a.shape[-2:]) for a in (x, y))
        kernels().matmul.matmul(x, y, z.reshape(count, *z.shape[-2:]))
    return z


def _matrix(x: Array) -> Array:
    """A matrix that BLAS can read: one of its strides is one element."""
    return x if x.dtype.itemsize in x.strides else contiguous(x)
