"""Parts of kernels for block-wise 8-bit numbers: the maps, and how a block is encoded and decoded."""

from functools import cache

import numpy as np

from shardrt.kernels.cpu import cast
from shardrt.kernels.cpu._jit import exact_part

BLOCK = 16  # elements


@cache
def tables(signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """(dynamic_map, its 255 middles between neighbours), float32."""
    values = dynamic_map(signed)
    return values, (values[:-1] + values[1:]) / np.float32(2)


def dynamic_map(signed: bool) -> np.ndarray:
    """The numbers of the codes, float32 (256,), ascending from -0.993 or 0 to 1: bitsandbytes' dynamic map.

    Seven decades, of which the largest has 64 numbers of each sign, or 128, and each other one half as many
    as the decade above. The numbers of a decade are the centres of equal parts of it.
    """
    found = [np.zeros(1, np.float32), np.ones(1, np.float32)]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = _linspace(parts + 1)
        centres = np.float32(10 ** (decade - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        found += [centres, -centres] if signed else [centres]
    return np.sort(np.concatenate(found))


def _linspace(count: int) -> np.ndarray:
    """float32 from 0.1 to 1, counted from the nearer end with fused multiply-adds, as PyTorch's linspace."""
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(count - 1))
    place = np.arange(count)
    found = np.where(place < count // 2, first + step * place, last - step * place[::-1])
    return found.astype(np.float32)


@exact_part
def size_of(x, lowest):
    """The scale that would map x onto an end of a map from `lowest`, which is below 0 or unused, to 1."""
    return x if x >= 0 else x / lowest


@exact_part
def largest(x, count, lowest):
    """The largest size of x[:count]; nan if one of them is not finite."""
    top, wrong = np.float32(0), np.float32(0)
    for k in range(count):
        size = size_of(x[k], lowest)
        wrong += size - size
        top = size if size > top else top
    return top + wrong


@exact_part
def code_of(x, middles):
    """The code of the number of the map that is nearest to x; of two as near, the lower one."""
    code = 0
    for bit in (128, 64, 32, 16, 8, 4, 2, 1):
        code += bit if x > middles[code + bit - 1] else 0
    return code


@exact_part
def encode(x, count, codes, values, middles, signed):
    """Write the codes of x[:count], a block, and give the bits of its scale."""
    top = largest(x, count, values[0])
    bits = cast.narrowed(top)
    scale = cast.widened(bits)
    for k in range(count):
        code = code_of(x[k] / scale, middles) if scale > 0 else 0
        if size_of(x[k], values[0]) == top > 0:  # an end of the map, however the scale was rounded
            code = 255 if x[k] >= 0 else 0
        codes[k] = max(code, 1) if not signed and x[k] > 0 else code
    return bits


@exact_part
def decode(codes, count, bits, x, values):
    """Write the numbers of a block to x[:count]."""
    scale = cast.widened(bits)
    for k in range(count):
        x[k] = values[codes[k]] * scale + np.float32(0)  # never -0


def first_block(start: float) -> int:
    """The block that begins at an element. Raises ValueError for an element inside a block."""
    if start % BLOCK:
        raise ValueError(f"8-bit state: a range must begin at a multiple of {BLOCK}, got {start:g}")
    return int(start) // BLOCK
