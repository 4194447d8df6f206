"""Contracts of numbers quantised in blocks: what the CPU's kernels give, which test_quantise.py checks."""

from functools import partial

import numpy as np

from shardrt.kernels.packed import blocks_of, packed_bytes
from tests.contracts import Call, Out, contract

SIZES = [(64, 32), (500, 64), (1024, 256)]  # count, block


def numbers(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def packed_of(x, bits, block):
    """By NumPy: scales, then codes."""
    x = np.asarray(x, np.float32)
    out, ends = np.zeros(packed_bytes(x.size, bits, block), np.uint8), 4 * blocks_of(x.size, block)
    rows = np.zeros((blocks_of(x.size, block), block), np.float32)
    rows.reshape(-1)[: x.size] = x
    if bits == 8:
        top, largest = np.abs(rows).max(1), np.float32(127)
        scales = top / largest
        codes = np.rint(rows * (largest / top)[:, None]).astype(np.int8)
    else:
        rows.reshape(-1)[x.size :] = x[-1]  # the last block has no other numbers
        low, high = rows.min(1), rows.max(1)
        down = np.where(low < 0, low.view(np.uint32) + 0xFFFF, low.view(np.uint32)) & 0xFFFF0000
        least = down.astype(np.uint32).view(np.float32)
        step = bfloat16(high / np.float32(15) - least / np.float32(15))
        scales = least.view(np.uint32) | step.view(np.uint32) >> 16
        places = (rows - least[:, None]) * (np.float32(1) / step)[:, None]
        codes = np.rint(places.clip(0, 15)).astype(np.uint8)
    out[:ends] = scales.view(np.uint8)
    codes = codes.reshape(-1)[: x.size].view(np.uint8)
    if bits == 4:
        pairs = np.append(codes, np.zeros(codes.size % 2, np.uint8))
        codes = pairs[::2] | pairs[1::2] << 4
    out[ends : ends + codes.size] = codes
    return out


def bfloat16(x):
    bits = x.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def numbers_of(packed, count, bits, block):
    packed = np.ascontiguousarray(packed, np.uint8)
    ends = 4 * blocks_of(count, block)
    codes = packed[ends : ends + -(-count * bits // 8)]
    if bits == 8:
        return codes.view(np.int8) * np.repeat(packed[:ends].view(np.float32), block)[:count].astype(
            np.float64
        )
    scales = np.repeat(packed[:ends].view(np.uint32), block)[:count]
    step, least = (scales << 16).view(np.float32), (scales & 0xFFFF0000).view(np.float32)
    return np.stack([codes & 15, codes >> 4], 1).reshape(-1)[:count] * step.astype(np.float64) + least


@contract("quantise.pack", "quantise.unpack", "quantise.sum_rows", "quantise.subtract")
def quantised(kernel):
    for bits in (8, 4):
        for count, block in SIZES:
            of = partial(numbers_of, count=count, bits=bits, block=block)
            rows = np.stack([packed_of(numbers(count, seed), bits, block) for seed in range(3)])
            if kernel == "quantise.pack":
                out = Out(np.zeros(rows.shape[1], np.uint8))
                args, how = (numbers(count), out), {"exact": True}
                truth = partial(lambda x, out, bits, block: packed_of(x, bits, block), bits=bits, block=block)
                yield Call((*args, bits, block), truth, elements=("float32",), offsets=(0,), **how)
            elif kernel == "quantise.unpack":
                truth = partial(lambda packed, of: np.concatenate(list(map(of, packed))), of=of)
                args = rows, Out(np.zeros(3 * count, np.float32)), bits, block
                yield Call(args, lambda packed, out, t=truth: t(packed), elements=("float32",), offsets=(0,))
            elif kernel == "quantise.subtract":
                args = rows[0], Out(numbers(count, 9)), bits, block
                yield Call(args, lambda row, x, of=of: x - of(row), elements=("float32",), offsets=(0,))
            else:
                for accumulate in (False, True):

                    def truth(packed, out, of=of, accumulate=accumulate):
                        return 0.25 * sum(map(of, packed)) + (out if accumulate else 0)

                    args = rows, Out(numbers(count, 9)), bits, block, 0.25, accumulate
                    yield Call(args, truth, elements=("float32",), offsets=(0,))
