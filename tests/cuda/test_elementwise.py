"""The runtime's own elementwise passes."""

import numpy as np
import pytest

from shardrt.kernels.cpu import elementwise as cpu
from shardrt.kernels.cuda import elementwise as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, guarded, normal

COUNTS = [1, 3, 17, 256, 4099]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("offset", [0, 1])
def test_add(emulated, element, count, offset):
    with guarded(element) as array:
        first, second = array(normal(count), offset), array(normal(count), offset)
        out = array(np.full(count, np.nan), offset)
        cuda.add(first, second, out)
        expected = np.empty(count)
        cpu.add(first.astype(np.float64), second.astype(np.float64), expected)
        assert_close(out, expected)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("count", COUNTS)
def test_scale(emulated, element, count):
    with guarded(element) as array:
        x = array(normal(count))
        expected = x.astype(np.float64) * 0.3
        cuda.scale_(x, 0.3)
        assert_close(x, expected)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("factor", [0.3, np.nan])
@pytest.mark.parametrize("offset", [0, 1])
def test_scale_by_a_number_in_memory_has_the_bits_of_scale(emulated, element, factor, offset):
    with guarded(element) as array:
        x, expected = (array(normal(4099), offset) for _ in range(2))
        cuda.scale_(expected, factor)
        cuda.scale_by_(x, np.array([factor]))
        np.testing.assert_array_equal(x.astype(np.float64), expected.astype(np.float64))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("offset", [0, 1])
def test_unscale(emulated, element, bad, offset):
    values = normal(4099)
    if bad is not None:
        values[4098] = bad
    with guarded(element) as array:
        x = array(values, offset)
        expected = x.astype(np.float64) * 0.25
        assert cuda.unscale_(x, 0.25) == (bad is None)
        assert_close(x, expected)


@pytest.mark.parametrize("element", ELEMENTS)
def test_clamp(emulated, element):
    values = normal(1003)
    values[7] = np.nan
    with guarded(element) as array:
        x = array(values)
        expected = np.clip(x.astype(np.float64), -0.5, 0.5)
        cuda.clamp_(x, 0.5)
        assert_close(x, expected)
