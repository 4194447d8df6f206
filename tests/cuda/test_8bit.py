"""The 8-bit steps on the emulator: codes and scales of the CPU's, on both paths."""

import numpy as np
import pytest

from shardrt.kernels import cpu, cuda
from tests.cuda.numbers import assert_close, guarded, normal

COUNT = 8197
PLACES = [(0, 1), (16, 36), (48, 4096), (4112, COUNT)]
ADAMW = [(0.999, 1e-2, 1.5, 0.9, 0.95, 1e-8)] * len(PLACES)
LION = [(0.999, 1e-2, 0.9, 0.99)] * len(PLACES)
BLOCKS = -(-COUNT // 16)


def table(settings):
    return np.array([(*place, *own) for place, own in zip(PLACES, settings, strict=True)])


def encoded(values, signed):
    codes, scales = np.empty(COUNT, np.uint8), np.empty(BLOCKS, np.uint16)
    cpu.blockwise.quantize(values.astype(np.float32), codes, scales, signed)
    return codes, scales


def decoded(codes, scales, signed):
    out = np.empty(COUNT, np.float32)
    cpu.blockwise.dequantize(np.ascontiguousarray(codes), scales, out, signed)
    return out


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_codes_scales_and_numbers_are_those_of_the_cpu(emulated, signed, shift):
    values = normal(COUNT) * 10.0 ** -np.abs(normal(COUNT, seed=1))
    values = (values if signed else values**2).astype(np.float32)
    values[48:64], values[70] = 0, np.nan
    codes, scales = np.empty(COUNT + shift, np.uint8)[shift:], np.empty(BLOCKS, np.uint16)
    with guarded("float32") as array:
        cuda.blockwise.quantize(array(values, shift), codes, scales, signed)
        expected = encoded(values, signed)
        np.testing.assert_array_equal(codes, expected[0])
        finite = np.arange(BLOCKS) != 70 // 16  # nan has many bit patterns
        np.testing.assert_array_equal(scales[finite], expected[1][finite])
        found = array(np.zeros(COUNT), shift)
        cuda.blockwise.dequantize(codes, scales, found, signed)
    np.testing.assert_array_equal(found, decoded(*expected, signed))


@pytest.mark.parametrize("kernel", ["adamw8bit", "lion8bit"])
def test_steps_are_those_of_the_cpu_on_both_paths(emulated, kernel):
    """The last bit of a moment may come out otherwise, and with it a code in a thousand."""
    adamw, results = kernel == "adamw8bit", []
    for package, shift in ((cpu, 0), (cuda, 0), (cuda, 1)):
        m, v = encoded(normal(COUNT, seed=2), True), encoded(normal(COUNT, seed=3) ** 2, False)
        states = [(np.r_[np.zeros(shift, np.uint8), c][shift:], s) for c, s in ([m, v] if adamw else [m])]
        with guarded("float32") as array:
            param, grad = (array(normal(COUNT, seed=seed), shift) for seed in (0, 1))
            flat = [each for pair in states for each in pair]
            getattr(package, kernel).step(param, grad, *flat, table(ADAMW if adamw else LION))
        results.append((param, [decoded(*pair, i == 0) for i, pair in enumerate(states)], flat))
    (expected, kept, _), (found, moments, bits), (param, _, others) = results
    assert_close(found, expected.astype(np.float64))
    for one, other in zip(moments, kept, strict=True):
        assert np.mean(one != other) < 1e-3
    np.testing.assert_array_equal(found, param)
    for one, other in zip(bits, others, strict=True):
        np.testing.assert_array_equal(one, other)
    outside = np.ones(COUNT, bool)
    for start, stop in PLACES:
        outside[start:stop] = False
    np.testing.assert_array_equal(found[outside], normal(COUNT).astype(np.float32)[outside])


@pytest.mark.parametrize("kernel", ["adamw", "lion"])
def test_moments_are_rounded_at_random_as_on_the_cpu(emulated, kernel):
    """One random number decides the same of both; a last bit of a moment may cross a step in a thousand."""
    adamw, seeds, results = kernel == "adamw", [(7, 1, 9, 2, 4 * n) for n in range(len(PLACES))], []
    settings = np.array(
        [(*own, *seed) for own, seed in zip(table(ADAMW if adamw else LION), seeds, strict=True)]
    )
    for package in (cpu, cuda):
        with guarded("float32") as array:
            param, grad = (array(normal(COUNT, seed=seed)) for seed in (0, 1))
            moments = [np.full(COUNT, 0x3F80, np.uint16) for _ in range(1 + adamw)]
            getattr(package.stochastic, kernel)(param, grad, *moments, settings)
        results.append((param, moments))
    (expected, kept), (found, bits) = results
    assert_close(found, expected.astype(np.float64))
    for one, other in zip(bits, kept, strict=True):
        assert (one != 0x3F80).mean() > 0.3
        assert np.mean(one != other) < 1e-3
