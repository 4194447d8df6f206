"""Two-dimensional convolution, direct: no matrix of patches, the channels side by side while it computes.

(Georganas et al., Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures, 2018.) As
many images as stay in the second cache are turned from (channels, height, width) to (height, width,
channels) with a border of zeros. There forward and both gradients are sums of products, of a piece of a row
of pixels and a few vectors of channels, that stay in registers (_vectors.tile_sum).

A group that fills vectors is a product of matrices: a number of the one operand times a vector of the other.
Groups of a few channels, one in depthwise convolution, would leave most of a vector empty. There ("lanewise")
vectors are multiplied with vectors, so many groups at once, and the lanes of one turn round within each group
until every output has met every input.

stride, padding, dilation: (vertical, horizontal). Arrays are C-contiguous, of one type.
"""

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu._vectors import BYTES, ROWS, VECTORS, lanes, tile_sum, transpose_tile

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
    run_rows(_forward, len(y), work, x, weight, y, stride, padding, dilation, groups)
    if bias is not None:
        y += bias[:, None, None]


def backward_input(
    dy: Array, weight: Array, dx: Array, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> None:
    """dx, in the shape of x, from dy, in the shape of y."""
    work = flops(dy.shape, weight.shape) // 2
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
    turns, times = _lanewise(dweight, groups)
    joined = _joined(x.shape[1], groups, dilation, x.dtype)
    count = _chunk(len(x), x, dy)
    source = _turned(_order(x.shape[1] * times, times, False), x.shape[2:], padding, padding, count, x.dtype, joined)
    upper = _turned(_order(dy.shape[1], 1, False), dy.shape[2:], (0, 0), (0, 0), count, x.dtype)
    image, line = np.arange(count)[:, None], np.arange(dy.shape[2])
    from_dy = (image * upper.image + line * upper.row).reshape(-1)
    from_x = (image * source.image + line * stride[0] * source.row).reshape(-1)
    if turns:
        sums = _aligned(np.empty, _whole(len(dweight), x.dtype) * prod(dweight.shape[1:]), x.dtype)
        nests = list(_lane_products(dweight, turns, source, upper, from_x, from_dy, stride, dilation))
    else:
        length, across = (dweight.shape[3] * dweight.shape[1], 1) if joined else dweight.shape[1:4:2]
        width = _whole(length, x.dtype)
        sums = np.empty(len(dweight) * dweight.shape[2] * across * width, x.dtype)
        each = len(dweight) // groups, groups, dweight.shape[2], across, length, dweight.shape[1]
        nests = list(_group_products(each, source, upper, from_x, from_dy, stride, dilation))
    work = count * flops(dy.shape[1:], dweight.shape)
    for first in range(0, len(x), count):
        images = min(count, len(x) - first)
        run_rows(_turn, images, images * x[0].size, x[first:], source.data, *source.where)
        run_rows(_turn, images, images * dy[0].size, dy[first:], upper.data, *upper.where)
        sizes = images * dy.shape[2], dy.shape[3]
        for tile, a, b, steps, *nest in nests:
            arrays = a[0], b[0], sums, a[1], b[1]
            run_rows(_tiles, nest[0][0], work, tile, *arrays, sizes, steps, first > 0, *nest)
    if turns:
        taps = np.arange(prod(dweight.shape[2:]))
        flat = dweight.reshape(len(dweight), dweight.shape[1], -1)
        sizes = turns, 1, 1 if turns > 1 else VECTORS
        run_rows(_move_lanes, len(dweight), sums.size, flat, taps, sums, sizes, True, True, accumulate)
    else:
        taps = dweight.shape[2] * across
        run_rows(_unpack, len(dweight), dweight.size, sums, dweight, groups, taps, width, joined, accumulate)


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
    rows, columns = weight.shape[2:]
    _, times = _lanewise(weight, groups)
    joined = _joined(x.shape[1], groups, dilation, x.dtype)
    count = _chunk(stop - start, x, y)
    source = _turned(_order(x.shape[1] * times, times, False), x.shape[2:], padding, padding, count, x.dtype, joined)
    target = _target(y.shape[1:], groups, count, y.dtype)
    taps = [(i, j) for i in range(rows) for j in range(columns)]
    packed = _packed(weight, taps, groups, False)
    places = [i * dilation[0] * source.row + j * dilation[1] * source.pixel for i, j in taps]
    if joined:
        places, packed = places[::columns], packed._replace(length=columns * packed.length)
    places = np.array(places, np.int64)
    for first in range(start, stop, count):
        images = min(count, stop - first)
        _turn(0, images, x[first:], source.data, *source.where)
        _correlate(source, target, packed, images, y.shape[2:], places, stride, (1, 1), 0)
        _turn_back(0, images, target.data, y[first:], *target.where)


def _backward_input(start, stop, dy, weight, dx, stride, padding, dilation, groups):
    """A pixel's gradient comes from the outputs whose window it is in: with strides, by other taps for each
    of the stride[0] * stride[1] phases in which it can lie to the windows."""
    _, times = _lanewise(weight, groups)
    phases = [
        _phases(dx.shape[2 + i], weight.shape[2 + i], stride[i], padding[i], dilation[i]) for i in (0, 1)
    ]
    reach = [_reach(phases[i], dx.shape[2 + i], dy.shape[2 + i], stride[i]) for i in (0, 1)]
    before, after = zip(*reach, strict=True)
    count = _chunk(stop - start, dx, dy)
    source = _turned(_order(len(weight), times, True), dy.shape[2:], before, after, count, dy.dtype)
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
            _correlate(source, target, packed, images, shape, places, (1, 1), stride, origin)
        _turn_back(0, images, target.data, dx[first:], *target.where)


def _group_products(each, source, upper, from_x, from_dy, stride, dilation) -> Iterator:
    """For each group, tap, piece of the outputs and vectors of channels: the sum over all pixels."""
    outputs, groups, rows, across, length, channels = each
    dtype, width = source.data.dtype, _whole(length, source.data.dtype)
    for at, size, pieces in _pieces(outputs, ROWS):
        for low, vectors, blocks in _blocks(length, dtype):
            step = vectors * lanes(dtype)
            yield (
                ((0,) * size, (0,) * vectors, (), ()),
                (upper.data, from_dy),
                (source.data, from_x),
                (upper.pixel, 1, stride[1] * source.pixel, width),
                (pieces, groups, rows, across, blocks),
                (size, outputs, 0, 0, 0),
                (0, channels, dilation[0] * source.row, dilation[1] * source.pixel, step),
                (
                    *(size * width, rows * across * outputs * width, across * outputs * width),
                    *(outputs * width, step),
                ),
                (at, low, at * width + low),
            )


def _lane_products(dweight, turns, source, upper, from_x, from_dy, stride, dilation) -> Iterator:
    """For each few vectors of channels, row of the window, piece of its columns and turn: the same."""
    rows, columns = dweight.shape[2:]
    dtype, most = source.data.dtype, VECTORS if turns == 1 else 1
    right = dilation[1] * source.pixel
    for low, vectors, blocks in _blocks(len(dweight), dtype, most):
        width = vectors * lanes(dtype)
        for at, size, pieces in _pieces(columns, ROWS * VECTORS // (turns * vectors)):
            yield (
                ((0,) * size, (0,) * vectors, (0,) * turns, (0,)),
                (source.data, from_x),
                (upper.data, from_dy),
                (stride[1] * source.pixel, right, upper.pixel, turns * width),
                (blocks, rows, pieces, 1, 1),
                (width, dilation[0] * source.row, size * right, 0, 0),
                (width, 0, 0, 0, 0),
                (rows * columns * turns * width, columns * turns * width, size * turns * width, 0, 0),
                (low + at * right, low, (low * rows * columns + at * width) * turns),
            )


class _Images(NamedTuple):
    """Images as (height, width, channels) in a flat array; elements from one image, row, pixel to another."""

    data: Array
    image: int
    row: int
    pixel: int
    where: tuple[int, Array, Array]  # image, where its pixels begin, the channels as they lie in a pixel


class _Weights(NamedTuple):
    """Weights as (group, vectors of outputs, tap, input, turn, output); lanewise there is one group."""

    data: Array
    groups: int
    outputs: int  # in a group
    length: int  # inputs at a tap
    turns: int
    inputs: int  # in a group, so that the next group's are so much further
    step: int  # from input to input


def _turned(
    order: Array,
    shape: Pair,
    before: Pair,
    after: Pair,
    images: int,
    dtype: Any,
    joined: bool = False,
    room: int = 0,
) -> _Images:
    """Room for `images` images of (height, width) with a border of zeros, the channels in this order, and
    `room` for more of them."""
    height, width = shape
    pixel = order.size + room
    if not joined:
        pixel = _whole(pixel, dtype)
        if pixel * dtype.itemsize % 512 == 0:  # a large power of two would use few lines of the first cache
            pixel += lanes(dtype)
    row = (before[1] + width + after[1]) * pixel
    image = (before[0] + height + after[0]) * row
    down, across = np.arange(height) + before[0], np.arange(width) + before[1]
    where = (down[:, None] * row + across * pixel).reshape(-1)
    make = np.zeros if (*before, *after) != (0, 0, 0, 0) else np.empty
    data = _aligned(make, images * image + VECTORS * lanes(dtype), dtype)  # vectors may reach beyond the last
    return _Images(data, image, row, pixel, (image, where, order))


def _target(shape: tuple, groups: int, images: int, dtype: Any) -> _Images:
    """Room for results. The last vector of a group reaches into the next, which is written after it."""
    room = lanes(dtype) if shape[0] // groups % lanes(dtype) else 0
    return _turned(np.arange(shape[0]), shape[1:], (0, 0), (0, 0), images, dtype, room=room)


def _aligned(make: Any, count: int, dtype: Any) -> Array:
    """An array that begins where a vector may begin: those that straddle lines of the cache take two loads."""
    data = make(count + lanes(dtype), dtype)
    return data[-data.ctypes.data % BYTES // data.itemsize :][:count]


def _order(count: int, times: int, outputs: bool) -> Array:
    """Channels, each repeated for its `times` outputs; or outputs, the first of every channel before the second."""
    line, channels = np.arange(count), count // times
    return line % channels * times + line // channels if outputs else line // times


def _lanewise(weight: Array, groups: int) -> Pair:
    """(turns that take a lane to all inputs of its group, outputs of each lane of the input); or 0 turns."""
    outputs, channels = len(weight) // groups, weight.shape[1]
    if channels == 1 < groups:
        return 1, outputs
    fit = outputs == channels < lanes(weight.dtype) and lanes(weight.dtype) % channels == 0 and groups > 1
    return channels if fit else 0, 1


def _whole(channels: int, dtype: Any) -> int:
    """Channels rounded up to whole vectors."""
    return -(-channels // lanes(dtype)) * lanes(dtype)


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


def _blocks(channels: int, dtype: Any, most: int = VECTORS) -> list[tuple[int, int, int]]:
    """(first channel, vectors, how many of so many vectors) that cover a group's channels."""
    whole, rest = divmod(_whole(channels, dtype) // lanes(dtype), most)
    cut = [(0, most, whole), (whole * most * lanes(dtype), rest, min(rest, 1))]
    return [block for block in cut if block[2]]


def _correlate(source, target, packed, images, shape, places, stride, apart, origin):
    """target = the sum of source at `places` from each output times the weights.

    shape: the outputs, `stride` pixels of source from one to the next, `apart` pixels of target.
    """
    if min(shape) < 1:
        return
    dtype, turns = source.data.dtype, (0,) * packed.turns
    products = packed.length * max(1, packed.turns)
    starts, group = np.arange(len(places)), _whole(packed.outputs, dtype) * products * len(places)
    across, along = stride[1] * source.pixel, apart[1] * target.pixel
    for low, vectors, blocks in reversed(_blocks(packed.outputs, dtype)):  # whole ones last: see _target
        width = vectors * lanes(dtype)
        a_low, a_step = (low, width) if turns else (0, 0)
        for at, size, pieces in _pieces(shape[1], ROWS // 2 if packed.turns > 1 else ROWS):
            _tiles(
                *(0, packed.groups, ((0,) * size, (0,) * vectors, turns, ())),
                *(source.data, packed.data, target.data, places, starts * (products * width)),
                *((len(places), packed.length), (packed.step, across, max(1, packed.turns) * width, along), False),
                (packed.groups, blocks, images, shape[0], pieces),
                (packed.inputs, a_step, source.image, stride[0] * source.row, size * across),
                (group, width * products * len(places), 0, 0, 0),
                (packed.outputs, width, target.image, apart[0] * target.row, size * along),
                (a_low + at * across, low * products * len(places), origin + at * along + low),
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
    dtype, (turns, times) = weight.dtype, _lanewise(weight, groups)
    places = np.array([i * weight.shape[3] + j for i, j in taps], np.int64)
    if turns:
        outputs, length = (groups * channels, times) if transposed else (len(weight), 1)
        data = _aligned(np.zeros, _whole(outputs, dtype) * places.size * length * turns, dtype)
        flat = weight.reshape(len(weight), channels, area)
        sizes = turns, length, VECTORS
        run_rows(_move_lanes, outputs, data.size, flat, places, data, sizes, transposed, False, False)
        return _Weights(data, 1, outputs, length, turns, 0, outputs)
    outputs, inputs = (channels, each) if transposed else (each, channels)
    steps = (area, channels * area) if transposed else (channels * area, area)
    data = _aligned(np.empty, groups * _whole(outputs, dtype) * len(taps) * inputs, dtype)
    sizes = each * channels * area, outputs, inputs
    args = weight.reshape(-1), places, data, sizes, steps, lanes(dtype)
    run_rows(_pack, groups * _whole(outputs, dtype), data.size, *args)
    return _Weights(data, groups, outputs, inputs, 0, inputs, 1)


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
def _move_lanes(start, stop, weight, taps, packed, sizes, transposed, back, add):
    """Lanes [start, stop) of `packed` (vectors of lanes, tap, input, turn, lane) from weight (outputs, channels,
    window), or `back`. Lanes are outputs, or inputs if `transposed`."""
    turns, times, most = sizes
    most *= _lanes_of(packed)
    whole = packed.size // (taps.size * times * turns)
    for lane in range(start, stop):
        low = lane // most * most
        width, run = min(most, whole - low), lane // turns * turns
        first = low * taps.size * times * turns + lane - low
        for turn in range(turns):
            met = run + (lane - run + turn) % turns
            for i in range(times):
                line = weight[met * times + i, lane - run] if transposed else weight[lane, met - run]
                for t in range(taps.size):
                    at = first + ((t * times + i) * turns + turn) * width
                    if not back:
                        packed[at] = line[taps[t]]
                    elif add:
                        line[taps[t]] += packed[at]
                    else:
                        line[taps[t]] = packed[at]


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
    tile,
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
    """tile_sum in five loops, the first over [start, stop), the others over counts[1:].

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
                        tile_sum(tile, a, b, out, a_starts, b_starts, sizes, places, steps, add)


@exact
def _turn(start, stop, x, turned, image, where, order):
    """Images [start, stop) of x (batch, channels, height, width) to where their pixels begin in `turned`.

    Squares of whole vectors, the last of a row or column over a part of the one before.
    """
    channels, pixels = order.size, x.shape[2] * x.shape[3]
    planes = order * pixels
    size = _lanes_of(x)
    for n in range(start, stop):
        plane = x[n].reshape(-1)
        if min(channels, pixels) < size:
            for c in range(channels):
                for p in range(pixels):
                    turned[n * image + where[p] + c] = plane[planes[c] + p]
            continue
        for p in range(0, pixels, size):
            p = min(p, pixels - size)
            for c in range(0, channels, size):
                c = min(c, channels - size)
                transpose_tile(plane, p, planes[c:], turned, n * image + c, where[p:])


@exact
def _turn_back(start, stop, turned, y, image, where, order):
    """The same the other way."""
    channels, pixels = order.size, y.shape[2] * y.shape[3]
    planes = order * pixels
    size = _lanes_of(y)
    for n in range(start, stop):
        plane = y[n].reshape(-1)
        if min(channels, pixels) < size:
            for c in range(channels):
                for p in range(pixels):
                    plane[planes[c] + p] = turned[n * image + where[p] + c]
            continue
        for p in range(0, pixels, size):
            p = min(p, pixels - size)
            for c in range(0, channels, size):
                c = min(c, channels - size)
                transpose_tile(turned, n * image + c, where[p:], plane, p, planes[c:])


@exact
def _lanes_of(array):
    return BYTES // array.itemsize
