"""Where a convolution's numbers lie and in which tiles they are multiplied: what depends on sizes alone.

Made once for each convolution of a network and kept, since it is the same at each step. See conv2d.py.
Shapes are without the batch.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from shardrt.kernels.cost import Array
from shardrt.kernels.cpu._vectors import ROWS, VECTORS, lanes

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
    target: Layout | None  # None: dy as it lies, whose numbers are taken one by one
    turns: int
    by_outputs: bool  # numbers of x are taken one by one, and vectors are outputs
    nests: tuple
    sums: int  # elements
    width: int  # of a tap's sums
    split: int  # pieces into which source's channels are cut, each an image of its own: groups, or 1


@lru_cache(1024)
def forward_plan(x, weight, y, stride, padding, dilation, groups, dtype) -> Plan:
    """For arrays of these shapes; x and y without the batch, here and below."""
    turns, times = _lanewise(weight, groups, dtype)
    joined = _joined(x[0], groups, dilation, dtype)
    source = _layout(_order(x[0] * times, times, False), x[1:], padding[1], padding[1], dtype, joined)
    target = _target(y, groups, dtype)
    rows, columns = (range(size) for size in weight[2:])
    places = [(i * dilation[0] - padding[0], j * dilation[1] * source.pixel) for i in rows for j in columns]
    inputs = weight[1] if not turns else 1
    if joined:
        places, inputs = places[:: len(columns)], inputs * len(columns)
    sizes = groups, weight[0] // groups, inputs
    nests = _nests(source, target, sizes, turns, (x[1], *y[1:]), places, stride, (1, 1), 0, dtype)
    taps = np.arange(prod(weight[2:]))
    return Plan(_images(x, y, dtype), source, target, turns, ((taps, nests),))


@lru_cache(1024)
def input_plan(x, weight, y, stride, padding, dilation, groups, dtype) -> Plan:
    """The plan of the input's gradient.

    A pixel's gradient comes from the outputs whose window it is in: with strides, by other taps for each of
    the stride[0] * stride[1] phases in which it can lie to the windows.
    """
    turns, times = _lanewise(weight, groups, dtype)
    phases = [_phases(x[1 + i], weight[2 + i], stride[i], padding[i], dilation[i]) for i in (0, 1)]
    before, after = _reach(phases[1], x[2], y[2], stride[1])
    source = _layout(_order(weight[0], times, True), y[1:], before, after, dtype)
    target = _target(x, groups, dtype)
    sizes = groups, weight[1], times if turns else weight[0] // groups
    found = []
    for i, down in enumerate(phases[0]):
        for j, across in enumerate(phases[1]):
            taps = np.array([row * weight[3] + column for row, _ in down for column, _ in across], np.int64)
            places = [(lower, (before + right) * source.pixel) for _, lower in down for _, right in across]
            shape = y[1], -(-(x[1] - i) // stride[0]), -(-(x[2] - j) // stride[1])
            origin = i * target.row + j * target.pixel
            nests = _nests(source, target, sizes, turns, shape, places, (1, 1), stride, origin, dtype)
            found.append((taps, nests))
    return Plan(_images(x, y, dtype), source, target, turns, tuple(found))


@lru_cache(1024)
def weight_plan(x, weight, y, stride, padding, dilation, groups, dtype) -> WeightPlan:
    turns, times = _lanewise(weight, groups, dtype)
    joined = not turns and weight[3] > 1 and dilation[1] == 1 and weight[1] <= VECTORS * lanes(dtype)
    by_outputs = joined and _by_outputs(weight, groups, dtype)
    split = groups if joined else 1
    order = _order(x[0] // split * times, times, False)
    source = _layout(order, x[1:], padding[1], padding[1], dtype, joined)
    target, (image_step, row_step, pixel_step, output_step) = None, (prod(y), y[2], 1, y[1] * y[2])
    crowded = output_step * dtype.itemsize % 2048 == 0  # in the same few lines of the first cache
    if turns or by_outputs or crowded:
        target = _layout(_order(y[0], 1, False), y[1:], 0, 0, dtype)
        image_step, row_step, pixel_step, output_step = target.where[0], target.row, target.pixel, 1
    count = _images(x, y, dtype)
    image, right = np.arange(count)[:, None], dilation[1] * source.pixel
    length, across = (weight[3] * weight[1], 1) if joined else weight[1:4:2]
    sizes = weight[0] // groups, groups, weight[2], across, length
    if by_outputs:  # dy takes the part of x, and x of dy
        sizes = length, groups, weight[2], across, weight[0]
    apart = source.where[0] if joined else weight[1]
    if turns:
        width, sums = _most(turns) * lanes(dtype), whole_vectors(weight[0], dtype) * prod(weight[1:])
    else:
        width = whole_vectors(sizes[-1], dtype)
        sums = prod(sizes[:-1]) * width
    nests = []
    for row in range(weight[2]):
        line, down = np.arange(y[1]), row * dilation[0] - padding[0]
        line = line[(line * stride[0] + down >= 0) & (line * stride[0] + down < x[1])]
        from_dy = (image * image_step + line * row_step).reshape(-1)
        from_x = (image * split * source.where[0] + (line * stride[0] + down) * source.row).reshape(-1)
        if turns:
            steps = stride[1] * source.pixel, right, pixel_step
            found = _lane_products(weight, turns, row, (from_x, from_dy), steps, right, dtype)
        elif by_outputs:
            steps = stride[1] * source.pixel, 1, pixel_step
            found = _group_products(sizes, apart, row, (from_x, from_dy), steps, right, dtype)
        else:
            steps = pixel_step, output_step, stride[1] * source.pixel
            found = _group_products(sizes, apart, row, (from_dy, from_x), steps, right, dtype)
        nests += [(len(line), *nest) for nest in found]
    return WeightPlan(count, source, target, turns, by_outputs, tuple(nests), sums, width, split)


def _nests(source, target, sizes, turns, shape, places, stride, apart, origin, dtype) -> tuple:
    """Of tiles: target = the sum of source at `places` from each output times the weights.

    sizes: groups, outputs and inputs of each. shape: the rows of source, and the pixels of the outputs, from
    one to the next `stride` pixels of source and `apart` pixels of target. places: by rows and by elements;
    rows that the source does not have are left out.
    """
    height, *shape = shape
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
    starts, found = np.arange(len(places)) * products, []
    rows, elements = np.array(places, np.int64).reshape(-1, 2).T
    places = rows * source.row + elements
    for first, count, met in _runs(rows, shape[0], stride[0], height):
        for low, vectors, blocks in reversed(_blocks(outputs, dtype)):  # whole ones last: see _target
            width = vectors * lanes(dtype)
            for at, size, pieces in cut_evenly(shape[1], ROWS // 2 if turns > 1 else ROWS):
                down = stride[0] * source.row
                from_source = first * down + at * across + (low if turns else 0)
                to = origin + first * apart[0] * target.row + at * along + low
                found.append(
                    (
                        ((0,) * size, (0,) * vectors, turned, ()),
                        (places[met], starts[met] * width),
                        (len(met), inputs),
                        (step, across, max(1, turns) * width, along),
                        (groups, blocks, count, pieces),
                        (
                            inputs,
                            width if turns else 0,
                            source.where[0],
                            stride[0] * source.row,
                            size * across,
                        ),
                        (whole_vectors(outputs, dtype) * each, width * each, 0, 0, 0),
                        (outputs, width, target.where[0], apart[0] * target.row, size * along),
                        (from_source, low * each, to),
                    )
                )
    return tuple(found)


def _runs(rows: Array, count: int, stride: int, height: int) -> Iterator[tuple[int, int, Array]]:
    """(first, how many, taps) of outputs' rows that meet the source, of so many rows, by the same taps."""
    first = 0
    met = [np.flatnonzero((0 <= i * stride + rows) & (i * stride + rows < height)) for i in range(count)]
    for i in range(1, count + 1):
        if i == count or met[i].tolist() != met[first].tolist():
            yield first, i - first, met[first]
            first = i


