"""Lion over ranges of a flat shard with its moment in 8 bits: one pass over everything."""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu import _blockwise
from shardrt.kernels.cpu._blockwise import BLOCK, MANY, TILE
from shardrt.kernels.cpu._jit import fused
from shardrt.kernels.cpu._threads import run_rows


@cost("param grad m m_scales ranges -> param m m_scales", flops=32)
def step(param: Array, grad: Array, m: Array, m_scales: Array, ranges: Array) -> None:
    """As lion.step on float32. m is codes, with their scales; ranges begin as in adamw8bit."""
    maps = _blockwise.tables(True)
    for start, stop, keep, rate, beta1, beta2 in ranges.tolist():
        first, piece = _blockwise.first_block(start), slice(int(start), int(stop))
        numbers = tuple(map(np.float32, (keep, rate, beta1, 1 - beta1, beta2, 1 - beta2, 0, 1)))
        size = piece.stop - piece.start
        blocks = slice(first, first + -(-size // BLOCK))
        arrays = param[piece], grad[piece], m[piece], m_scales[blocks]
        run_rows(_step, blocks.stop - first, size, *arrays, maps, numbers)


@fused
def _step(start, stop, param, grad, m, m_scales, maps, numbers):
    keep, rate, beta1, rest1, beta2, rest2, zero, one = numbers
    moments, room = np.empty(TILE, np.float32), _blockwise.new_room()
    for first in range(start, stop, MANY):
        last = min(first + MANY, stop)
        begin, end = first * BLOCK, min(last * BLOCK, param.size)
        p, g = param[begin:end], grad[begin:end]
        _blockwise.decode(m[begin:end], m_scales[first:last], maps, moments, room)
        for i in range(p.size):
            mixed = beta1 * moments[i] + rest1 * g[i]
            sign = one if mixed > zero else -one if mixed < zero else mixed
            moments[i] = beta2 * moments[i] + rest2 * g[i]
            p[i] = p[i] * keep - rate * sign
        _blockwise.encode(moments, m[begin:end], m_scales[first:last], maps, room)
