"""Convolution plane by plane: vectors are pixels as they lie, not channels; nothing is turned or packed.

For groups, and windows of one pixel, that move by one pixel over images as wide as their results. There the
pixel that a tap meets is as far from every pixel of the result, and masks tell the lanes whose windows reach
beyond the image. Numbers of the weight are read one by one, where they lie. Only with AVX-512, which has
registers for masks: with AVX2 masks take longer than turning.
"""

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from shardrt.kernels.cost import Array
from shardrt.kernels.cpu._conv2d_plan import cut_evenly, whole_vectors
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu._vectors import WIDE, lanes, tap_sums, tile_sum

Pair = tuple[int, int]

_REGISTERS, _ROWS = 32, 8  # of vectors, with AVX-512; outputs in a tile, at most
_MOST = 7  # vectors of pixels in it
_TAPS = 9  # in a tile of a weight's gradient
_NEAR = 1 << 17  # bytes of pixels that stay in the second cache while all outputs are made from them
_WEIGHTS = 1 << 14  # bytes of a tile's weights, that stay in the first cache though they lie apart


class Plan(NamedTuple):
    """How a convolution runs by vectors of pixels.

    masks: for each tap, and for the result, the lanes of each vector of pixels. nests: a tile, and what
    _tiles takes from `counts` on.
    """

    groups: int
    masks: Array
    taps: tuple[Array, Array]  # where each begins in the weight, and how far the pixels that it meets are
    sizes: Pair  # taps and inputs of a group
    steps: tuple[int, ...]
    nests: tuple


