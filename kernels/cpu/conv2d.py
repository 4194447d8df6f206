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
from functools import lru_cache
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
    plan = _forward_plan(x.shape[1:], weight.shape, y.shape[1:], stride, padding, dilation, groups, x.dtype)
    _convolve(plan, x, weight, y, False, groups)
    if bias is not None:
        y += bias[:, None, None]


def backward_input(
    dy: Array, weight: Array, dx: Array, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> None:
    """dx, in the shape of x, from dy, in the shape of y."""
    plan = _input_plan(dx.shape[1:], weight.shape, dy.shape[1:], stride, padding, dilation, groups, dy.dtype)
    _convolve(plan, dy, weight, dx, True, groups)


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
    plan = _weight_plan(x.shape[1:], dweight.shape, dy.shape[1:], stride, padding, dilation, groups, x.dtype)
    count = min(plan.images, len(x))
    source, upper = _scratch(plan.source, count, x.dtype), _scratch(plan.target, count, x.dtype)
    sums = _aligned(np.empty, plan.sums, x.dtype)
    work = count * flops(dy.shape[1:], dweight.shape)
    for first in range(0, len(x), count):
        images = min(count, len(x) - first)
        run_rows(_turn, images, images * x[0].size, x[first:], source, *plan.source.where)
        run_rows(_turn, images, images * dy[0].size, dy[first:], upper, *plan.target.where)
        sizes = images * dy.shape[2], dy.shape[3]
        for tile, starts, steps, *nest in plan.nests:
            arrays = (source, upper, sums) if plan.turns else (upper, source, sums)
            run_rows(_tiles, nest[0][0], work, tile, *arrays, *starts, sizes, steps, first > 0, *nest)
    args = sums, dweight, groups, plan.turns, plan.width, accumulate
    run_rows(_unpack_lanes if plan.turns else _unpack, len(dweight), dweight.size, *args)


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


class _Layout(NamedTuple):
    """Images as (height, width, channels) in a flat array; elements from one row and pixel to another."""

    row: int
    pixel: int
    where: tuple[int, Array, Array]  # elements of an image, where its pixels begin, the channels of a pixel
    border: bool


class _Plan(NamedTuple):
    """What depends on sizes alone, and is the same at each step.

    phases: the taps, as places in the window, and the nests of tiles that multiply with their weights.
    """

    images: int  # at a time
    source: _Layout
    target: _Layout
    turns: int
    phases: tuple


class _WeightPlan(NamedTuple):
    images: int
    source: _Layout
    target: _Layout
    turns: int
    nests: tuple
    sums: int  # elements
    width: int  # of a tap's sums


def _convolve(plan: _Plan, x: Array, weight: Array, y: Array, transposed: bool, groups: int) -> None:
    packed = [_packed(weight, phase[0], groups, plan.turns, transposed) for phase in plan.phases]
    work = len(x) * max(x[0].size, y[0].size) * prod(weight.shape[1:])
    run_rows(_convolve_images, len(x), work, plan, packed, x, y)


def _convolve_images(start, stop, plan, packed, x, y):
    count = min(plan.images, stop - start)
    source, target = _scratch(plan.source, count, x.dtype), _scratch(plan.target, count, x.dtype)
    for first in range(start, stop, count):
        images = min(count, stop - first)
        _turn(0, images, x[first:], source, *plan.source.where)
        for weights, (_, nests) in zip(packed, plan.phases, strict=True):
            for tile, starts, sizes, steps, (groups, blocks, rows, pieces), *nest in nests:
                counts = groups, blocks, images, rows, pieces
                _tiles(0, groups, tile, source, weights, target, *starts, sizes, steps, False, counts, *nest)
        _turn_back(0, images, target, y[first:], *plan.target.where)


@lru_cache(1024)
def _forward_plan(x, weight, y, stride, padding, dilation, groups, dtype) -> _Plan:
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
    return _Plan(_images(x, y, dtype), source, target, turns, ((taps, nests),))


@lru_cache(1024)
def _input_plan(x, weight, y, stride, padding, dilation, groups, dtype) -> _Plan:
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
    return _Plan(_images(x, y, dtype), source, target, turns, tuple(found))


@lru_cache(1024)
def _weight_plan(x, weight, y, stride, padding, dilation, groups, dtype) -> _WeightPlan:
    """target: of dy."""
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
        sums = _whole(weight[0], dtype) * prod(weight[1:])
        return _WeightPlan(count, source, target, turns, nests, sums, _most(turns) * lanes(dtype))
    length, across = (weight[3] * weight[1], 1) if joined else weight[1:4:2]
    starts, steps = (from_dy, from_x), (target.pixel, 1, stride[1] * source.pixel)
    sizes = weight[0] // groups, groups, weight[2], across, length
    nests = tuple(_group_products(sizes, weight[1], starts, steps, (down, right), dtype))
    width = _whole(length, dtype)
    return _WeightPlan(count, source, target, 0, nests, weight[0] * weight[2] * across * width, width)


def _nests(source, target, sizes, turns, shape, places, stride, apart, origin, dtype) -> tuple:
    """Of tiles: target = the sum of source at `places` from each output times the weights.

    sizes: groups, outputs and inputs of each. shape: the pixels of the outputs, `stride` pixels of source from
    one to the next, `apart` pixels of target.
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
        for at, size, pieces in _pieces(shape[1], ROWS // 2 if turns > 1 else ROWS):
            found.append(
                (
                    ((0,) * size, (0,) * vectors, turned, ()),
                    (places, starts * width),
                    (len(places), inputs),
                    (step, across, max(1, turns) * width, along),
                    (groups, blocks, shape[0], pieces),
                    (inputs, width if turns else 0, source.where[0], stride[0] * source.row, size * across),
                    (_whole(outputs, dtype) * each, width * each, 0, 0, 0),
                    (outputs, width, target.where[0], apart[0] * target.row, size * along),
                    (at * across + (low if turns else 0), low * each, origin + at * along + low),
                )
            )
    return tuple(found)


def _group_products(sizes, channels, starts, steps, apart, dtype) -> Iterator:
    """For each group, tap, piece of the outputs and vectors of channels: the sum over all pixels."""
    outputs, groups, rows, across, length = sizes
    width = _whole(length, dtype)
    tap, row, group = outputs * width, across * outputs * width, rows * across * outputs * width
    for at, size, pieces in _pieces(outputs, ROWS):
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
        for at, size, pieces in _pieces(columns, ROWS * VECTORS // (turns * vectors)):
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
) -> _Layout:
    """Images of (height, width) with a border of zeros, the channels in this order, and room for more."""
    height, width = shape
    pixel = order.size + room
    if not joined:
        pixel = _whole(pixel, dtype)
        if pixel * dtype.itemsize % 512 == 0:  # a large power of two would use few lines of the first cache
            pixel += lanes(dtype)
    row = (before[1] + width + after[1]) * pixel
    down, across = np.arange(height) + before[0], np.arange(width) + before[1]
    where = (down[:, None] * row + across * pixel).reshape(-1)
    border = (*before, *after) != (0, 0, 0, 0)
    return _Layout(row, pixel, ((before[0] + height + after[0]) * row, where, order), border)


def _target(shape: tuple, groups: int, dtype: Any) -> _Layout:
    """Of results. The last vector of a group reaches into the next, which is written after it."""
    room = lanes(dtype) if shape[0] // groups % lanes(dtype) else 0
    return _layout(np.arange(shape[0]), shape[1:], (0, 0), (0, 0), dtype, room=room)


def _scratch(layout: _Layout, images: int, dtype: Any) -> Array:
    """Room for images; vectors may reach beyond the last pixel."""
    make = np.zeros if layout.border else np.empty
    return _aligned(make, images * layout.where[0] + VECTORS * lanes(dtype), dtype)


def _aligned(make: Any, count: int, dtype: Any) -> Array:
    """An array that begins where a vector may begin: those that straddle lines of the cache take two loads."""
    data = make(count + lanes(dtype), dtype)
    return data[-data.ctypes.data % BYTES // data.itemsize :][:count]


def _order(count: int, times: int, outputs: bool) -> Array:
    """Channels, each repeated for its `times` outputs; or outputs, the first of every channel before the second."""
    line, channels = np.arange(count), count // times
    return line % channels * times + line // channels if outputs else line // times


def _lanewise(weight: tuple, groups: int, dtype: Any) -> Pair:
    """(turns that take a lane to all inputs of its group, outputs of each lane of the input); or 0 turns."""
    outputs, channels = weight[0] // groups, weight[1]
    if channels == 1 < groups:
        return 1, outputs
    fit = outputs == channels < lanes(dtype) and lanes(dtype) % channels == 0 and groups > 1
    return channels if fit else 0, 1


def _whole(channels: int, dtype: Any) -> int:
    """Channels rounded up to whole vectors."""
    return -(-channels // lanes(dtype)) * lanes(dtype)


def _joined(channels: int, groups: int, dilation: Pair, dtype: Any) -> bool:
    """Whether a row of the window is taken as one piece of memory: where pixels have few channels."""
    return groups == 1 and dilation[1] == 1 and channels < lanes(dtype)


def _images(x: tuple, y: tuple, dtype: Any) -> int:
    """How many at a time."""
    return max(1, _CHUNK // ((prod(x) + prod(y)) * dtype.itemsize))


def _most(turns: int) -> int:
    """Vectors of channels of a tile of a weight's gradient, lane by lane: its sums are `turns` times as many."""
    return VECTORS if turns == 1 else 1


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


def _packed(weight: Array, taps: Array, groups: int, turns: int, transposed: bool) -> Array:
    """The weights of these taps as (group, vectors of outputs, tap, input, turn, output); `transposed`: from
    outputs to inputs. With turns the groups are one."""
    each, channels, area = len(weight) // groups, weight.shape[1], weight.shape[2] * weight.shape[3]
    outputs, inputs = (channels, each) if transposed else (each, channels)
    if turns:
        rows, times = groups * outputs, inputs // turns
        data = _aligned(np.empty, _whole(rows, weight.dtype) * taps.size * inputs, weight.dtype)
        sizes = turns, times, _whole(rows, weight.dtype)
        run_rows(_pack_lanes, rows, data.size, weight, taps, data, sizes, transposed)
        return data
    steps = (area, channels * area) if transposed else (channels * area, area)
    whole = _whole(outputs, weight.dtype)
    data = _aligned(np.empty, groups * whole * taps.size * inputs, weight.dtype)
    sizes = each * channels * area, outputs, inputs
    args = weight.reshape(-1), taps, data, sizes, steps, lanes(weight.dtype)
    run_rows(_pack, groups * whole, data.size, *args)
    return data


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
def _pack_lanes(start, stop, weight, taps, packed, sizes, transposed):
    """Lanes [start, stop), which are outputs, or if `transposed` inputs, of which each has `times` outputs."""
    turns, times, whole = sizes
    columns, most = weight.shape[3], VECTORS * _lanes_of(packed)
    for lane in range(start, stop):
        low, run = lane // most * most, lane // turns * turns
        width = min(most, whole - low)
        to = packed[low * taps.size * times * turns + lane - low :]
        for turn in range(turns):
            met = run + (lane - run + turn) % turns
            for i in range(times):
                line = weight[met * times + i, lane - run] if transposed else weight[lane, met - run]
                for t in range(taps.size):
                    at = ((t * times + i) * turns + turn) * width
                    to[at] = line[taps[t] // columns, taps[t] % columns]


@exact
def _unpack_lanes(start, stop, sums, dweight, groups, turns, most, accumulate):
    """Inputs [start, stop): what each lane of x has given to the outputs it met."""
    outputs, _, rows, columns = dweight.shape
    whole = sums.size // (turns * rows * columns)
    for lane in range(start, stop):
        low, run = lane // most * most, lane // turns * turns
        width = min(most, whole - low)
        given = sums[low * rows * columns * turns + lane - low :]
        for turn in range(turns):
            line = dweight[run + (lane - run + turn) % turns, lane - run]
            for i in range(rows):
                for j in range(columns):
                    total = given[((i * columns + j) * turns + turn) * width]
                    line[i, j] = line[i, j] + total if accumulate else total


@exact
def _unpack(start, stop, sums, dweight, groups, turns, width, accumulate):
    """Outputs [start, stop) from sums as (group, row of the window, column, output, `width` channels), or where
    the columns are joined (..., row of the window, output, columns and channels)."""
    outputs, channels, rows, columns = dweight.shape
    each = outputs // groups
    joined = sums.size == outputs * rows * width and columns > 1
    for output in range(start, stop):
        group, o = output // each, output % each
        for i in range(rows):
            for j in range(columns):
                tap, shift = (
                    (group * rows + i, j * channels) if joined else ((group * rows + i) * columns + j, 0)
                )
                line = sums[(tap * each + o) * width + shift :][:channels]
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
