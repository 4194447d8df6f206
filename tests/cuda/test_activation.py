"""GELU, SiLU, ReLU and SwiGLU far from zero, where exponentials overflow; launches."""

import numpy as np
import pytest

from shardrt.kernels.cuda import activation, swiglu
from tests.cuda.numbers import guarded


@pytest.mark.parametrize("element", ["float32", "float16"])
@pytest.mark.parametrize("name", ["gelu_tanh", "gelu_erf", "silu", "relu"])
def test_far_from_zero_it_is_0_or_x_and_nan_stays(emulated, element, name):
    with guarded(element) as array:
        x = array([-6e4, -200.0, -0.0, 200.0, 6e4, np.nan])
        y, dx = array(np.full(6, 7.0)), array(np.full(6, 7.0))
        getattr(activation, f"{name}_forward")(x, y)
        np.testing.assert_array_equal(y, [0, 0, 0, *x[3:]])
        getattr(activation, f"{name}_backward")(array(np.ones(6)), x, dx)
        np.testing.assert_array_equal(dx[[0, 1, 3, 4]], [0, 0, 1, 1])


@pytest.mark.parametrize("element", ["float32", "float16"])
def test_far_from_zero_swiglu_is_0_or_the_product(emulated, element):
    with guarded(element) as array:
        x, y = array([[-6e4, -200.0, 200.0, np.nan, 2.0, 2.0, 2.0, 2.0]]), array(np.full((1, 4), 7.0))
        swiglu.forward(x, y)
        np.testing.assert_array_equal(y, [[0, 0, 400, np.nan]])


def test_nothing_is_launched_for_nothing(emulated):
    empty = np.empty(0, np.float32)
    activation.silu_forward(empty, empty)
    assert not emulated.launches
