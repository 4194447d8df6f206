"""Two-dimensional convolution, direct: no matrix of patches, the channels side by side while it computes.

(Georganas et al., Anatomy of High-Performance Deep Learning Convolutions on SIMD Architectures, 2018.) As
many images as stay in the second cache are turned from (channels, height, width) to (height, width,
channels) with a border of zeros. There forward and both gradients are sums of products, of a piece of a row
of pixels and a few vectors of channels, that stay in registers (_vectors.tile_sum). Where pixels fill vectors
as well as channels, images are convolved as they lie instead, plane by plane (_conv2d_planes.py).

A group that fills vectors is a product of matrices: a number of the one operand times a vector of the other.
Groups of a few channels, one in depthwise convolution, would leave most of a vector empty. There ("lanewise")
vectors are multiplied with vectors, so many groups at once, and the lanes of one turn round within each group
until every output has met every input.

stride, padding, dilation: (vertical, horizontal). Arrays are C-contiguous, of one type; or what is multiplied
is uint16, the bits of bfloat16, and what comes of it and a bias float32. Then oneDNN computes where it is
faster (_conv2d_bits.py, _choice.py).
"""

from math import prod
from typing import Any

import numpy as np

from shardrt.kernels import onednn
from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu import _choice, _conv2d_bits, _conv2d_planes
from shardrt.kernels.cpu._conv2d_bits import Convolution
from shardrt.kernels.cpu._conv2d_plan import (
    Layout,
    forward_plan,
    input_plan,
    weight_plan,
    whole_vectors,
)
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu._vectors import BYTES, VECTORS, lanes, tile_sum, transpose_tile
from shardrt.kernels.cpu.matmul import widened

Pair = tuple[int, int]


@cost(
    "x weight bias -> y",
    flops=lambda y, weight: 2 * y.size * prod(weight.shape[1:]),
    sizes=lambda y, weight, groups: _product(y, weight, groups),
)
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
    """Compute y (batch, outputs, ...) from x (batch, channels, height, width).

    weight: (outputs, channels / groups, rows, columns). bias: (outputs,) or None.
    """
    how = stride, padding, dilation, groups
    if x.dtype == np.uint16:
        _of_bits("forward", Convolution(x.shape, weight.shape, y.shape, *how), x, weight, bias, y)
        return
    _convolve(x, weight, y, False, how)
    if bias is not None:
        y += bias[:, None, None]


