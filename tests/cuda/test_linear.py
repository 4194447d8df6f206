"""A linear layer with a GELU behind it: how often NumPy is asked for a name."""

import cProfile
import pstats

import numpy as np

from shardrt import Tensor
from shardrt import functional as F
from shardrt.kernels.cuda import _launch, layer_norm
from shardrt.kernels.cuda.activation import gelu_tanh_backward
from tests.cuda.emulator import Emulator


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
