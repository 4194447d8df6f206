"""Contracts of random numbers by counter, and of dropout by them: Philox4x32-10 in NumPy."""

import numpy as np

from tests.contracts import Call, Out, contract
from tests.contracts.elementwise import in_float32
from tests.cuda.numbers import normal

SEED, STREAM = 2**63 + 12345, 2**40 + 7  # both words of each matter
FAR = 2**35 + 8  # so do both of the count of blocks
LOW, EXACT = 2**32 - 1, ("float32", "float64")


def words(offset, count, seed=SEED, stream=STREAM):
    """Blocks of four numbers of 32 bits, those of elements from `offset` on: uint64."""
    block = np.arange(offset // 4, (offset + count - 1) // 4 + 1, dtype=np.uint64)
    a, b, c, d = block & LOW, block >> 32, np.uint64(stream & LOW), np.uint64(stream >> 32)
    for turn in range(10):
        first, second = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        low, high = (seed + turn * 0x9E3779B9) & LOW, ((seed >> 32) + turn * 0xBB67AE85) & LOW
        a, b, c, d = (second >> 32) ^ b ^ low, second & LOW, (first >> 32) ^ d ^ high, first & LOW
    return np.stack([a, b, c, d], 1)


def piece(numbers, offset, count):
    return numbers.reshape(-1)[offset % 4 :][:count]


@contract("philox.uniform")
def uniform():
    for count in (1, 3, 17, 1027):
        for offset in (0, 3, FAR):
            values = piece(words(offset, count) >> 8, offset, count) * 2.0**-24
            for exact, elements in ((True, EXACT), (False, ("float16", "bfloat16"))):
                how = {"exact": exact, "elements": elements}
                yield Call((Out(), SEED, STREAM, offset), lambda values=values: values, **how)


@contract("philox.normal")
def normally():
    """Box and Muller: of each two numbers one is a length, the other an angle."""
    for count in (1, 3, 17, 1027):
        for offset in (0, 3, FAR):
            pairs = words(offset, count).reshape(-1, 2) * 2.0**-32
            turns = np.exp(2j * np.pi * pairs[:, 1]) * np.sqrt(-2 * np.log(pairs[:, 0] + 2.0**-33))
            values = piece(0.5 + 2 * np.stack([turns.real, turns.imag], 1), offset, count)
            yield Call((Out(), SEED, STREAM, offset, 0.5, 2.0), lambda values=values: values)


@contract("dropout.forward", "dropout.backward")
def dropout(kernel):
    """A place in memory stands for the seed, and is added to the call."""
    for count, p in ((1, 0.3), (3, 0.3), (17, 0.5), (130, 0.0), (130, 1.0), (2051, 0.3)):
        for offset in (0, 5, 2**34):
            dropped = piece(words(offset, count), offset, count) < np.uint64(p * 2.0**32)
            kept = np.where(dropped, 0.0, 0.0 if p == 1 else 1 / (1 - p))

            def masked(x, place=None, kept=kept):
                return x * kept

            def in_one_rounding(x, place=None, kept=kept):
                return in_float32(np.multiply, x, kept)

            args = normal(count), Out(), p
            yield Call((*args, SEED, STREAM, offset), masked, over=0)
            yield Call((*args, SEED, STREAM, offset), in_one_rounding, exact=True, elements=("float32",))
            place = np.array([SEED, (STREAM + 5) % 2**64], np.uint64)
            yield Call((*args, 0, 2**64 - 5, offset, place), masked)
