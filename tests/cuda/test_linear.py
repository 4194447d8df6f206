"""A linear layer with a GELU behind it: no rows, and how often NumPy is asked for a name."""

import cProfile
import pstats

import numpy as np

from shardrt import Tensor
from shardrt import functional as F
from shardrt.kernels.cuda import _launch, layer_norm
from shardrt.kernels.cuda import linear as cuda
from shardrt.kernels.cuda.activation import gelu_tanh_backward
from tests.cuda.emulator import Emulator
from tests.cuda.numbers import guarded, normal


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