@cost(
    "dy weight -> dx",
    flops=lambda dy, weight: 2 * dy.size * prod(weight.shape[1:]),
    sizes=lambda dy, weight, groups: _product(dy, weight, groups),
)
def backward_input(
    dy: Array, weight: Array, dx: Array, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> None:
    """dx, in the shape of x, from dy, in the shape of y."""
    how = stride, padding, dilation, groups
    if dy.dtype == np.uint16:
        _of_bits("backward_input", Convolution(dx.shape, weight.shape, dy.shape, *how), dy, weight, dx)
        return
    _convolve(dy, weight, dx, True, how)


@cost(
    "x dy dweight?accumulate -> dweight",
    flops=lambda dy, dweight: 2 * dy.size * prod(dweight.shape[1:]),
    sizes=lambda dy, dweight, groups: _product(dy, dweight, groups),
)
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
    how = stride, padding, dilation, groups
    if x.dtype == np.uint16:
        _of_bits(
            "backward_weight", Convolution(x.shape, dweight.shape, dy.shape, *how), x, dy, dweight, accumulate
        )
        return
    shapes = x.shape[1:], dweight.shape, dy.shape[1:]
    in_planes = _conv2d_planes.weight_plan(*shapes, *how, x.dtype)
    if in_planes is not None:
        work = _operations(dy.shape, dweight.shape) // 2
        _conv2d_planes.add_weight(in_planes, x, dy, dweight, accumulate, work)
        return
    swapped = _swaps(len(x) * prod(x.shape[2:]), dweight.shape, *how)
    if swapped:  # from here x is dy and dy is x
        x, dy = dy, x
        shapes = x.shape[1:], (dy.shape[1], x.shape[1], 1, 1), dy.shape[1:]
    plan = weight_plan(*shapes, *how, x.dtype)
    count = min(plan.images, len(x))
    source = _scratch(plan.source, count * plan.split, x.dtype)
    upper = None if plan.target is None else _scratch(plan.target, count, x.dtype)
    cut = x.reshape(len(x) * plan.split, -1, *x.shape[2:])
    sums = _aligned(np.empty, plan.sums, x.dtype)
    work = count * _operations(dy.shape[1:], shapes[1])
    for first in range(0, len(x), count):
        images = min(count, len(x) - first)
        pieces = images * plan.split
        run_rows(_turn, pieces, images * x[0].size, cut[first * plan.split :], source, *plan.source.where)
        if plan.target is None:
            upper = dy[first:].reshape(-1)
        else:
            run_rows(_turn, images, images * dy[0].size, dy[first:], upper, *plan.target.where)
        for lines, tile, starts, steps, *nest in plan.nests:
            arrays = (source, upper, sums) if plan.turns or plan.by_outputs else (upper, source, sums)
            sizes = images * lines, dy.shape[3]
            run_rows(_tiles, nest[0][0], work, tile, *arrays, *starts, sizes, steps, first > 0, *nest)
    if swapped or plan.by_outputs:
        by_tap = dweight.reshape(*dweight.shape[:2], -1)
        blocks = by_tap.shape[2] * -(-by_tap.shape[1] // lanes(x.dtype))
        run_rows(_unpack_by_outputs, blocks, dweight.size, sums, by_tap, plan.width, accumulate)
        return
    args = sums, dweight, groups, plan.turns, plan.width, accumulate
    run_rows(_unpack_lanes if plan.turns else _unpack, len(dweight), dweight.size, *args)


@cost("dy dbias?accumulate -> dbias", flops=1)
def backward_bias(dy: Array, dbias: Array, accumulate: bool) -> None:
    """Compute dbias (outputs,) from dy, written or added to."""
    sums = dy.sum(axis=(0, 2, 3))
    if accumulate:
        dbias += sums
    else:
        dbias[...] = sums


def _of_bits(name: str, what: Convolution, *arrays: Any) -> None:
    """The kernel of this name, of bits, by who is faster: numbers of the bits here, or oneDNN."""
    how = what[3:]

    def direct(*arrays: Any) -> None:
        globals()[name](*map(_number, arrays), *how)

    def by_onednn(*arrays: Any) -> None:
        getattr(_conv2d_bits, name)(*arrays, *how)

    ways = {"direct": direct}
    if onednn.computes_bf16() and 0 not in (*what.x, *what.weight, *what.y) and _conv2d_bits.has(what):
        ways["onednn"] = by_onednn
    added = name == "backward_weight" and arrays[3]
    ways[_choice.choose_from(ways, [*ways][-1], (name, *what), 2 if added else None, *arrays)](*arrays)


def _number(x: Any) -> Any:
    return widened(x) if isinstance(x, np.ndarray) and x.dtype == np.uint16 else x


def _operations(y: tuple[int, ...], weight: tuple[int, ...]) -> int:
    """Of forward, or of either gradient, for arrays of these shapes."""
    return 2 * prod(y) * prod(weight[1:])


def _convolve(x: Array, weight: Array, y: Array, transposed: bool, how: tuple) -> None:
    """Forward from x to y; `transposed`: from dy to dx."""
    work = _operations((x if transposed else y).shape, weight.shape) // 2
    shapes = (y if transposed else x).shape[1:], weight.shape, (x if transposed else y).shape[1:]
    in_planes = _conv2d_planes.plan(*shapes, *how, x.dtype, transposed)
    if in_planes is not None:
        _conv2d_planes.convolve(in_planes, x, weight, y, work)
        return
    plan = (input_plan if transposed else forward_plan)(*shapes, *how, x.dtype)
    packed = [_packed(weight, phase[0], how[-1], plan.turns, transposed) for phase in plan.phases]
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


def _scratch(layout: Layout, images: int, dtype: Any) -> Array:
    """Room for images; vectors may reach beyond the last pixel."""
    make = np.zeros if layout.border else np.empty
    return _aligned(make, images * layout.where[0] + VECTORS * lanes(dtype), dtype)


def _aligned(make: Any, count: int, dtype: Any) -> Array:
    """An array whose vectors lie in one line of the cache each: those across two take two loads."""
    data = make(count + lanes(dtype), dtype)
    return data[-data.ctypes.data % BYTES // data.itemsize :][:count]


def _swaps(
    pixels: int, weight: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> bool:
    """Whether a weight's gradient is computed as that of the convolution from y to x, which turns y, not x.

    This is so where windows are pixels, and outputs so many fewer than inputs that what is not turned is more
    than turning the sums takes (a number of which takes as long as 8 of pixels).
    """
    outputs, inputs = weight[:2]
    same = weight[2:] == stride == (1, 1) and padding == (0, 0) and groups == 1  # sums, in either direction
    return same and pixels * (inputs - outputs) >= 8 * inputs * outputs


def _packed(weight: Array, taps: Array, groups: int, turns: int, transposed: bool) -> Array:
    """The weights of these taps as (group, vectors of outputs, tap, input, turn, output).

    `transposed`: from outputs to inputs. With turns the groups are one.
    """
    each, channels, area = len(weight) // groups, weight.shape[1], weight.shape[2] * weight.shape[3]
    outputs, inputs = (channels, each) if transposed else (each, channels)
    if turns:
        rows, times = groups * outputs, inputs // turns
        data = _aligned(np.empty, whole_vectors(rows, weight.dtype) * taps.size * inputs, weight.dtype)
        sizes = turns, times, whole_vectors(rows, weight.dtype)
        run_rows(_pack_lanes, rows, data.size, weight, taps, data, sizes, transposed)
        return data
    whole = whole_vectors(outputs, weight.dtype)
    data = _aligned(np.empty, groups * whole * taps.size * inputs + lanes(weight.dtype), weight.dtype)
    sizes = (groups, outputs, inputs, area), lanes(weight.dtype)
    vectors = groups * whole // lanes(weight.dtype)
    run_rows(_pack, vectors, data.size, weight.reshape(-1), taps, data, *sizes, transposed)
    return data


@exact
def _pack(start, stop, weight, taps, packed, sizes, lanes, transposed):
    """Vectors [start, stop) of the groups' outputs; what fills up the last of a group is zeros.

    By squares of whole vectors: of outputs by what follows in memory; columns that are not wanted go where
    `packed` has room for one more.
    """
    groups, outputs, inputs, area = sizes
    vectors, line = (outputs + lanes - 1) // lanes, inputs * area
    length, across, down = (area, area, outputs * area) if transposed else (line, line, area)
    squares = length > lanes // 2 if transposed else length >= lanes
    rows = np.arange(lanes) * across
    columns, nowhere = np.empty(-(-length // lanes) * lanes, np.int64), packed.size - lanes
    for vector in range(start, stop):
        group, low = vector // vectors, vector % vectors * lanes
        block = low // (VECTORS * lanes) * (VECTORS * lanes)
        width = min(VECTORS * lanes, vectors * lanes - block)
        first = (group * vectors * lanes + block) * taps.size * inputs + low - block
        given, count = weight[group * outputs * line :], min(lanes, outputs - low)
        columns[:] = nowhere
        for t in range(taps.size):
            for i in range(1 if transposed else inputs):
                columns[i * area + taps[t]] = first + (t * inputs + i) * width
        for i in range(inputs if transposed else 1):
            begin = i * down + low * across
            past = begin + (lanes - 1) * across + len(columns) > given.size
            if not squares or count < lanes or past:
                for c in range(i, i + (1 if transposed else inputs)):
                    for t in range(taps.size):
                        at = first + (t * inputs + c) * width
                        for lane in range(count):
                            packed[at + lane] = given[c * down + (low + lane) * across + taps[t]]
                        for lane in range(count, lanes):
                            packed[at + lane] = 0
                continue
            for c in range(0, length, lanes):
                transpose_tile(given, begin + c, rows, packed, 0, columns[c:])
            if transposed:
                for t in range(taps.size):
                    columns[taps[t]] += width


@exact
def _pack_lanes(start, stop, weight, taps, packed, sizes, transposed):
    """Lanes [start, stop), which are outputs; if `transposed` inputs, that have `times` outputs each."""
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
    """Outputs [start, stop) from sums as (group, row, column, output, `width` channels).

    Where the columns are joined, sums are (group, row, output, `width` columns and channels).
    """
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
def _unpack_by_outputs(start, stop, sums, dweight, width, accumulate):
    """Blocks [start, stop) of as many inputs of a tap as a vector has lanes.

    They go into dweight (outputs, inputs, taps) from sums as (tap, input, `width` outputs).
    """
    outputs, inputs, _ = dweight.shape
    size = _lanes_of(sums)
    blocks = -(-inputs // size)
    for place in range(start, stop):
        tap, first = place // blocks, place % blocks * size
        for output in range(outputs):
            line = dweight[output, :, tap]
            for c in range(first, min(inputs, first + size)):
                total = sums[(tap * inputs + c) * width + output]
                line[c] = line[c] + total if accumulate else total


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
                        tile_sum(tile, a, b, out, a_starts, b_starts, sizes, places, steps, add, None)


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


def _product(y: Array, weight: Array, groups: int) -> tuple[int, int, int, int]:
    """Sizes of the product with patches, of one group, and how many groups."""
    return len(weight) // groups, len(y) * prod(y.shape[2:]), prod(weight.shape[1:]), groups