def _group_products(sizes, apart, i, starts, steps, right, dtype) -> Iterator:
    """Sum over all pixels, for each group, tap of row i of the window, piece of outputs, vectors of channels.

    apart: elements from one group of channels to the next.
    """
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
                (pieces, groups, 1, across, blocks),
                (size * steps[1], outputs * steps[1], 0, 0, 0),
                (0, apart, 0, right, step),
                (size * width, group, 0, tap, step),
                (at * steps[1], low, at * width + low + i * row),
            )


def _lane_products(weight, turns, i, starts, steps, right, dtype) -> Iterator:
    """The same for each few vectors of channels and piece of the window's columns."""
    _, _, rows, columns = weight
    for low, vectors, blocks in _blocks(weight[0], dtype, _most(turns)):
        width = vectors * lanes(dtype)
        for at, size, pieces in cut_evenly(columns, ROWS * VECTORS // (turns * vectors)):
            yield (
                ((0,) * size, (0,) * vectors, (0,) * turns, (0,)),
                starts,
                (*steps, turns * width),
                (blocks, 1, pieces, 1, 1),
                (width, 0, size * right, 0, 0),
                (width, 0, 0, 0, 0),
                (rows * columns * turns * width, 0, size * turns * width, 0, 0),
                (low + at * right, low, (low * rows * columns + (i * columns + at) * width) * turns),
            )


def _layout(
    order: Array, shape: Pair, before: int, after: int, dtype: Any, joined: bool = False, room: int = 0
) -> Layout:
    """Images of (height, width), so many zeros before and after each row, and room for more channels."""
    height, width = shape
    pixel = order.size + room
    if not joined:
        pixel = whole_vectors(pixel, dtype)
        if pixel * dtype.itemsize % 512 == 0:  # a large power of two would use few lines of the first cache
            pixel += lanes(dtype)
    row = (before + width + after) * pixel
    where = (np.arange(height)[:, None] * row + (np.arange(width) + before) * pixel).reshape(-1)
    return Layout(row, pixel, (height * row, where, order), before + after > 0)


def _target(shape: tuple, groups: int, dtype: Any) -> Layout:
    """Of results. The last vector of a group reaches into the next, which is written after it."""
    room = lanes(dtype) if shape[0] // groups % lanes(dtype) else 0
    return _layout(np.arange(shape[0]), shape[1:], 0, 0, dtype, room=room)


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


def _by_outputs(weight: tuple, groups: int, dtype: Any) -> bool:
    """Whether outputs fill vectors better than a row of the window, for a weight's gradient.

    By so much that turning dy, which is else read where it lies, is made up for.
    """
    waste, of_outputs = (whole_vectors(n, dtype) / n for n in (weight[1] * weight[3], weight[0]))
    return groups == 1 and waste > 1.15 * of_outputs


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
