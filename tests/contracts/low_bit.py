"""Contracts of optimizer state in 8 bits and in bfloat16: numbers that both types have, so no bit is open.

tests/optim has what becomes of other numbers.
"""

import numpy as np

from shardrt.kernels.cpu._blockwise import dynamic_map
from tests.contracts import Call, Double, Out, contract
from tests.contracts.optimizers import adamw_rule, lion_rule

BLOCK, COUNT = 16, 1000
BLOCKS = -(-COUNT // BLOCK)
PLACES = [(0, 1), (16, 36), (48, 512), (512, COUNT)]
ADAMW, LION = (0.999, 1e-2, 1.5, 0.5, 0.5, 1e-8), (0.999, 1e-2, 0.5, 0.5)
FLOAT = ("float32",)


def bits(values):
    """In bfloat16, of numbers that it has."""
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def codes_of(signed):
    """All codes, and in each block an end of the map: (codes, scales, numbers)."""
    codes = np.resize(np.arange(256), COUNT).astype(np.uint8)
    codes[::BLOCK] = 255
    scales = 2.0 ** (np.arange(BLOCKS) % 9 - 4)
    return codes, bits(scales), dynamic_map(signed)[codes].astype(np.float64) * scales.repeat(BLOCK)[:COUNT]


@contract("blockwise.quantize")
def quantize():
    for signed in (True, False):
        codes, scales, numbers = codes_of(signed)
        out = Out(np.zeros(COUNT, np.uint8)), Out(np.zeros(BLOCKS, np.uint16))
        yield Call(
            (numbers, *out, signed),
            lambda *_, codes=codes, scales=scales: (codes, scales),
            exact=True,
            elements=FLOAT,
        )


@contract("blockwise.dequantize")
def dequantize():
    for signed in (True, False):
        codes, scales, numbers = codes_of(signed)
        args = codes, scales, Out(np.zeros(COUNT)), signed
        yield Call(args, lambda *_, numbers=numbers: (numbers,), exact=True, elements=FLOAT)


def powers(shift, zeros=7):
    """Powers of two, alike in each block, with some zeros: a mean of two such numbers has four bits."""
    values = (2.0 ** ((np.arange(BLOCKS) + shift) % 3 - 1)).repeat(BLOCK)[:COUNT]
    values[5::zeros] = 0
    return values


def stepped(rule, settings, before, encode):
    """The truth of a step: `encode` gives what is kept of moments, which are `before` at first."""

    def step(param, grad, *rest):
        arrays = [param.copy(), *(np.array(each) for each in rest[:-1])]
        updated, *moments = rule(*settings, param, grad, *before)
        kept = [array for number, values in enumerate(moments) for array in encode(values, number == 0)]
        for start, stop in PLACES:
            arrays[0][start:stop] = updated[start:stop]
            for array, values in zip(arrays[1:], kept, strict=True):
                each = BLOCK if array.size == BLOCKS else 1
                piece = slice(start // each, -(-stop // each))
                array[piece] = values[piece]
        return tuple(arrays)

    return step


def in_8_bits(values, signed):
    """No number lies near the middle between two of the map's."""
    tops = np.maximum.reduceat(values, np.arange(0, COUNT, BLOCK))
    sizes = values / tops.repeat(BLOCK)[:COUNT]
    codes = np.abs(dynamic_map(signed).astype(np.float64) - sizes[:, None]).argmin(1)
    return codes.astype(np.uint8), bits(tops)


def in_bfloat16(values, signed):
    return [bits(values)]


def table(settings, seeded):
    seed = (7, 1, 9, 2, 64) if seeded else ()
    return Double(np.array([(*place, *settings, *seed) for place in PLACES]))


@contract("adamw8bit.step", "lion8bit.step", "stochastic.adamw", "stochastic.lion")
def steps(kernel):
    rule, settings = (adamw_rule, ADAMW) if "adamw" in kernel else (lion_rule, LION)
    seeded, before = kernel.startswith("stochastic"), [powers(1), powers(2) ** 2]
    before = before if rule is adamw_rule else before[:1]
    encode = in_bfloat16 if seeded else in_8_bits
    states = [Out(array) for number, values in enumerate(before) for array in encode(values, number == 0)]
    args = Out(np.linspace(-1, 1, COUNT)), powers(0, zeros=COUNT), *states, table(settings, seeded)
    yield Call(args, stepped(rule, settings, before, encode), elements=FLOAT)
