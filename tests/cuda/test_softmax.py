"""Softmax: rows that a warp keeps, that a block keeps, and others; rows with nan."""

import numpy as np
import pytest

from shardrt.kernels.cuda import softmax as cuda
from tests.cuda.numbers import guarded, normal


@pytest.mark.parametrize(
    ("element", "width", "offset", "form"),
    [
        ("bfloat16", 2048, 0, "warps"),
        ("bfloat16", 2048, 1, "any"),
        ("bfloat16", 2047, 0, "any"),
        ("bfloat16", 2056, 0, "blocks"),
        ("float32", 1024, 0, "warps"),
        ("float32", 1028, 0, "blocks"),
        ("float32", 8192, 0, "blocks"),
        ("float32", 8196, 0, "any"),
    ],
)
def test_the_form_is_that_of_the_width(emulated, element, width, offset, form):
    with guarded(element) as array:
        x, y = array(normal(2, width), offset), array(np.full((2, width), np.nan), offset)
        cuda.forward(x, y)
        cuda.backward(x, y, x)
        assert emulated.launches == [f"forward_{form}", f"backward_{form}"]


@pytest.mark.parametrize("width", [8, 2052, 17])
def test_a_row_with_nan_is_nan(emulated, width):
    values = normal(3, width)
    values[1, width // 2] = np.nan
    with guarded("float32") as array:
        x, y = array(values), array(np.full(values.shape, 7.0))
        cuda.forward(x, y)
        np.testing.assert_array_equal(np.isnan(y).all(axis=1), [False, True, False])
        assert np.isfinite(y[[0, 2]]).all()
