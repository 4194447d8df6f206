"""Block-wise 8-bit numbers: a code per element, the index of its number in a map, and a scale per block.

Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022; the maps are those of bitsandbytes. A
block has BLOCK elements: every parameter and every shard starts at a multiple of it (fsdp/layout.py), so no
rank cuts a block. A scale is kept in bfloat16. It maps the block's largest number onto an end of the map, so
numbers that were decoded are encoded as the same codes and the same scale again.
"""

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._blockwise import BLOCK, decode, encode, tables
from shardrt.kernels.cpu._jit import exact
from shardrt.kernels.cpu._threads import run_rows


@cost("x -> codes scales", flops=20)
def quantize(x: Array, codes: Array, scales: Array, signed: bool) -> None:
    """Encode x (float32, 1-D): codes (uint8, as long), scales (uint16, bits of bfloat16, one for a block).

    signed: with the map for numbers of both signs, else with the map for numbers of at least 0, where only 0
    is kept as 0. A block with a number that is not finite is decoded as nan.
    """
    values, middles = tables(signed)
    run_rows(_quantize, scales.size, x.size, x, codes, scales, values, middles, signed)


@cost("codes scales -> x", flops=2)
def dequantize(codes: Array, scales: Array, x: Array, signed: bool) -> None:
    """Decode what quantize has made, into x."""
    run_rows(_dequantize, scales.size, x.size, codes, scales, x, tables(signed)[0])


@exact
def _quantize(start, stop, x, codes, scales, values, middles, signed):
    for block in range(start, stop):
        begin, end = block * BLOCK, min(x.size, (block + 1) * BLOCK)
        scales[block] = encode(x[begin:end], end - begin, codes[begin:end], values, middles, signed)


@exact
def _dequantize(start, stop, codes, scales, x, values):
    for block in range(start, stop):
        begin, end = block * BLOCK, min(x.size, (block + 1) * BLOCK)
        decode(codes[begin:end], end - begin, scales[block], x[begin:end], values)
