"""Where a convolution's numbers lie and in which tiles they are multiplied: what depends on sizes alone.

Made once for each convolution of a network and kept, since it is the same at each step. See conv2d.py.
Shapes are without the batch.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from shardrt.kernels.cpu._vectors import ROWS, VECTORS, lanes

Array = Any
Pair = tuple[int, int]

_CHUNK = 1 << 20  # bytes of turned images, about, that are worked on at once


class Layout(NamedTuple):
    """Images as (height, width, channels) in a flat array; elements from one row and pixel to another."""

    row: int
    pixel: int
    where: tuple[int, Array, Array]  # elements of an image, where its pixels begin, the channels of a pixel
    border: bool


class Plan(NamedTuple):
    """What depends on sizes alone, and is the same at each step.

    phases: the taps, as places in the window, and the nests of tiles that multiply with their weights.
    """

    images: int  # at a time
    source: Layout
    target: Layout
    turns: int
    phases: tuple


class WeightPlan(NamedTuple):
    """The same for the gradient of a weight, from x in the layout source and dy in target."""

    images: int
    source: Layout
    target: Layout
    turns: int
    nests: tuple
    sums: int  # elements
    width: int  # of a tap's sums


@lru_cache(1024)
def forward_plan(x, weight, y, stride, padding, dilation, groups, dtype) -> Plan:
    """For arrays of these shapes; x and y without the batch, here and below."""
    turns, times = _lanewise(weight, groups, dtype)
    joined = _joined(x[0], groups, dilation, dtype)
    source = _layout(_order(x[0] * times, times, False), x[1:], padding, padding, dtype, joined)
    target = _target(y, groups, dtype)
    rows, columns = (range(size) for size in weight[2:])
    places = [i * dilation[0] * source.row + j * dilation[1] * source.pixel for i in rows for j in columns]
    inputs = weight[1] if not turns else 1
    if joined:
        places, inputs = places[:: len(columns)], inputs * len(columns)
    sizes = groups, weight[0] // groups, inputs
    nests = _nests(source, target, sizes, turns, y[1:], places, stride, (1, 1), 0, dtype)
    taps = np.arange(prod(weight[2:]))
    return Plan(_images(x, y, dtype), source, target, turns, ((taps, nests),))


@lru_cache(1024)
def input_plan(x, weight, y, stride, padding, dilation, groups, dtype) -> Plan:
    """A pixel's gradient comes from the outputs whose window it is in: with strides, by other taps for each
    of the stride[0] * stride[1] phases in which it can lie to the windows."""
    turns, times = _lanewise(weight, groups, dtype)
    phases = [_phases(x[1 + i], weight[2 + i], stride[i], padding[i], dilation[i]) for i in (0, 1)]
    reach = [_reach(phases[i], x[1 + i], y[1 + i], stride[i]) for i in (0, 1)]
    before, after = zip(*reach, strict=True)
    source = _layout(_order(weight[0], times, True), y[1:], before, after, dtype)
    target = _target(x, groups, dtype)
    sizes = groups, weight[1], times if turns else weight[0] // groups
    found = []
    for i, down in enumerate(phases[0]):
        for j, across in enumerate(phases[1]):
            taps = np.array([row * weight[3] + column for row, _ in down for column, _ in across], np.int64)
            places = [
                (before[0] + lower) * source.row + (before[1] + right) * source.pixel
                for _, lower in down
                for _, right in across
            ]
            shape = -(-(x[1] - i) // stride[0]), -(-(x[2] - j) // stride[1])
            origin = i * target.row + j * target.pixel
            nests = _nests(source, target, sizes, turns, shape, places, (1, 1), stride, origin, dtype)
            found.append((taps, nests))
    return Plan(_images(x, y, dtype), source, target, turns, tuple(found))


@lru_cache(1024)
def weight_plan(x, weight, y, stride, padding, dilation, groups, dtype) -> WeightPlan:
    (turns, times), joined = _lanewise(weight, groups, dtype), _joined(x[0], groups, dilation, dtype)
    source = _layout(_order(x[0] * times, times, False), x[1:], padding, padding, dtype, joined)
    target = _layout(_order(y[0], 1, False), y[1:], (0, 0), (0, 0), dtype)
    count = _images(x, y, dtype)
    image, line = np.arange(count)[:, None], np.arange(y[1])
    from_dy = (image * target.where[0] + line * target.row).reshape(-1)
    from_x = (image * source.where[0] + line * stride[0] * source.row).reshape(-1)
    down, right = dilation[0] * source.row, dilation[1] * source.pixel
    if turns:
        starts, steps = (from_x, from_dy), (stride[1] * source.pixel, right, target.pixel)
        nests = tuple(_lane_products(weight, turns, starts, steps, (down, right), dtype))
        sums = whole_vectors(weight[0], dtype) * prod(weight[1:])
        return WeightPlan(count, source, target, turns, nests, sums, _most(turns) * lanes(dtype))
    length, across = (weight[3] * weight[1], 1) if joined else weight[1:4:2]
    starts, steps = (from_dy, from_x), (target.pixel, 1, stride[1] * source.pixel)
    sizes = weight[0] // groups, groups, weight[2], across, length
    nests = tuple(_group_products(sizes, weight[1], starts, steps, (down, right), dtype))
    width = whole_vectors(length, dtype)
    return WeightPlan(count, source, target, 0, nests, weight[0] * weight[2] * across * width, width)


def _nests(source, target, sizes, turns, shape, places, stride, apart, origin, dtype) -> tuple:
    """Of tiles: target = the sum of source at `places` from each output times the weights.

    sizes: groups, outputs and inputs of each. shape: the pixels of the outputs, from one to the next `stride`
    pixels of source and `apart` pixels of target.
    """
    if min(shape) < 1:
        return ()
    groups, outputs, inputs = sizes
    step, turned = 1, (0,) * turns
    if turns:  # all groups are one, whose input i is a vector of channels
        groups, outputs = 1, groups * outputs
        step = outputs
    products = inputs * max(1, turns)
    each = products * len(places)
    across, along = stride[1] * source.pixel, apart[1] * target.pixel
    places, starts, found = np.array(places, np.int64), np.arange(len(places)) * products, []
    for low, vectors, blocks in reversed(_blocks(outputs, dtype)):  # whole ones last: see _target
        width = vectors * lanes(dtype)
        for at, size, pieces in cut_evenly(shape[1], ROWS // 2 if turns > 1 else ROWS):
            found.append(
                (
                    ((0,) * size, (0,) * vectors, turned, ()),
                    (places, starts * width),
                    (len(places), inputs),
                    (step, across, max(1, turns) * width, along),
                    (groups, blocks, shape[0], pieces),
                    (inputs, width if turns else 0, source.where[0], stride[0] * source.row, size * across),
                    (whole_vectors(outputs, dtype) * each, width * each, 0, 0, 0),
                    (outputs, width, target.where[0], apart[0] * target.row, size * along),
                    (at * across + (low if turns else 0), low * each, origin + at * along + low),
                )
            )
    return tuple(found)


def _group_products(sizes, channels, starts, steps, apart, dtype) -> Iterator:
    """For each group, tap, piece of the outputs and vectors of channels: the sum over all pixels."""
    outputs, groups, rows, across, length = sizes
    width = whole_vectors(length, dtype)
    tap, row, group = outputs * width, across * outputs * width, rows * across * outputs * width
    for at, size, pieces in cut_evenly(outputs, ROWS):
        for low, vectors, blocks in _blocks(length, dtype):
            step = vectors * lanes(dtype)
            yield (
                ((0,) * size, (0,) * vectors, (), ()),
                starts,
                (*steps, width),
                (pieces, groups, rows, across, blocks),
                (size, outputs, 0, 0, 0),
                (0, channels, *apart, step),
                (size * width, group, row, tap, step),
                (at, low, at * width + low),
            )


def _lane_products(weight, turns, starts, steps, apart, dtype) -> Iterator:
    """The same for each few vectors of channels, row of the window and piece of its columns."""
    _, _, rows, columns = weight
    for low, vectors, blocks in _blocks(weight[0], dtype, _most(turns)):
        width = vectors * lanes(dtype)
        for at, size, pieces in cut_evenly(columns, ROWS * VECTORS // (turns * vectors)):
            yield (
                ((0,) * size, (0,) * vectors, (0,) * turns, (0,)),
                starts,
                (*steps, turns * width),
                (blocks, rows, pieces, 1, 1),
                (width, apart[0], size * apart[1], 0, 0),
                (width, 0, 0, 0, 0),
                (rows * columns * turns * width, columns * turns * width, size * turns * width, 0, 0),
                (low + at * apart[1], low, (low * rows * columns + at * width) * turns),
            )


def _layout(
    order: Array, shape: Pair, before: Pair, after: Pair, dtype: Any, joined: bool = False, room: int = 0
) -> Layout:
    """Images of (height, width) with a border of zeros, the channels in this order, and room for more."""
    height, width = shape
    pixel = order.size + room
    if not joined:
        pixel = whole_vectors(pixel, dtype)
        if pixel * dtype.itemsize % 512 == 0:  # a large power of two would use few lines of the first cache
            pixel += lanes(dtype)
    row = (before[1] + width + after[1]) * pixel
    down, across = np.arange(height) + before[0], np.arange(width) + before[1]
    where = (down[:, None] * row + across * pixel).reshape(-1)
    border = (*before, *after) != (0, 0, 0, 0)
    return Layout(row, pixel, ((before[0] + height + after[0]) * row, where, order), border)


def _target(shape: tuple, groups: int, dtype: Any) -> Layout:
    """Of results. The last vector of a group reaches into the next, which is written after it."""
    room = lanes(dtype) if shape[0] // groups % lanes(dtype) else 0
    return _layout(np.arange(shape[0]), shape[1:], (0, 0), (0, 0), dtype, room=room)


def _order(count: int, times: int, outputs: bool) -> Array:
    """Channels, each for its `times` outputs; or outputs, the first of every channel, every second, ..."""
    line, channels = np.arange(count), count // times
    return line % channels * times + line // channels if outputs else line // times


def _lanewise(weight: tuple, groups: int, dtype: Any) -> Pair:
    """(turns that take a lane to all inputs of its group, outputs of an input), or 0 turns: see conv2d.py."""
    outputs, channels = weight[0] // groups, weight[1]
    if channels == 1 < groups:
        return 1, outputs
    fit = outputs == channels < lanes(dtype) and lanes(dtype) % channels == 0 and groups > 1
    return channels if fit else 0, 1


def whole_vectors(channels: int, dtype: Any) -> int:
    """Channels rounded up to whole vectors."""
    return -(-channels // lanes(dtype)) * lanes(dtype)


def _joined(channels: int, groups: int, dilation: Pair, dtype: Any) -> bool:
    """Whether a row of the window is taken as one piece of memory: where pixels have few channels."""
    return groups == 1 and dilation[1] == 1 and channels < lanes(dtype)


def _images(x: tuple, y: tuple, dtype: Any) -> int:
    """How many at a time."""
    return max(1, min(256, _CHUNK // ((prod(x) + prod(y)) * dtype.itemsize)))


def _most(turns: int) -> int:
    """Vectors of channels in a tile of a weight's gradient, lane by lane, with `turns` sums for each."""
    return VECTORS if turns == 1 else 1


