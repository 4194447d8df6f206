"""functional/elementwise.py: broadcasting, dtypes, zeros. The rest is in test_beside_pytorch.py."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests import lab
from tests.gradcheck import check_gradients, leaf, normal, sliced, transposed

BINARY = [F.add, F.sub, F.mul, F.div, F.maximum, F.minimum]
PAIRS = [((2, 3, 5), (5,)), ((2, 1, 5), (3, 1)), ((), (3, 5)), ((1,), (1, 1))]


def away_from_zero(array):
    """Positive: fit to divide by and to take the logarithm of."""
    return np.abs(array) + 0.5


@pytest.mark.parametrize("op", BINARY)
@pytest.mark.parametrize("shapes", PAIRS, ids=str)
def test_binary_gradients_are_summed_back_to_the_shape_of_each_input(op, shapes):
    for one, other in (shapes, shapes[::-1]):
        check_gradients(op, leaf(normal(*one)), leaf(away_from_zero(normal(*other, seed=1))))


@pytest.mark.parametrize("op", BINARY)
def test_one_tensor_as_both_inputs_gets_both_gradients(op):
    x = leaf(away_from_zero(normal(4, 3)))
    op(x, x).sum().backward()
    expected = {F.add: 2.0, F.sub: 0.0, F.mul: 2 * x.data, F.div: 0.0}.get(op, 1.0)
    np.testing.assert_allclose(x.grad, np.broadcast_to(expected, x.shape), atol=1e-15)


@pytest.mark.parametrize("op", BINARY)
def test_only_the_input_that_needs_a_gradient_gets_one(op):
    for needs in ((True, False), (False, True)):
        x, y = (Tensor(away_from_zero(normal(2, 3, seed=i)), requires_grad=n) for i, n in enumerate(needs))
        check_gradients(op, x, y)
        assert [x.grad is not None, y.grad is not None] == list(needs)


def test_zeroth_power_has_gradient_zero_at_zero():
    x = leaf([0.0, 1.0])
    F.pow(x, 0).sum().backward()
    assert x.grad.tolist() == [0, 0]


def test_equal_inputs_of_maximum_share_the_gradient():
    x, y = leaf([1.0, 2.0, 3.0]), leaf([1.0, 0.0, 5.0])
    F.maximum(x, y).sum().backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([0.5, 1, 0], [0.5, 0, 1])


def test_integers_beside_floats_take_their_dtype():
    x = Tensor(np.ones(3, np.float32))
    for integers in (np.arange(3), Tensor(np.arange(3)), np.array([True, False, True])):
        assert F.mul(x, integers).dtype == np.float32
    assert F.add(np.arange(3), 1).dtype == np.int64
    assert F.add(np.arange(3), 0.5).dtype == np.float32
    assert F.div(np.arange(3), 2).data.tolist() == [0, 0.5, 1]
    assert F.exp(np.arange(3)).dtype == np.float32


X = leaf(normal(2, 3))
test_what_does_not_fit_is_an_error = lab.refusals(
    (lambda: F.add(np.ones(3, np.float32), np.ones(3)), TypeError, "add: float32 with float64"),
    (lambda: F.mul(X, normal(4)), r"\(2, 3\).*\(4,\)"),
    (lambda: F.pow(X, None), TypeError, "must be numbers, got NoneType"),
    (lambda: F.where([0, 1], X, X), TypeError, "condition must be boolean, such as x > 0, got int64"),
    (lambda: F.clamp(X), "pass low, high or both"),
)


def test_powers_of_zero_have_gradient_zero_as_in_pytorch():
    """Not nan."""
    zero = leaf([0.0, 0.0])
    F.pow(zero, Tensor([2.0, 0.0], dtype=np.float64)).sum().backward()
    assert zero.grad.tolist() == [0, 0]


def test_what_backward_does_not_need_is_not_saved():
    x = leaf(normal(3))
    assert F.mul(x, 2.0).node.saved[0] is None
    assert F.mul(x, normal(3)).node.saved[0] is None
    assert F.div(x, 2.0).node.saved[0] is None


def test_results_are_contiguous_whatever_the_inputs_are():
    for layout in (transposed, sliced):
        assert F.add(layout(normal(3, 5)), layout(normal(3, 5))).data.flags.c_contiguous


def test_where_broadcasts_and_lets_no_nan_through():
    x, y = leaf(normal(2, 1)), leaf(normal(3))
    check_gradients(lambda x, y: F.where(normal(2, 3) > 0, x, y), x, y)
    x = leaf([-1.0, 4.0])
    with np.errstate(invalid="ignore"):
        F.where(x > 0, F.sqrt(x), 0.0).sum().backward()
    assert np.isnan(x.grad[0]) and x.grad[1] == 0.25, "sqrt has no slope at -1; where passes it 0"
    root = leaf([np.nan, 2.0])
    F.where([False, True], root, 0.0).sum().backward()
    assert root.grad.tolist() == [0, 1]


def test_bounds_of_clamp_may_be_tensors():
    x, low = leaf(normal(2, 3)), leaf(normal(3, seed=1) - 1)
    check_gradients(lambda x, low: F.clamp(x, low, 0.5), x, low)
    assert F.clamp(np.arange(5), 1, 3).data.tolist() == [1, 1, 2, 3, 3]
    assert F.clamp(np.arange(3), 0.5).data.tolist() == [0.5, 1, 2]
