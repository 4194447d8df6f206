"""16-bit floats as bits: those of the CPU's kernel."""

import numpy as np
import pytest

from shardrt.kernels.cpu import cast as cpu
from shardrt.kernels.cuda import cast as cuda
from tests.cuda.numbers import guarded, normal

KINDS = ["bfloat16", "float16"]
COUNTS = [1, 3, 17, 2051]


def awkward(count):
    """Float32 numbers of every size: subnormal, too large, halfway between two, infinite."""
    bits = np.random.default_rng(count).integers(0, 2**32, count, np.uint32)
    x = bits.view(np.float32)
    x[::3] = normal(x[::3].size) * 10.0 ** np.random.default_rng(1).integers(-9, 6, x[::3].size)
    special = np.array(
        [0, -0.0, np.inf, -np.inf, 65504, 65520, 65519.9, 2**-24, 2**-25, 1 + 2**-8, 3 * 2**-25]
    )
    x[: special.size] = special[:count]
    x[np.isnan(x)] = 1.5  # a test of its own
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shift", [0, 1])
def test_pack(emulated, kind, count, shift):
    with guarded("float32") as array:
        x, out = array(awkward(count), shift), array(np.full(count, 0xFFFF), shift, np.uint16)
        cuda.pack(x, out, kind)
        expected = np.empty(count, np.uint16)
        cpu.pack(x, expected, kind)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shift", [0, 1])
def test_unpack(emulated, kind, count, shift):
    with guarded("float32") as array:
        bits = np.random.default_rng(count).integers(0, 2**16, count)
        x, out = array(bits, shift, np.uint16), array(np.full(count, np.nan), shift)
        cuda.unpack(x, out, kind)
        expected = np.empty(count, np.float32)
        cpu.unpack(x, expected, kind)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("in_place", [False, True])
def test_round_to(emulated, kind, count, in_place):
    with guarded("float32") as array:
        x = array(awkward(count))
        expected = np.empty(count, np.float32)
        cpu.round_to(x, expected, kind)
        out = x if in_place else array(np.full(count, np.nan))
        cuda.round_to(x, out, kind)
        np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_nan(emulated, kind):
    with guarded("float32") as array:
        x = array(np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0x7FFFFFFF], np.uint32).view(np.float32))
        bits, back = array(np.zeros(4), dtype=np.uint16), array(np.zeros(4))
        cuda.pack(x, bits, kind)
        cuda.unpack(bits, back, kind)
        assert np.isnan(back).all()
        cuda.round_to(x, x, kind)
        assert np.isnan(x).all()


def test_every_half_survives_the_way_there_and_back(emulated):
    with guarded("float32") as array:
        bits = array(np.arange(0x7C01), dtype=np.uint16)
        numbers, back = array(np.full(bits.size, np.nan)), array(np.zeros(bits.size), dtype=np.uint16)
        cuda.unpack(bits, numbers, "float16")
        cuda.pack(numbers, back, "float16")
        np.testing.assert_array_equal(back, bits)


@pytest.mark.parametrize("function", [cuda.round_to, cuda.pack, cuda.unpack])
def test_other_kinds_are_refused(emulated, function):
    with pytest.raises(ValueError, match="'bfloat16' or 'float16', got 'float32'"):
        function(np.zeros(4, np.float32), np.zeros(4, np.float32), "float32")
