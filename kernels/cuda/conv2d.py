"""Two-dimensional convolution: cuDNN's where that is at hand and fits (_cudnn_conv2d.py); else the reference.

The reference is matmuls with the matrix of patches, some images at a time. Its patches go through memory, and
each group is a matmul of its own. Arrays are C-contiguous, of one type; gradients of the weights may be
float32 where the others have 16 bits.
"""

from collections.abc import Iterator
from math import prod

import numpy as np

from shardrt.kernels.cuda._launch import Array, backend, blocks_for, empty, launch
from shardrt.kernels.cuda.batch_norm import channel_sums
from shardrt.kernels.cuda.matmul import matmul

Pair = tuple[int, int]

_PATCHES = 1 << 26  # elements of patches, about, that exist at once


def forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    y: Array,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> None:
    """x, weight, bias or None -> y, in the CPU's shapes."""
    fused = backend().convolution()
    if fused is not None and fused.forward(x, weight, y, stride, padding, dilation):
        if bias is not None:
            args = y, bias, y.size, y.shape[1], prod(y.shape[2:])
            launch("conv2d", "add_bias", y.dtype, blocks_for(y.size, 1), args)
        return
    each, geometry = len(weight) // groups, (*stride, *padding, *dilation)
    for images in _chunks(x, y, weight):
        for group in range(groups):
            patches = _patches(x[images], y, weight, group, geometry)
            beside = empty((each, patches.shape[1]), y.dtype)
            matmul(_group(weight, group, groups), patches, beside)
            _move("scatter", y[images], group * each, each, beside, bias)


def backward_input(
    dy: Array, weight: Array, dx: Array, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> None:
    """dx, in the shape of x, from dy, in the shape of y."""
    fused = backend().convolution()
    if fused is not None and fused.backward_input(dy, weight, dx, stride, padding, dilation):
        return
    each, geometry = len(weight) // groups, (*stride, *padding, *dilation)
    for images in _chunks(dx, dy, weight):
        for group in range(groups):
            beside = _beside(dy[images], group * each, each)
            patches = empty((prod(weight.shape[1:]), beside.shape[1]), dy.dtype)
            matmul(_group(weight, group, groups).T, beside, patches)
            part = dx[images]
            args = _geometry(part, dy, weight, group, geometry)
            count = len(part) * weight.shape[1] * prod(dx.shape[2:])
            launch("conv2d", "col2im", dx.dtype, blocks_for(count, 1), (patches, part, *args))


def backward_weight(
    x: Array,
    dy: Array,
    dweight: Array,
    accumulate: bool,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> None:
    """dweight, written or added to, from x and dy."""
    fused = backend().convolution()
    if fused is not None and fused.backward_weight(x, dy, dweight, accumulate, stride, padding, dilation):
        return
    each, geometry = len(dweight) // groups, (*stride, *padding, *dilation)
    for images in _chunks(x, dy, dweight):
        add = accumulate or images.start > 0
        for group in range(groups):
            patches = _patches(x[images], dy, dweight, group, geometry)
            beside = _beside(dy[images], group * each, each)
            matmul(beside, patches.T, _group(dweight, group, groups), accumulate=add)


def backward_bias(dy: Array, dbias: Array, accumulate: bool) -> None:
    """Compute dbias (outputs,) from dy, written or added to."""
    channel_sums(dy.reshape(*dy.shape[:2], -1), dbias, accumulate)


def _chunks(x: Array, y: Array, weight: Array) -> Iterator[slice]:
    """Images whose patches fit."""
    count = max(1, _PATCHES // max(1, prod(y.shape[2:]) * prod(weight.shape[1:])))
    for first in range(0, len(x), count):
        yield slice(first, min(first + count, len(x)))


def _group(weight: Array, group: int, groups: int) -> Array:
    """A group's weights as a matrix."""
    each = len(weight) // groups
    return weight[group * each : (group + 1) * each].reshape(each, -1)


def _patches(x: Array, y: Array, weight: Array, group: int, geometry: tuple) -> Array:
    patches = empty((prod(weight.shape[1:]), len(x) * prod(y.shape[2:])), x.dtype)
    args = x, patches, *_geometry(x, y, weight, group, geometry)
    launch("conv2d", "im2col", x.dtype, blocks_for(patches.size, 1), args)
    return patches


def _geometry(x: Array, y: Array, weight: Array, group: int, geometry: tuple) -> tuple:
    channels = weight.shape[1]
    sizes = x.shape[1], group * channels, channels, *x.shape[2:], *weight.shape[2:], *y.shape[2:], *geometry
    return len(x), *map(np.int32, sizes)


def _beside(dy: Array, first: int, channels: int) -> Array:
    """Some channels as (channels, images * pixels)."""
    beside = empty((channels, len(dy) * prod(dy.shape[2:])), dy.dtype)
    _move("gather", dy, first, channels, beside)
    return beside


def _move(
    function: str, planes: Array, first: int, channels: int, beside: Array, *bias: Array | None
) -> None:
    sizes = len(planes), *map(np.int32, (planes.shape[1], first, channels)), prod(planes.shape[2:])
    arrays = (planes, beside) if function == "gather" else (beside, *bias, planes)
    launch("conv2d", function, planes.dtype, blocks_for(beside.size, 1), (*arrays, *sizes))