@lru_cache(1024)
def plan(x, weight, y, stride, padding, dilation, groups, dtype, transposed) -> Plan | None:
    """The plan of forward; `transposed`: of the input's gradient.

    Shapes are without the batch. None where channels fill vectors better, or this way does not go.
    """
    outputs, inputs = weight[0] // groups, weight[1]
    area = weight[2] * weight[3]
    output_step, input_step = inputs * area, area
    source, target, sign = x, y, 1
    if transposed:
        outputs, inputs, output_step, input_step = inputs, outputs, input_step, output_step
        source, target, sign = y, x, -1
    if stride != (1, 1) or x[2] != y[2] or (groups == 1 and area > 1):
        return None  # of channels that fill vectors: loads beside a whole vector's place take longer
    if not _better(prod(target[1:]), outputs, dtype):
        return None
    rows = cut_evenly(outputs, _ROWS)
    if area > 1 and rows[0][1] * area * inputs * dtype.itemsize > _WEIGHTS:
        return None  # each tap would read all lines of a tile's weights anew
    shifts = _shifts(weight, padding, dilation, sign)
    masks = _masks(shifts, source[1:], target[1:], dtype)
    from_pixels, pixels = prod(source[1:]), prod(target[1:])
    apart = np.array([down * source[2] + right for down, right in shifts], np.int64)
    nests = []
    for at, size, times in rows:
        most = min(_MOST, (_REGISTERS - 1) // (size + 1))
        for low, vectors, blocks in cut_evenly(masks.shape[1], most):
            width = vectors * lanes(dtype)
            near = max(1, _NEAR // (width * inputs * dtype.itemsize))
            nests.append(
                (
                    ((0,) * size, (0,) * vectors, (), ()),
                    (groups, blocks, times, near),
                    (prod(weight) // groups, size * output_step),
                    (prod(source), inputs * from_pixels, width),
                    (prod(target), outputs * pixels, width, size * pixels),
                    (at * output_step, low * lanes(dtype), at * pixels + low * lanes(dtype), low, vectors),
                )
            )
    steps = input_step, output_step, from_pixels, pixels, masks.shape[1]
    taps = np.arange(area), apart
    return Plan(groups, masks.reshape(-1), taps, (area, inputs), steps, tuple(nests))


def convolve(found: Plan, x: Array, weight: Array, y: Array, work: int) -> None:
    """From x to y, or from dy to dx."""
    flat = weight.reshape(-1), x.reshape(-1), y.reshape(-1)
    for tile, *nest in found.nests:
        run_rows(_tiles, len(x), work, tile, *flat, *found.taps, found.masks, found.sizes, found.steps, *nest)


@exact
def _tiles(start, stop, tile, weight, x, y, taps, apart, masks, sizes, steps, counts, by_a, by_b, by_y, at):
    """Images [start, stop): by groups, and pieces of the pixels and of the outputs.

    All outputs of so many pieces that lie near come first, then those of the next.
    counts: groups, pieces of pixels, of outputs, and those near. by_*: elements by which a step of these
    moves the weight, x and y, as far as it does. at: where weight, x, y and masks begin, and how far a piece
    of the pixels moves the masks.
    """
    for n in range(start, stop):
        for i in range(counts[0]):
            for first in range(0, counts[1], counts[3]):
                for k in range(counts[2]):
                    for j in range(first, min(first + counts[3], counts[1])):
                        a = at[0] + i * by_a[0] + k * by_a[1]
                        b = at[1] + n * by_b[0] + i * by_b[1] + j * by_b[2]
                        out = at[2] + n * by_y[0] + i * by_y[1] + j * by_y[2] + k * by_y[3]
                        places = a, b, out, at[3] + j * at[4]
                        tile_sum(tile, weight, x, y, taps, apart, sizes, places, steps, False, masks)


class WeightPlan(NamedTuple):
    """The same for the gradient of a weight. taps: how far the pixels are that each meets."""

    groups: int
    masks: Array
    taps: Array
    vectors: int
    steps: tuple[int, ...]
    nests: tuple


@lru_cache(1024)
def weight_plan(x, weight, y, stride, padding, dilation, groups, dtype) -> WeightPlan | None:
    """None as above."""
    outputs, inputs, area = weight[0] // groups, weight[1], weight[2] * weight[3]
    if stride != (1, 1) or x[2] != y[2] or not _better_for_weights(prod(y[1:]), inputs, groups, dtype):
        return None
    shifts = _shifts(weight, padding, dilation, 1)
    masks = _masks(shifts, x[1:], y[1:], dtype)
    apart = np.array([down * x[2] + right for down, right in shifts], np.int64)
    vectors, from_x, from_dy = masks.shape[1], prod(x[1:]), prod(y[1:])
    nests = tuple(
        (
            ((0,) * rows, (0,) * taps),
            (inputs, times, blocks),
            (inputs * from_x, from_x),
            (outputs * from_dy, rows * from_dy),
            (outputs * inputs * area, area, rows * inputs * area, taps),
            (at * from_dy, at * inputs * area + low, low, area * vectors),
        )
        for low, taps, blocks in cut_evenly(area, _TAPS)
        for at, rows, times in cut_evenly(outputs, max(1, (_REGISTERS - 2) // (taps + 1)))
    )
    steps = prod(x), prod(y), from_dy, inputs * area, vectors
    return WeightPlan(groups, masks.reshape(-1), apart, vectors, steps, nests)


def add_weight(found: WeightPlan, x: Array, dy: Array, dweight: Array, accumulate: bool, work: int) -> None:
    """dweight, written or added to."""
    flat, sizes = (x.reshape(-1), dy.reshape(-1), dweight.reshape(-1)), (len(x), found.vectors)
    for tile, *nest in found.nests:
        args = *flat, found.taps, found.masks, sizes, found.steps, accumulate, *nest
        run_rows(_weight_tiles, found.groups, work, tile, *args)


@exact
def _weight_tiles(
    start, stop, tile, x, dy, out, taps, masks, sizes, steps, add, counts, by_x, by_dy, by_out, at
):
    """Groups [start, stop): by inputs, pieces of the outputs and of the taps. by_*, at: as above."""
    for g in range(start, stop):
        for i in range(counts[0]):
            for j in range(counts[1]):
                for k in range(counts[2]):
                    tap = at[2] + k * by_out[3]
                    firsts = (
                        g * by_x[0] + i * by_x[1],
                        at[0] + g * by_dy[0] + j * by_dy[1],
                        at[1] + g * by_out[0] + i * by_out[1] + j * by_out[2] + k * by_out[3],
                        tap,
                        tap * steps[4],
                        at[3],
                    )
                    tap_sums(tile, x, dy, out, taps, masks, sizes, firsts, steps, add)


def _better(pixels: int, outputs: int, dtype: Any) -> bool:
    """Whether vectors of pixels are about as few as those of channels.

    Channels must be turned as well, which counts for more where they are few.
    """
    ours, few = whole_vectors(pixels, dtype) * outputs, 2 * outputs <= lanes(dtype)
    theirs = pixels * (outputs if few else whole_vectors(outputs, dtype))
    return WIDE and ours <= (1.4 if few else 1.1) * theirs


def _better_for_weights(pixels: int, inputs: int, groups: int, dtype: Any) -> bool:
    """Each vector of pixels is read for a few products only, so that channels must be fewer yet."""
    waste = whole_vectors(pixels, dtype) / pixels
    return WIDE and groups > 1 and 2 * inputs <= lanes(dtype) and waste <= (1.4 if inputs == 1 else 1.1)


def _shifts(weight: tuple, padding: Pair, dilation: Pair, sign: int) -> list[Pair]:
    """How many rows down and pixels right each tap meets."""
    down, right = ([sign * (i * dilation[d] - padding[d]) for i in range(weight[2 + d])] for d in (0, 1))
    return [(i, j) for i in down for j in right]


def _masks(shifts: list[Pair], source: Pair, target: Pair, dtype: Any) -> Array:
    """(taps and one, vectors): bits of the lanes whose pixel of the source there is; last, of the target."""
    size = lanes(dtype)
    rows, columns = np.indices(target).reshape(2, -1)
    found = np.zeros((len(shifts) + 1, whole_vectors(rows.size, dtype)), np.uint16)
    for each, (down, right) in zip(found, shifts, strict=False):
        below, beside = rows + down, columns + right
        each[: rows.size] = (0 <= below) & (below < source[0]) & (0 <= beside) & (beside < source[1])
    found[-1, : rows.size] = 1
    bits = found.reshape(len(found), -1, size) << np.arange(size, dtype=np.uint16)
    return bits.sum(axis=2, dtype=np.uint16)
