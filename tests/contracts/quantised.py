"""Contracts of numbers quantised in blocks: what the CPU's kernels give, which test_quantise.py checks."""

from functools import partial

import numpy as np

from shardrt.kernels.packed import LARGEST, blocks_of, packed_bytes
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
    top, largest = np.abs(rows).max(1), np.float32(LARGEST[bits])
    out[:ends] = (top / largest).view(np.uint8)
    codes = np.rint(rows * (largest / top)[:, None]).astype(np.int8).reshape(-1)[: x.size].view(np.uint8)
    if bits == 4:
        low = np.append(codes, np.zeros(codes.size % 2, np.uint8)) & 15
        codes = low[::2] | low[1::2] << 4
    out[ends : ends + codes.size] = codes
    return out


def numbers_of(packed, count, bits, block):
    packed = np.ascontiguousarray(packed, np.uint8)
    ends = 4 * blocks_of(count, block)
    codes = packed[ends : ends + -(-count * bits // 8)]
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], 1).reshape(-1)
        codes = (codes ^ 8).astype(np.int8) - 8
    values = codes.view(np.int8)[:count].astype(np.float64)
    return values * np.repeat(packed[:ends].view(np.float32), block)[:count]


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
