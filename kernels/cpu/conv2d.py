"""Two-dimensional convolution, direct: no matrix of patches, the channels side by side while it computes.

(Georganas et al., Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures, 2018.) As
many images as stay in the second cache are turned from (channels, height, width) to (height, width,
channels) with a border of zeros. There forward and both gradients are sums of outer products, of a piece of a
row of pixels and a few channels, that stay in registers (_vectors.outer_sum). With one input channel in each
group there is nothing to sum over: such a convolution runs on rows of pixels (_depthwise).

stride, padding, dilation: (vertical, horizontal). Arrays are C-contiguous, of one type.
"""

from math import prod
from typing import Any, NamedTuple

import numpy as np

from shardrt.kernels.cpu import _depthwise
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu._vectors import BYTES, ROWS, VECTORS, lanes, outer_sum, transpose_tile

Array = Any
Pair = tuple[int, int]

_CHUNK = 1 << 20  # bytes of turned images, about, that are worked on at once


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
    """x (batch, channels, height, width), weight (outputs, channels / groups, rows, columns), bias (outputs,)
    or None -> y (batch, outputs, ...)."""
    work = flops(y.shape, weight.shape) // 2
    if weight.shape[1] == 1:
        planes = len(y) * y.shape[1]
        run_rows(_depthwise.forward, planes, work, x, weight, y, stride, padding, dilation)
    else:
        run_rows(_forward, len(y), work, x, weight, y, stride, padding, dilation, groups)
    if bias is not None:
        y += bias[:, None, None]


