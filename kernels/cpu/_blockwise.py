"""Parts of kernels for block-wise 8-bit numbers: the maps, and how tiles of blocks are coded."""

from functools import cache

import numpy as np

from shardrt.kernels.cpu import _blocks, cast
from shardrt.kernels.cpu._blocks import BLOCK
from shardrt.kernels.cpu._jit import exact_part

MANY = 32  # blocks of a tile: each step of encoding runs on all of them before the next one
TILE = MANY * BLOCK  # elements

_u, _i, _f = np.uint32, np.int32, np.float32
_SIGN, _MAGNITUDE, _INFINITY, _16 = cast._SIGN, cast._MAGNITUDE, cast._INFINITY, _u(16)
_NAN, _ZERO = _f(np.nan), _f(0)


@cache
def tables(signed: bool) -> tuple[np.ndarray, np.ndarray, np.float32, np.float32]:
    """Of a map: (its numbers, `codes_by_order`, the least that a number above 0 becomes, and any other)."""
    values, lowest = dynamic_map(signed), np.float32(-np.inf)
    return values, codes_by_order(values), *((lowest, lowest) if signed else (values[1], _ZERO))


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


def ordered(x: np.ndarray) -> np.ndarray:
    """The bits of float32 x as int32 that are in the order of the numbers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def codes_by_order(values: np.ndarray) -> np.ndarray:
    """A table that gives the code of the nearest of `values`, of two as near the lower one: uint32 (65536,).

    The code of a number is (table[high] + low) >> 16, high and low the halves of `ordered`. An entry has the
    code of its first number as upper half. If a middle between two values lies in it, its lower half is such
    that numbers above the middle carry. No two do: 7 bits of fraction tell neighbours apart.
    """
    middles = ordered((values[:-1] + values[1:]) / np.float32(2))
    starts = np.arange(2**16, dtype=np.uint32) << 16
    table = np.searchsorted(middles, starts.view(np.int32)).astype(np.uint32) << 16
    table[middles.view(np.uint32) >> 16] += 0xFFFF - (middles.view(np.uint32) & 0xFFFF)
    return table


@exact_part
def new_room():
    """Scratch memory of a tile: codes, halves of what is looked up, what is found, four numbers per block."""
    halves = np.empty(TILE, np.uint16), np.empty(TILE, np.uint16)
    return np.zeros(TILE, np.uint8), halves, np.empty(TILE, np.uint32), np.empty((5, MANY), np.float32)


@exact_part
def decode(codes, scales, tables, x, room):
    """Write the numbers of a tile of codes to x[: codes.size]; the rest of its last block may change."""
    copy = room[0]
    for i in range(codes.size):
        copy[i] = codes[i]
    for block in range(scales.size):
        _blocks.decode(tables[0], copy, block * BLOCK, cast.widened(scales[block]), x)


@exact_part
def encode(x, codes, scales, tables, room):
    """Write codes and scales of x[: codes.size], a tile; behind them x becomes 0 up to a whole block."""
    values, by_order, least, floor = tables
    _, (high, low), found, (tops, bottoms, divisors, uppers, lowers) = room
    for i in range(codes.size, scales.size * BLOCK):
        x[i] = 0
    for block in range(scales.size):
        tops[block], bottoms[block] = _blocks.extremes(x, block * BLOCK)
    for block in range(scales.size):
        scales[block], divisors[block], uppers[block], lowers[block] = _scaled(
            tops[block], bottoms[block], values[0]
        )
    for block in range(scales.size):
        numbers = divisors[block], uppers[block], lowers[block], least, floor
        _blocks.order(x, block * BLOCK, numbers, high, low)
    for block in range(scales.size):
        _blocks.take(by_order, high, block * BLOCK, found)
    for i in range(codes.size):
        codes[i] = np.uint8(_u(found[i] + _u(low[i])) >> _16)


@exact_part
def _scaled(top, bottom, lowest):
    """The bits of a block's scale, what its numbers are divided by, and which become ends of the map, or nan.

    The scale maps the block's largest number onto an end of the map, however it is rounded: `lowest`, if that
    is below 0, or 1. top, bottom: see _blocks.extremes.
    """
    top_bits, bottom_bits = cast._bits(top), cast._bits(bottom)
    finite = _i(top_bits) < _i(_INFINITY) and _u(bottom_bits & _MAGNITUDE) < _INFINITY
    upper = top if _i(top_bits) > 0 else _ZERO
    lower = bottom if bottom_bits > _SIGN and lowest < 0 else _ZERO
    size = lower / lowest if lowest < 0 else _ZERO
    largest = size if size > upper else upper
    bits = cast.narrowed(largest if finite else _NAN)
    scale = cast.widened(bits)
    return (
        bits,
        scale if scale > 0 else _NAN,
        upper if finite and upper == largest > 0 else _NAN,
        lower if finite and size == largest > 0 else _NAN,
    )


def first_block(start: float) -> int:
    """The block that begins at an element. Raises ValueError for an element inside a block."""
    if start % BLOCK:
        raise ValueError(f"8-bit state: a range must begin at a multiple of {BLOCK}, got {start:g}")
    return int(start) // BLOCK
