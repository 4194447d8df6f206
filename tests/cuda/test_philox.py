"""Random numbers by counter: the last bits. Pieces of a stream: tests/contracts/randoms.py."""

import numpy as np
import pytest

from shardrt.kernels.cpu import philox as cpu
from shardrt.kernels.cuda import philox as cuda
from tests.cuda.numbers import guarded

COUNTS = [1, 3, 17, 1027]
SEED, STREAM = 2**63 + 12345, 2**40 + 7  # both words of each matter
FAR = 2**35 + 8  # so do both of the count of blocks


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("offset", [0, 3, FAR])
def test_normal_has_the_bits_of_the_cpu_in_float32(emulated, count, offset):
    with guarded("float32") as array:
        out, expected = array(np.full(count, np.nan)), np.empty(count, np.float32)
        cuda.normal(out, SEED, STREAM, offset, 0.5, 0.02)
        cpu.normal(expected, SEED, STREAM, offset, 0.5, 0.02)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("element", ["float16", "bfloat16"])
def test_uniform_stays_below_one_when_rounded(emulated, element):
    with guarded(element) as array:
        out, exact = array(np.full(4096, np.nan)), np.empty(4096, np.float32)
        cuda.uniform(out, 1, 2, 0)
        cpu.uniform(exact, 1, 2, 0)
        assert (exact.astype(out.dtype) == 1).any(), "no element that rounds to 1: the test shows nothing"
        assert (out < 1).all()


def test_normal_is_as_precise_as_float64_in_every_element(emulated):
    with guarded("float64") as array:
        out, expected = array(np.full(4096, np.nan)), np.empty(4096)
        cuda.normal(out, SEED, STREAM, 0, 0.0, 1.0)
        cpu.normal(expected, SEED, STREAM, 0, 0.0, 1.0)
        # Where a sine is near 0, the last place of the angle counts, which the CPU makes smaller first.
        np.testing.assert_allclose(out, expected, rtol=1e-14, atol=1e-14)
