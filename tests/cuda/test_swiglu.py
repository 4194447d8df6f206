"""SwiGLU: against the CPU's in float64, with vectors and without, in place, far from zero."""

import numpy as np
import pytest

from shardrt.kernels.cpu import swiglu as cpu
from shardrt.kernels.cuda import swiglu as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, guarded, normal

SHAPES = [(1, 1), (3, 17), (2, 64), (2, 4104)]


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_forward_and_backward(emulated, element, shape, offset):
    rows, width = shape
    with guarded(element) as array:
        x, y = array(3 * normal(rows, 2 * width), offset), array(np.full(shape, np.nan), offset)
        dy, dx = array(normal(rows, width, seed=1), offset), array(np.full(x.shape, np.nan), offset)
        exact, expected = [a.astype(np.float64) for a in (dy, x)], [np.empty(a.shape) for a in (y, x)]
        cuda.forward(x, y)
        cpu.forward(exact[1], expected[0])
        assert_close(y, expected[0])
        cuda.backward(dy, x, dx)
        cpu.backward(*exact, expected[1])
        assert_close(dx, expected[1])
        cuda.backward(dy, x, x)
        np.testing.assert_array_equal(x, dx)


@pytest.mark.parametrize("element", ["float32", "float16"])
def test_far_from_zero_it_is_0_or_the_product(emulated, element):
    with guarded(element) as array:
        x, y = array([[-6e4, -200.0, 200.0, np.nan, 2.0, 2.0, 2.0, 2.0]]), array(np.full((1, 4), 7.0))
        cuda.forward(x, y)
        np.testing.assert_array_equal(y, [[0, 0, 400, np.nan]])