def cut_evenly(count: int, most: int) -> list[tuple[int, int, int]]:
    """(first, size, how many of it) that cut range(count) into pieces of about one size, at most `most`."""
    for size in range(min(most, count), most // 2, -1):
        if count % size == 0:
            return [(0, size, count // size)]
    size, larger = divmod(count, -(-count // most))
    cut = [(0, size + 1, larger), (larger * (size + 1), size, -(-count // most) - larger)]
    return [piece for piece in cut if piece[2]]


def _blocks(channels: int, dtype: Any, most: int = VECTORS) -> list[tuple[int, int, int]]:
    """(first channel, vectors, how many of so many vectors) that cover a group's channels."""
    whole, rest = divmod(whole_vectors(channels, dtype) // lanes(dtype), most)
    cut = [(0, most, whole), (whole * most * lanes(dtype), rest, min(rest, 1))]
    return [block for block in cut if block[2]]


def _phases(size: int, window: int, stride: int, padding: int, dilation: int) -> list[list[Pair]]:
    """For a pixel at each phase, the taps that reach it, each with how far from it the output lies."""
    return [
        [
            (tap, (phase + padding - tap * dilation) // stride)
            for tap in range(window)
            if (phase + padding - tap * dilation) % stride == 0
        ]
        for phase in range(min(stride, size))
    ]


def _reach(phases: list[list[Pair]], size: int, outputs: int, stride: int) -> Pair:
    """The border that outputs need so that every tap of every pixel finds a number."""
    before = after = 0
    for phase, taps in enumerate(phases):
        last = (size - 1 - phase) // stride
        for _, offset in taps:
            before, after = max(before, -offset), max(after, last + offset - (outputs - 1))
    return before, after
