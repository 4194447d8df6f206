"""Pooling: the largest or the mean of windows of an image, and the mean of all of it."""

from math import prod
from typing import Any

import numpy as np

from shardrt.autograd import Function
from shardrt.functional._arrays import check_floats, empty, kernels, pair, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.reduce import mean
from shardrt.functional.words import only

Pair = tuple[int, int]


class MaxPool2d(Function):
    def forward(self, x: Array, shape: tuple[int, ...], geometry: tuple) -> Array:
        y, index = empty(shape, x.dtype), empty(shape, np.int32)
        kernels().pool.max_forward(_planes(x), _planes(y), _planes(index), *geometry)
        self.saved = (x.shape, index, geometry)
        return y

    def backward(self, dy: Array) -> tuple:
        shape, index, geometry = self.saved
        dx = empty(shape, dy.dtype)
        kernels().pool.max_backward(_planes(dy), _planes(index), _planes(dx), *geometry)
        return dx, None, None


def max_pool2d(
    x: "Tensor",
    kernel_size: int | Pair,
    stride: int | Pair | None = None,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> "Tensor":
    """The largest number of each window; of equal ones the first has the gradient.

    The other arguments must have their defaults.

    Args:
        x: (batch, channels, height, width), floats.
        kernel_size: of the window; one number or (vertical, horizontal), as the next two.
        stride: from window to window; as the window if None.
        padding: at most half the window; never the largest.

    Raises:
        ValueError: for sizes that don't fit.
        TypeError: for other dtypes.
    """
    dilated = 1 if dilation == (1, 1) else dilation
    only("max_pool2d", "there are no dilated windows", dilation=(dilated, 1))
    only("max_pool2d", "F.pad x with -inf", ceil_mode=(ceil_mode, False))
    only("max_pool2d", "there is no unpooling", return_indices=(return_indices, False))
    x, shape, geometry = _checked("max_pool2d", x, kernel_size, stride, padding)
    return MaxPool2d.apply(x, shape, geometry)


class MeanPool2d(Function):
    def forward(self, x: Array, shape: tuple[int, ...], geometry: tuple) -> Array:
        y = empty(shape, x.dtype)
        kernels().pool.mean_forward(_planes(x), _planes(y), *geometry)
        self.saved = (x.shape, geometry)
        return y

    def backward(self, dy: Array) -> tuple:
        shape, geometry = self.saved
        dx = empty(shape, dy.dtype)
        kernels().pool.mean_backward(_planes(dy), _planes(dx), *geometry)
        return dx, None, None


def avg_pool2d(
    x: "Tensor",
    kernel_size: int | Pair,
    stride: int | Pair | None = None,
    padding: int | Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> "Tensor":
    """The mean of each window, in which the padding counts as zeros.

    Arguments as in max_pool2d.

    Args:
        count_include_pad: False takes the mean over elements of x alone.
        divisor_override: the divisor of the sum of a window, instead of its size.
    """
    only("avg_pool2d", "F.pad x", ceil_mode=(ceil_mode, False))
    x, shape, geometry = _checked("avg_pool2d", x, kernel_size, stride, padding)
    y = MeanPool2d.apply(x, shape, geometry)
    if divisor_override is not None:
        return y * (prod(geometry[0]) / divisor_override)
    if count_include_pad or not any(geometry[2]):
        return y
    one = empty((1, 1, *x.shape[2:]), x.dtype)
    one.fill(1)
    return y / MeanPool2d.apply(tensor(one), (1, 1, *shape[2:]), geometry)


def global_avg_pool2d(x: "Tensor") -> "Tensor":
    """The mean of each channel: (batch, channels, height, width) -> (batch, channels)."""
    x = tensor(x)
    if x.ndim != 4:
        raise ValueError(f"global_avg_pool2d: x must be (batch, channels, height, width), got {x.shape}")
    return mean(x, (2, 3))


def adaptive_avg_pool2d(x: "Tensor", output_size: int | Pair) -> "Tensor":
    """The means of output_size[0] rows of output_size[1] equal windows.

    Raises:
        ValueError: where the windows would not be equal: `output_size` must divide height and width.
    """
    x, sizes = tensor(x), pair("adaptive_avg_pool2d", "output_size", output_size, 1)
    if x.ndim != 4 or min(x.shape) < 1 or x.shape[2] % sizes[0] or x.shape[3] % sizes[1]:
        raise ValueError(
            "adaptive_avg_pool2d: x must be (batch, channels, height, width), height and width multiples of "
            f"{sizes}, got {x.shape}"
        )
    return avg_pool2d(x, (x.shape[2] // sizes[0], x.shape[3] // sizes[1]))


def _checked(op: str, x: "Tensor", window: Any, stride: Any, padding: Any) -> tuple:
    """(x, shape of the result, (window, stride, padding) of the kernels)."""
    x = tensor(x)
    if x.ndim != 4 or min(x.shape) < 1:
        raise ValueError(f"{op}: x must be (batch, channels, height, width), none of them 0, got {x.shape}")
    windows = pair(op, "kernel_size", window, 1)
    strides = windows if stride is None else pair(op, "stride", stride, 1)
    paddings = pair(op, "padding", padding, 0)
    if any(2 * paddings[i] > windows[i] for i in (0, 1)):
        raise ValueError(f"{op}: padding {paddings} must be at most half of the window {windows}")
    sizes = [(x.shape[2 + i] + 2 * paddings[i] - windows[i]) // strides[i] + 1 for i in (0, 1)]
    if min(sizes) < 1:
        raise ValueError(f"{op}: the window {windows} is larger than x {x.shape} with padding {paddings}")
    check_floats(op, x=x)
    return x, (*x.shape[:2], *sizes), (windows, strides, paddings)


def _planes(x: Array) -> Array:
    return x.reshape(prod(x.shape[:2]), *x.shape[2:])
