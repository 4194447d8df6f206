"""GELU, SiLU, ReLU, erf: against the CPU's in float64; on the path of vectors and on the other; in place."""

import numpy as np
import pytest

from shardrt.kernels.cpu import activation as cpu
from shardrt.kernels.cuda import activation as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, guarded, normal

NAMES = ["gelu_tanh", "gelu_erf", "silu", "relu"]
COUNTS = [1, 3, 17, 255, 4099]


def exact_forward(name, x):
    y = np.empty(x.shape)
    getattr(cpu, f"{name}_forward")(x.astype(np.float64), y)
    return y


def exact_backward(name, dy, x):
    dx = np.empty(x.shape)
    getattr(cpu, f"{name}_backward")(dy.astype(np.float64), x.astype(np.float64), dx)
    return dx


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("name", [*NAMES, "erf"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("offset", [0, 1])
def test_forward(emulated, element, name, count, offset):
    with guarded(element) as array:
        x, y = array(3 * normal(count), offset), array(np.full(count, np.nan), offset)
        getattr(cuda, f"{name}_forward")(x, y)
        assert_close(y, exact_forward(name, x))


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("offset", [0, 1])
def test_backward(emulated, element, name, count, offset):
    with guarded(element) as array:
        dy, x = array(normal(count, seed=1), offset), array(3 * normal(count), offset)
        dx = array(np.full(count, np.nan), offset)
        getattr(cuda, f"{name}_backward")(dy, x, dx)
        assert_close(dx, exact_backward(name, dy, x))


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_may_be_written_over_that_of_the_output(emulated, name):
    with guarded("bfloat16") as array:
        dy, x = array(normal(333, seed=1)), array(normal(333))
        expected = exact_backward(name, dy, x)
        getattr(cuda, f"{name}_backward")(dy, x, dy)
        assert_close(dy, expected)


@pytest.mark.parametrize("element", ["float32", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_far_from_zero_it_is_0_or_x_and_nan_stays(emulated, element, name):
    with guarded(element) as array:
        x = array([-6e4, -200.0, -0.0, 200.0, 6e4, np.nan])
        y, dx = array(np.full(6, 7.0)), array(np.full(6, 7.0))
        getattr(cuda, f"{name}_forward")(x, y)
        np.testing.assert_array_equal(y, [0, 0, 0, *x[3:]])
        getattr(cuda, f"{name}_backward")(array(np.ones(6)), x, dx)
        np.testing.assert_array_equal(dx[[0, 1, 3, 4]], [0, 0, 1, 1])


def test_relu_has_no_slope_at_zero(emulated):
    with guarded("float32") as array:
        dx = array([np.nan])
        cuda.relu_backward(array([2.0]), array([0.0]), dx)
        assert dx[0] == 0


def test_nothing_is_launched_for_nothing(emulated):
    empty = np.empty(0, np.float32)
    cuda.silu_forward(empty, empty)
    assert not emulated.launches
