"""Results of norms and activations that are made again for backward, not kept (functional/_again.py)."""

import numpy as np
import pytest

from shardrt import Tensor, device
from shardrt import functional as F
from shardrt.functional._again import Again
from shardrt.kernels.cpu import linear
from tests.gradcheck import normal

WIDTH = 48


def floats(*shape, seed=0, scale=1.0):
    return Tensor((scale * normal(*shape, seed=seed)).astype(np.float32), requires_grad=True)


def weights():
    return floats(WIDTH, seed=1), floats(WIDTH, seed=2)


MAKERS = {
    "layer_norm": lambda x: F.layer_norm(x, WIDTH, *weights()),
    "layer_norm without a bias": lambda x: F.layer_norm(x, WIDTH, weights()[0]),
    "add_layer_norm": lambda x: F.add_layer_norm(x, x * 3, *weights())[1],
    "rms_norm": lambda x: F.rms_norm(x, WIDTH, weights()[0]),
    "add_rms_norm": lambda x: F.add_rms_norm(x, x * 3, weights()[0])[1],
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swiglu": lambda x: F.swiglu(F.linear(x, floats(2 * WIDTH, WIDTH, seed=4))),
    "linear_gelu": lambda x: F.linear_gelu(x, floats(WIDTH, WIDTH, seed=3, scale=0.1), weights()[1]),
}


def gradients_behind(maker):
    """(what the linear layer behind has saved, what the maker gave, gradients of x and of the layer)."""
    x, weight, bias = floats(33, WIDTH), floats(7, WIDTH, seed=5), floats(7, seed=6)
    y = MAKERS[maker](x)
    z = F.linear(y, weight, bias)
    made = z.node.saved[0]
    z.backward(normal(33, 7, seed=7).astype(np.float32))
    return made, y.data, [x.grad, weight.grad, bias.grad]


@pytest.mark.parametrize("maker", MAKERS)
def test_gradients_are_the_same_to_the_bit(maker, monkeypatch):
    made, _, again = gradients_behind(maker)
    assert isinstance(made, Again)
    monkeypatch.setattr(linear, "INPUT_AGAIN", False)
    kept, result, usual = gradients_behind(maker)
    assert kept is result
    for one, other in zip(again, usual, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_input_that_no_gradient_goes_through_is_kept():
    x = floats(3, WIDTH).detach()
    y = F.gelu(x)
    assert F.linear(y, floats(7, WIDTH, seed=5)).node.saved[0] is y.data


def test_the_sum_that_a_norm_gives_beside_its_result_is_kept():
    total, _ = F.add_layer_norm(floats(3, WIDTH), floats(3, WIDTH, seed=1), *weights())
    assert F.linear(total, floats(7, WIDTH, seed=5)).node.saved[0] is total.data


def test_the_result_goes_when_nobody_else_has_it():
    pool = device.get("cpu")._pool
    x, weight = floats(512, 64), floats(64, 64, seed=1)
    inner = F.linear(x, weight)
    before = pool.held_bytes
    z = F.linear(F.gelu(inner), weight)
    assert pool.held_bytes - before == z.data.nbytes


def test_a_second_backward_says_what_an_earlier_one_has_freed():
    y = F.gelu(floats(3, WIDTH))
    z = F.linear(y, floats(7, WIDTH, seed=5))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="the saved arrays of GELUErf were freed by an earlier backward"):
        z.sum().backward()
