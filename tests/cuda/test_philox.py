"""Random numbers by counter: the CPU's bits, whatever piece of a stream is made."""

import numpy as np
import pytest

from shardrt.kernels.cpu import philox as cpu
from shardrt.kernels.cuda import philox as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, guarded

COUNTS = [1, 3, 17, 1027]
SEED, STREAM = 2**63 + 12345, 2**40 + 7  # both words of each matter
FAR = 2**35 + 8  # so do both of the count of blocks


@pytest.mark.parametrize("element", ["float32", "float64"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("offset", [0, 3, FAR])
def test_uniform_has_the_bits_of_the_cpu(emulated, element, count, offset):
    with guarded(element) as array:
        out, expected = array(np.full(count, np.nan)), np.empty(count, element)
        cuda.uniform(out, SEED, STREAM, offset)
        cpu.uniform(expected, SEED, STREAM, offset)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("offset", [0, 3, FAR])
def test_normal_has_the_bits_of_the_cpu_in_float32(emulated, count, offset):
    with guarded("float32") as array:
        out, expected = array(np.full(count, np.nan)), np.empty(count, np.float32)
        cuda.normal(out, SEED, STREAM, offset, 0.5, 0.02)
        cpu.normal(expected, SEED, STREAM, offset, 0.5, 0.02)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("function", ["uniform", "normal"])
@pytest.mark.parametrize("offset", [0, 2])
def test_every_type(emulated, element, function, offset):
    extra = (0.5, 2.0) if function == "normal" else ()
    with guarded(element) as array:
        out, expected = array(np.full(1027, np.nan)), np.empty(1027)
        getattr(cuda, function)(out, SEED, STREAM, offset, *extra)
        getattr(cpu, function)(expected, SEED, STREAM, offset, *extra)
        assert_close(out, expected)


@pytest.mark.parametrize("function", ["uniform", "normal"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_a_piece_is_as_in_the_whole(emulated, element, function):
    extra = (0.0, 1.0) if function == "normal" else ()
    with guarded(element) as array:
        whole, piece = array(np.full(200, np.nan)), array(np.full(100, np.nan), offset=1)
        getattr(cuda, function)(whole, SEED, STREAM, 8, *extra)
        getattr(cuda, function)(piece, SEED, STREAM, 8 + 37, *extra)
        np.testing.assert_array_equal(piece.view(np.uint8), whole[37:137].view(np.uint8))


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
