"""Lion over ranges of a flat shard with its moment in 8 bits: one pass over everything."""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu import _blockwise
from shardrt.kernels.cpu._blockwise import BLOCK
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
    values, middles = maps
    moments = np.empty(BLOCK, np.float32)
    for block in range(start, stop):
        begin, end = block * BLOCK, min(param.size, (block + 1) * BLOCK)
        p, g, count = param[begin:end], grad[begin:end], end - begin
        _blockwise.decode(m[begin:end], count, m_scales[block], moments, values)
        for i in range(count):
            mixed = beta1 * moments[i] + rest1 * g[i]
            sign = one if mixed > zero else -one if mixed < zero else mixed
            moments[i] = beta2 * moments[i] + rest2 * g[i]
            p[i] = p[i] * keep - rate * sign
        m_scales[block] = _blockwise.encode(moments, count, m[begin:end], values, middles, True)
