"""AdamW over ranges of a flat shard with moments in 8 bits: one pass over everything."""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu import _blockwise, cast
from shardrt.kernels.cpu._blockwise import BLOCK, MANY, TILE
from shardrt.kernels.cpu._jit import fused
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu.adamw import _updated


@cost("param grad m m_scales v v_scales ranges -> param m m_scales v v_scales rounded", flops=60)
def step(
    param: Array,
    grad: Array,
    m: Array,
    m_scales: Array,
    v: Array,
    v_scales: Array,
    ranges: Array,
    rounded: Array | None = None,
    kind: str = "",
) -> None:
    """As adamw.step on float32. m and v are codes, with their scales: see _blockwise.

    The weights change by the moments before these are encoded. Each range begins with a block, and its last
    block has no element of another range.
    """
    maps = _blockwise.tables(True), _blockwise.tables(False)
    for start, stop, keep, rate, correction, beta1, beta2, eps in ranges.tolist():
        first, piece = _blockwise.first_block(start), slice(int(start), int(stop))
        numbers = tuple(map(np.float32, (keep, rate, correction, beta1, 1 - beta1, beta2, 1 - beta2, eps)))
        size = piece.stop - piece.start
        blocks = slice(first, first + -(-size // BLOCK))
        arrays = param[piece], grad[piece], m[piece], m_scales[blocks], v[piece], v_scales[blocks]
        run_rows(_step, blocks.stop - first, size, *arrays, maps, numbers)
        if rounded is not None:
            cast.narrow(param[piece], rounded[piece], kind)


@fused
def _step(start, stop, param, grad, m, m_scales, v, v_scales, maps, numbers):
    both, positive = maps
    one, two, room = np.empty(TILE, np.float32), np.empty(TILE, np.float32), _blockwise.new_room()
    for first in range(start, stop, MANY):
        last = min(first + MANY, stop)
        begin, end = first * BLOCK, min(last * BLOCK, param.size)
        p, g = param[begin:end], grad[begin:end]
        _blockwise.decode(m[begin:end], m_scales[first:last], both, one, room)
        _blockwise.decode(v[begin:end], v_scales[first:last], positive, two, room)
        for i in range(p.size):
            p[i], one[i], two[i] = _updated(p[i], g[i], one[i], two[i], numbers)
        _blockwise.encode(one, m[begin:end], m_scales[first:last], both, room)
        _blockwise.encode(two, v[begin:end], v_scales[first:last], positive, room)
