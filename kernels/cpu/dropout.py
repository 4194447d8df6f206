"""Dropout whose mask is a function of (seed, call, element): backward makes it again, nothing is stored."""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu.philox import MANY, make_blocks


@cost("x place -> y", flops=25)
def forward(
    x: Array, y: Array, p: float, seed: int, call: int, offset: int, place: Array | None = None
) -> None:
    """Compute y = x / (1 - p) where element offset + i of stream `call` is at least p, else 0. Flat arrays.

    place: uint64 (2,), the seed in place of `seed` and what is added to `call`, modulo 2**64; for a launch
    that runs again and again in a captured graph.
    """
    if place is not None:
        seed, call = int(place[0]), (call + int(place[1])) % 2**64
    threshold = np.uint64(p * 2.0**32)
    scale = x.dtype.type(0 if p == 1 else 1 / (1 - p))
    keys = np.uint64(seed), np.uint64(call), np.uint64(offset)
    run_rows(_apply, x.size, x.size, x, y, threshold, scale, *keys)


@cost("dy place -> dx", flops=25)
def backward(
    dy: Array, dx: Array, p: float, seed: int, call: int, offset: int, place: Array | None = None
) -> None:
    """Compute dx from dy, by the mask of forward."""
    forward(dy, dx, p, seed, call, offset, place)


@exact
def _apply(start, stop, x, y, threshold, scale, seed, call, offset):
    four, zero = np.uint64(4), x.dtype.type(0)
    first, last = offset + np.uint64(start), offset + np.uint64(stop)
    made = np.empty((4, MANY), np.uint64)
    for block in range(first // four, (last + np.uint64(3)) // four, np.uint64(MANY)):
        make_blocks(seed, call, np.uint64(block), made)
        begin = np.int64(np.uint64(block) * four - offset)  # of these numbers' elements, maybe before `start`
        if start <= begin and begin + 4 * MANY <= stop:
            given, out = x[begin : begin + 4 * MANY], y[begin : begin + 4 * MANY]
            for j in range(MANY):
                for lane in range(4):
                    i = 4 * j + lane
                    out[i] = given[i] * scale if made[lane, j] >= threshold else zero
            continue
        for i in range(max(start, begin), min(stop, begin + 4 * MANY)):
            y[i] = x[i] * scale if made[(i - begin) % 4, (i - begin) // 4] >= threshold else zero
