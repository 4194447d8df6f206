"""The runtime's own elementwise passes: a factor in memory, and numbers that are not finite."""

import numpy as np
import pytest

from shardrt.kernels.cuda import elementwise as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, guarded, normal


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
