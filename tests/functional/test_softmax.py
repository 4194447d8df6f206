"""functional/softmax.py: gradients against differences, large numbers, equality with torch."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.gradcheck import LAYOUTS, check_direction, check_gradients, leaf, normal

OPS = [F.softmax, F.log_softmax]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 5), (2, 1, 7), (4, 1), (1,)], ids=str)
def test_gradients_along_every_axis(op, layout, shape):
    for axis in range(-1, len(shape)):
        check_gradients(lambda x: op(x, axis), leaf(layout(normal(*shape))))  # noqa: B023


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_an_odd_length(op):
    check_direction(op, leaf(normal(3, 1031)))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_values_are_exponentials_over_their_sum_along_the_axis(axis):
    x = normal(4, 3, 9) * 3
    expected = np.exp(x) / np.exp(x).sum(axis, keepdims=True)
    np.testing.assert_allclose(F.softmax(x, axis).data, expected, rtol=1e-13)
    np.testing.assert_allclose(F.log_softmax(x, axis).data, np.log(expected), rtol=1e-12, atol=1e-14)


def test_large_numbers_do_not_overflow():
    x = np.array([[1e4, 0.0, -1e4]], np.float32)
    assert F.softmax(x).data.tolist() == [[1, 0, 0]]
    assert F.log_softmax(x).data.tolist() == [[0, -1e4, -2e4]]


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="out of bounds"):
        F.softmax(normal(2, 3), 2)
    with pytest.raises(ValueError, match="one dimension"):
        F.softmax(Tensor(3.0))
    with pytest.raises(TypeError, match="log_softmax.*int64"):
        F.log_softmax(np.arange(3))


@pytest.mark.torch
@pytest.mark.parametrize("op", OPS)
def test_equal_to_torch(op):
    torch = pytest.importorskip("torch")
    values, dy = (normal(33, 257, seed=s).astype(np.float32) * 3 for s in (0, 1))
    x, theirs = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    y, their_y = op(x), getattr(torch, op.__name__)(theirs, -1)
    y.backward(dy)
    their_y.backward(torch.tensor(dy))
    np.testing.assert_allclose(y.data, their_y.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(x.grad, theirs.grad.numpy(), rtol=1e-4, atol=2e-5)
