"""A linear layer with a GELU behind it: against the CPU's in float64, on both paths of the kernel."""

import cProfile
import pstats

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from shardrt.kernels.cpu import linear as cpu
from shardrt.kernels.cuda import _launch, layer_norm
from shardrt.kernels.cuda import linear as cuda
from shardrt.kernels.cuda.activation import gelu_tanh_backward
from tests.cuda.emulator import Emulator
from tests.cuda.numbers import ELEMENTS, TOLERANCE, assert_close, guarded, normal


def exact(function, *arrays, out, more=()):
    results = [np.zeros(shape) for shape in out]
    wide = [None if a is None else a.astype(np.float64) for a in arrays]
    function(*wide, *results, *more)
    return results


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rows, inputs, outputs", [(3, 5, 7), (130, 8, 16), (65, 3, 520), (1, 1, 1)])
def test_forward_and_backward(emulated, element, rows, inputs, outputs):
    with guarded(element) as array:
        x, weight, bias = array(normal(rows, inputs)), array(normal(outputs, inputs)), array(normal(outputs))
        inner, y = (array(np.full((rows, outputs), np.nan)) for _ in range(2))
        cuda.forward_gelu(x, weight, bias, inner, y)
        wanted = exact(cpu.forward_gelu, x, weight, bias, out=[(rows, outputs)] * 2)
        assert_close(inner, wanted[0])
        assert_close(y, wanted[1], 2)

        dy, dinner = array(normal(rows, outputs, seed=1)), array(np.full((rows, outputs), np.nan))
        dbias = array(np.full(outputs, 2.0), dtype=np.float64 if element == "float64" else np.float32)
        cuda.backward_gelu(dy, inner, dinner, dbias, True)
        expected = exact(cpu.backward_gelu, dy, inner, out=[(rows, outputs), (outputs,)], more=(False,))
        assert_close(dinner, expected[0])
        assert np.abs(dbias - 2 - expected[1]).max() <= 20 * TOLERANCE["float32"] * np.sqrt(rows)
        cuda.backward_gelu(dy, inner, dy, None, False)  # in place, and nobody wants the bias's
        assert_close(dy, expected[0])


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_the_sum_over_rows_is_of_what_has_not_been_rounded(emulated, element):
    with guarded(element) as array:
        dy, inner = array(normal(200, 16)), array(normal(200, 16, seed=1))
        dinner, dbias = array(np.zeros((200, 16))), array(np.zeros(16), dtype=np.float32)
        cuda.backward_gelu(dy, inner, dinner, dbias, False)
        expected = exact(cpu.backward_gelu, dy, inner, out=[(200, 16), (16,)], more=(False,))
        assert_close(dbias, expected[1], 10)


def test_no_rows(emulated):
    with guarded("float32") as array:
        x, weight, empty = array(np.zeros((0, 3))), array(normal(4, 3)), array(np.zeros((0, 4)))
        cuda.forward_gelu(x, weight, None, empty, empty)
        dbias = array(np.full(4, 5.0))
        cuda.backward_gelu(empty, empty, empty, dbias, False)
        np.testing.assert_array_equal(dbias, 0)


def test_numpy_is_asked_once_for_the_name_of_a_type():
    """It takes as long as a launch. Also what the CPU's ops ask before they call a kernel."""

    class Nothing(Emulator):
        def launch(self, *args):
            """As a GPU that does nothing."""

    def step():
        x, weight = (Tensor(np.ones((4, 4), np.float32), requires_grad=True) for _ in range(2))
        F.gelu(F.linear(x, weight)).sum().backward()
        gelu_tanh_backward(x.data, x.data, x.data)
        layer_norm.forward(x.data, x.data[0], None, x.data, *x.data[:2], 1e-5)

    before = _launch.use(Nothing())
    step()
    asked = cProfile.Profile()
    asked.runcall(step)
    _launch.use(before)
    assert not [name for _, _, name in pstats.Stats(asked).stats if name == "_name_get"]
