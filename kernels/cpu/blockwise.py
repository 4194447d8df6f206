"""Block-wise 8-bit numbers: a code per element, the index of its number in a map, and a scale per block.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022; the maps are those of bitsandbytes. A
block has BLOCK elements: every parameter and every shard starts at a multiple of it (fsdp/layout.py), so no
rank cuts a block. A scale is kept in bfloat16. It maps the block's largest number onto an end of the map, so
numbers that were decoded are encoded as the same codes and the same scale again.
"""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._blockwise import BLOCK, MANY, TILE, decode, encode, new_room, tables
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows


@cost("x -> codes scales", flops=20)
def quantize(x: Array, codes: Array, scales: Array, signed: bool) -> None:
    """Encode x (float32, 1-D): codes (uint8, as long), scales (uint16, bits of bfloat16, one for a block).

    signed: with the map for numbers of both signs, else with the map for numbers of at least 0, where only 0
    is kept as 0. A block with a number that is not finite is decoded as nan.
    """
    run_rows(_quantize, scales.size, x.size, x, codes, scales, tables(signed))


@cost("codes scales -> x", flops=2)
def dequantize(codes: Array, scales: Array, x: Array, signed: bool) -> None:
    """Decode what quantize has made, into x."""
    run_rows(_dequantize, scales.size, x.size, codes, scales, x, tables(signed))


@exact
def _quantize(start, stop, x, codes, scales, tables):
    numbers, room = np.empty(TILE, np.float32), new_room()
    for first in range(start, stop, MANY):
        last = min(first + MANY, stop)
        begin, end = first * BLOCK, min(last * BLOCK, x.size)
        part = x[begin:end]
        for i in range(part.size):
            numbers[i] = part[i]
        encode(numbers, codes[begin:end], scales[first:last], tables, room)


@exact
def _dequantize(start, stop, codes, scales, x, tables):
    numbers, room = np.empty(TILE, np.float32), new_room()
    for first in range(start, stop, MANY):
        last = min(first + MANY, stop)
        begin, end = first * BLOCK, min(last * BLOCK, x.size)
        part = x[begin:end]
        decode(codes[begin:end], scales[first:last], tables, numbers, room)
        for i in range(part.size):
            part[i] = numbers[i]