def backward_input(
    dy: Array, weight: Array, dx: Array, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> None:
    """dx, in the shape of x, from dy, in the shape of y."""
    work = flops(dy.shape, weight.shape) // 2
    if weight.shape[1] == 1:
        planes = len(dx) * dx.shape[1]
        run_rows(_depthwise.backward_input, planes, work, dy, weight, dx, stride, padding, dilation)
    else:
        run_rows(_backward_input, len(dx), work, dy, weight, dx, stride, padding, dilation, groups)


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
    if dweight.shape[1] == 1:
        work = flops(dy.shape, dweight.shape) // 2
        arrays = x, dy, dweight, accumulate
        run_rows(_depthwise.backward_weight, len(dweight), work, *arrays, stride, padding, dilation)
    else:
        _backward_weight(x, dy, dweight, accumulate, stride, padding, dilation, groups)


def backward_bias(dy: Array, dbias: Array, accumulate: bool) -> None:
    """dy -> dbias (outputs,), written or added to."""
    sums = dy.sum(axis=(0, 2, 3))
    if accumulate:
        dbias += sums
    else:
        dbias[...] = sums


def bytes_moved(x: tuple[int, ...], weight: tuple[int, ...], y: tuple[int, ...], itemsize: int = 4) -> int:
    """Bytes of forward, for arrays of these shapes: x, weight, y."""
    return sum(prod(shape) for shape in (x, weight, y)) * itemsize


def flops(y: tuple[int, ...], weight: tuple[int, ...]) -> int:
    """Operations of forward, for arrays of these shapes; either gradient has as many."""
    return 2 * prod(y) * prod(weight[1:])


def _forward(start, stop, x, weight, y, stride, padding, dilation, groups):
    channels, (rows, columns) = weight.shape[1], weight.shape[2:]
    joined = _joined(x.shape[1], groups, dilation, x.dtype)
    count = _chunk(stop - start, x, y)
    source = _turned(x.shape[1:], padding, padding, _pixel(x.shape[1], joined, x.dtype), count, x.dtype)
    target = _target(y.shape[1:], groups, count, y.dtype)
    taps = [(i, j) for i in range(rows) for j in range(columns)]
    packed = _packed(weight, taps, groups, False)
    length = columns * channels if joined else channels
    places = [i * dilation[0] * source.row + j * dilation[1] * source.pixel for i, j in taps]
    places = np.array(places[::columns] if joined else places, np.int64)
    for first in range(start, stop, count):
        images = min(count, stop - first)
        _turn(0, images, x[first:], source.data, *source.where)
        _correlate(source, target, packed, images, groups, y.shape[2:], places, length, stride, (1, 1), 0)
        _turn_back(0, images, target.data, y[first:], groups, *target.where)


def _backward_input(start, stop, dy, weight, dx, stride, padding, dilation, groups):
    """A pixel's gradient comes from the outputs whose window it is in: with strides, by other taps for each
    of the stride[0] * stride[1] phases in which it can lie to the windows."""
    phases = [
        _phases(dx.shape[2 + i], weight.shape[2 + i], stride[i], padding[i], dilation[i]) for i in (0, 1)
    ]
    reach = [_reach(phases[i], dx.shape[2 + i], dy.shape[2 + i], stride[i]) for i in (0, 1)]
    before, after = zip(*reach, strict=True)
    count, length = _chunk(stop - start, dx, dy), len(weight) // groups
    source = _turned(dy.shape[1:], before, after, _pixel(dy.shape[1], False, dy.dtype), count, dy.dtype)
    target = _target(dx.shape[1:], groups, count, dx.dtype)
    work = []
    for i, down in enumerate(phases[0]):
        for j, across in enumerate(phases[1]):
            reached = [(row, column) for row in down for column in across]
            packed = _packed(weight, [(row[0], column[0]) for row, column in reached], groups, True)
            places = [
                (before[0] + row[1]) * source.row + (before[1] + column[1]) * source.pixel
                for row, column in reached
            ]
            shape = -(-(dx.shape[2] - i) // stride[0]), -(-(dx.shape[3] - j) // stride[1])
            origin = i * target.row + j * target.pixel
            work.append((packed, shape, np.array(places, np.int64), origin))
    for first in range(start, stop, count):
        images = min(count, stop - first)
        _turn(0, images, dy[first:], source.data, *source.where)
        for packed, shape, places, origin in work:
            _correlate(source, target, packed, images, groups, shape, places, length, (1, 1), stride, origin)
        _turn_back(0, images, target.data, dx[first:], groups, *target.where)


def _backward_weight(x, dy, dweight, accumulate, stride, padding, dilation, groups):
    """For each group, tap, piece of the outputs and vectors of channels: the sum over all pixels."""
    outputs, channels, rows, columns = dweight.shape
    each, dtype = outputs // groups, x.dtype
    joined = _joined(x.shape[1], groups, dilation, dtype)
    count = _chunk(len(x), x, dy)
    source = _turned(x.shape[1:], padding, padding, _pixel(x.shape[1], joined, dtype), count, dtype)
    upper = _turned(dy.shape[1:], (0, 0), (0, 0), _pixel(outputs, False, dtype), count, dtype)
    length, across = (columns * channels, 1) if joined else (channels, columns)
    width = _whole(length, dtype)
    sums = np.empty(groups * rows * across * each * width, dtype)
    image, line = np.arange(count)[:, None], np.arange(dy.shape[2])
    from_dy = (image * upper.image + line * upper.row).reshape(-1)
    from_x = (image * source.image + line * stride[0] * source.row).reshape(-1)
    steps = upper.pixel, 1, stride[1] * source.pixel, width
    for first in range(0, len(x), count):
        images = min(count, len(x) - first)
        run_rows(_turn, images, images * x[0].size, x[first:], source.data, *source.where)
        run_rows(_turn, images, images * dy[0].size, dy[first:], upper.data, *upper.where)
        sizes, work = (images * dy.shape[2], dy.shape[3]), images * flops(dy.shape[1:], dweight.shape)
        for at, size, pieces in _pieces(each, ROWS):
            for low, vectors, blocks in _blocks(length, dtype):
                run_rows(
                    _tiles,
                    pieces,
                    work,
                    *((0,) * size, (0,) * vectors, upper.data, source.data, sums),
                    *(from_dy, from_x, sizes, steps, first > 0),
                    (pieces, groups, rows, across, blocks),
                    (size, each, 0, 0, 0),
                    (
                        *(0, channels, dilation[0] * source.row),
                        *(dilation[1] * source.pixel, vectors * lanes(dtype)),
                    ),
                    (
                        *(size * width, rows * across * each * width, across * each * width),
                        *(each * width, vectors * lanes(dtype)),
                    ),
                    (at, low, at * width + low),
                )
    taps = rows * across
    run_rows(_unpack, outputs, dweight.size, sums, dweight, groups, taps, width, joined, accumulate)


class _Images(NamedTuple):
    """Images as (height, width, channels) in a flat array; elements from one image, row, pixel to another."""

    data: Array
    image: int
    row: int
    pixel: int
    where: tuple[int, Array]  # image, and where its pixels begin


class _Weights(NamedTuple):
    """Weights as (group, vectors of outputs, tap and input, output)."""

    data: Array
    outputs: int  # in a group
    products: int  # taps times inputs


def _turned(shape: tuple, before: Pair, after: Pair, pixel: int, images: int, dtype: Any) -> _Images:
    """Room for `images` images of (channels, height, width) with a border of zeros."""
    _, height, width = shape
    row = (before[1] + width + after[1]) * pixel
    image = (before[0] + height + after[0]) * row
    down, across = np.arange(height) + before[0], np.arange(width) + before[1]
    where = (down[:, None] * row + across * pixel).reshape(-1)
    make = np.zeros if (*before, *after) != (0, 0, 0, 0) else np.empty
    data = make(images * image + VECTORS * lanes(dtype), dtype)  # vectors may reach beyond the last pixel
    return _Images(data, image, row, pixel, (image, where))


def _target(shape: tuple, groups: int, images: int, dtype: Any) -> _Images:
    """Room for results, whose groups are whole vectors."""
    pixel = groups * _whole(shape[0] // groups, dtype)
    return _turned(shape, (0, 0), (0, 0), _pixel(pixel, False, dtype), images, dtype)


def _whole(channels: int, dtype: Any) -> int:
    """Channels rounded up to whole vectors."""
    return -(-channels // lanes(dtype)) * lanes(dtype)


def _pixel(channels: int, joined: bool, dtype: Any) -> int:
    """Elements from pixel to pixel: no large power of two, which would use few lines of the first cache."""
    full = channels * np.dtype(dtype).itemsize % 512 == 0 and not joined
    return channels + lanes(dtype) if full else channels


def _joined(channels: int, groups: int, dilation: Pair, dtype: Any) -> bool:
    """Whether a row of the window is taken as one piece of memory: where pixels have few channels."""
    return groups == 1 and dilation[1] == 1 and channels < lanes(dtype)


def _chunk(images: int, *arrays: Array) -> int:
    """How many images at a time."""
    return max(1, min(images, _CHUNK // sum(array[0].nbytes for array in arrays)))


def _pieces(count: int, most: int) -> list[tuple[int, int, int]]:
    """(first, size, how many of it) that cut range(count) into pieces of about one size, at most `most`."""
    for size in range(min(most, count), most // 2, -1):
        if count % size == 0:
            return [(0, size, count // size)]
    size, larger = divmod(count, -(-count // most))
    cut = [(0, size + 1, larger), (larger * (size + 1), size, -(-count // most) - larger)]
    return [piece for piece in cut if piece[2]]


def _blocks(channels: int, dtype: Any) -> list[tuple[int, int, int]]:
    """(first channel, vectors, how many of so many vectors) that cover a group's channels."""
    whole, rest = divmod(_whole(channels, dtype) // lanes(dtype), VECTORS)
    cut = [(0, VECTORS, whole), (whole * VECTORS * lanes(dtype), rest, min(rest, 1))]
    return [block for block in cut if block[2]]


def _correlate(source, target, packed, images, groups, shape, places, length, stride, apart, origin):
    """target = the sum of source at `places` from each output, `length` numbers at each, times the weights.

    shape: the outputs, `stride` pixels of source from one to the next, `apart` pixels of target.
    """
    if min(shape) < 1:
        return
    dtype = source.data.dtype
    starts, group = np.arange(len(places)), _whole(packed.outputs, dtype)
    across, along = stride[1] * source.pixel, apart[1] * target.pixel
    for low, vectors, blocks in _blocks(packed.outputs, dtype):
        width = vectors * lanes(dtype)
        for at, size, pieces in _pieces(shape[1], ROWS):
            _tiles(
                *(0, groups, (0,) * size, (0,) * vectors, source.data, packed.data, target.data),
                *(places, starts * (length * width), (len(places), length), (1, across, width, along), False),
                (groups, blocks, images, shape[0], pieces),
                (length, 0, source.image, stride[0] * source.row, size * across),
                (group * packed.products, width * packed.products, 0, 0, 0),
                (group, width, target.image, apart[0] * target.row, size * along),
                (at * across, low * packed.products, origin + at * along + low),
            )


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


def _packed(weight: Array, taps: list[Pair], groups: int, transposed: bool) -> _Weights:
    """The weights of these taps; `transposed`: from outputs to inputs."""
    each, channels, area = len(weight) // groups, weight.shape[1], weight.shape[2] * weight.shape[3]
    outputs, inputs = (channels, each) if transposed else (each, channels)
    steps = (area, channels * area) if transposed else (channels * area, area)
    dtype, products = weight.dtype, len(taps) * inputs
    data = np.empty(groups * _whole(outputs, dtype) * products, dtype)
    places = np.array([i * weight.shape[3] + j for i, j in taps], np.int64)
    sizes = each * channels * area, outputs, inputs
    args = weight.reshape(-1), places, data, sizes, steps, lanes(dtype)
    run_rows(_pack, groups * _whole(outputs, dtype), data.size, *args)
    return _Weights(data, outputs, products)


@exact
def _pack(start, stop, weight, taps, packed, sizes, steps, lanes):
    """Rows [start, stop) of the groups' outputs; those that fill up the last vector of a group are zeros."""
    group_size, outputs, inputs = sizes
    whole = (outputs + lanes - 1) // lanes * lanes
    products = taps.size * inputs
    for row in range(start, stop):
        group, output = row // whole, row % whole
        block = output // (VECTORS * lanes) * (VECTORS * lanes)
        width = min(VECTORS * lanes, whole - block)
        to = packed[(group * whole + block) * products + output - block :]
        if output >= outputs:
            for i in range(products):
                to[i * width] = 0
            continue
        given = weight[group * group_size + output * steps[0] :]
        for i in range(inputs):
            for t in range(taps.size):
                to[(t * inputs + i) * width] = given[i * steps[1] + taps[t]]


@exact
def _unpack(start, stop, sums, dweight, groups, taps, width, joined, accumulate):
    outputs, channels, rows, columns = dweight.shape
    each = outputs // groups
    for output in range(start, stop):
        group, o = output // each, output % each
        for i in range(rows):
            for j in range(columns):
                tap, shift = (i, j * channels) if joined else (i * columns + j, 0)
                line = sums[((group * taps + tap) * each + o) * width + shift :][:channels]
                if accumulate:
                    for c in range(channels):
                        dweight[output, c, i, j] += line[c]
                else:
                    for c in range(channels):
                        dweight[output, c, i, j] = line[c]


@exact
def _tiles(
    start,
    stop,
    rows,
    vectors,
    a,
    b,
    out,
    a_starts,
    b_starts,
    sizes,
    steps,
    add,
    counts,
    by_a,
    by_b,
    by_out,
    at,
):
    """outer_sum in five loops, the first over [start, stop), the others over counts[1:].

    by_*: elements by which a step of each loop moves a, b and out; at: where they begin.
    """
    for i in range(start, stop):
        for j in range(counts[1]):
            for k in range(counts[2]):
                for m in range(counts[3]):
                    a_at = at[0] + i * by_a[0] + j * by_a[1] + k * by_a[2] + m * by_a[3]
                    b_at = at[1] + i * by_b[0] + j * by_b[1] + k * by_b[2] + m * by_b[3]
                    out_at = at[2] + i * by_out[0] + j * by_out[1] + k * by_out[2] + m * by_out[3]
                    for n in range(counts[4]):
                        places = a_at + n * by_a[4], b_at + n * by_b[4], out_at + n * by_out[4]
                        outer_sum(rows, vectors, a, b, out, a_starts, b_starts, sizes, places, steps, add)


@exact
def _turn(start, stop, x, turned, image, where):
    """Images [start, stop) of x (batch, channels, height, width) to where their pixels begin in `turned`.

    Squares of whole vectors, the last of a row or column over a part of the one before.
    """
    channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    planes = np.arange(channels) * pixels
    size = _lanes_of(x)
    for n in range(start, stop):
        plane = x[n].reshape(-1)
        if min(channels, pixels) < size:
            for c in range(channels):
                for p in range(pixels):
                    turned[n * image + where[p] + c] = plane[c * pixels + p]
            continue
        for p in range(0, pixels, size):
            p = min(p, pixels - size)
            for c in range(0, channels, size):
                c = min(c, channels - size)
                transpose_tile(plane, p, planes[c:], turned, n * image + c, where[p:])


@exact
def _turn_back(start, stop, turned, y, groups, image, where):
    """The same the other way; in `turned` each group is whole vectors."""
    channels, pixels = y.shape[1], y.shape[2] * y.shape[3]
    planes = np.arange(channels) * pixels
    size, each = _lanes_of(y), channels // groups
    whole = (each + size - 1) // size * size
    for n in range(start, stop):
        plane = y[n].reshape(-1)
        for group in range(groups):
            if min(each, pixels) < size:
                for c in range(each):
                    for p in range(pixels):
                        at = n * image + group * whole
                        plane[(group * each + c) * pixels + p] = turned[at + where[p] + c]
                continue
            for p in range(0, pixels, size):
                p = min(p, pixels - size)
                for c in range(0, each, size):
                    c = min(c, each - size)
                    first = n * image + group * whole + c
                    transpose_tile(turned, first, where[p:], plane, p, planes[group * each + c :])


@exact
def _lanes_of(array):
    return BYTES // array.itemsize
