"""functional/activation.py: gradients against differences, values against their definition."""

from math import erf, sqrt

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.gradcheck import LAYOUTS, check_direction, check_gradients, leaf, normal

OPS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 5), (2, 1, 7), (1,), ()], ids=str)
def test_gradients(name, layout, shape):
    x = normal(*shape)
    check_gradients(OPS[name], leaf(layout(x + np.sign(x) * 1e-2)))  # relu has a corner at 0


@pytest.mark.parametrize("name", OPS)
def test_gradients_where_the_tails_are(name):
    check_gradients(OPS[name], leaf([-20.0, -6.0, -3.0, 3.0, 6.0, 20.0]))


@pytest.mark.parametrize("name", OPS)
def test_gradients_of_an_odd_length(name):
    check_direction(OPS[name], leaf(normal(1, 4099)))


def test_values_are_those_of_the_definition():
    x = normal(101) * 3
    inner = sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    expected = {
        "gelu": [0.5 * a * (1 + erf(a / sqrt(2))) for a in x],
        "gelu_tanh": 0.5 * x * (1 + np.tanh(inner)),
        "silu": x / (1 + np.exp(-x)),
        "relu": np.maximum(x, 0),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(OPS[name](x).data, values, rtol=1e-12, atol=1e-12)


def test_relu_has_gradient_zero_at_zero():
    x = leaf([0.0, -0.0])
    F.relu(x).sum().backward()
    assert x.grad.tolist() == [0, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 10), (2, 1, 6), (1, 2), (2,)], ids=str)
def test_gradients_of_swiglu(layout, shape):
    check_gradients(F.swiglu, leaf(layout(3 * normal(*shape))))


def test_swiglu_is_the_silu_of_the_first_half_times_the_second():
    x = normal(5, 34) * 8
    expected = F.silu(x[:, :17].copy()).data * x[:, 17:]
    np.testing.assert_allclose(F.swiglu(x).data, expected, rtol=1e-12)
    x = np.array([[-1e4, 1e4, 2.0, 3.0]], np.float32)
    np.testing.assert_allclose(F.swiglu(x).data, [[0, 3e4]], atol=1e-30)
    with pytest.raises(ValueError, match=r"swiglu: x must be \(..., 2 \* width\), got \(2, 3\)"):
        F.swiglu(normal(2, 3))


def test_another_approximation_is_an_error():
    with pytest.raises(ValueError, match="'none' or 'tanh', got 'erf'"):
        F.gelu(leaf([1.0]), approximate="erf")


def test_integers_are_an_error():
    for op in OPS.values():
        with pytest.raises(TypeError, match="got x int64"):
            op(np.arange(3))


@pytest.mark.torch
@pytest.mark.parametrize("name", OPS)
def test_equal_to_torch(name):
    torch = pytest.importorskip("torch")
    functions = {
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": torch.nn.functional.silu,
        "relu": torch.nn.functional.relu,
    }
    values = (normal(7, 129) * 4).astype(np.float32)
    x, theirs = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    y, their_y = OPS[name](x), functions[name](theirs)
    y.sum().backward()
    their_y.sum().backward()
    np.testing.assert_allclose(y.data, their_y.detach().numpy(), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(x.grad, theirs.grad.numpy(), rtol=2e-6, atol=2e-6)
