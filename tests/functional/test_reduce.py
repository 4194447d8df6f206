"""functional/reduce.py: gradients against differences, values against NumPy's."""

import numpy as np
import pytest

from shardrt import functional as F
from tests import lab
from tests.gradcheck import check_gradients, leaf, normal

AXES = [None, 0, 1, -1, (0, 2), (1, 0), ()]


@pytest.mark.parametrize("op", [F.sum, F.mean, F.max])
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_gradients_and_values(op, axis, keepdims):
    x = normal(3, 1, 5)
    check_gradients(lambda x: op(x, axis, keepdims), leaf(x))
    expected = getattr(np, op.__name__)(x, axis=axis, keepdims=keepdims)
    np.testing.assert_allclose(op(leaf(x), axis, keepdims).data, expected, rtol=1e-14)


@pytest.mark.parametrize("op", [F.sum, F.mean, F.max])
def test_numbers_reduce_to_themselves(op):
    check_gradients(op, leaf(3.0))


def test_equal_elements_share_the_gradient_of_the_largest():
    x = leaf([[1.0, 2.0, 2.0], [3.0, 0.0, 1.0]])
    F.max(x, axis=1).sum().backward()
    assert x.grad.tolist() == [[0, 0.5, 0.5], [1, 0, 0]]


def test_results_are_arrays_of_the_dtype_of_the_input():
    for dtype in (np.float32, np.float64):
        for op in (F.sum, F.mean, F.max):
            y = op(np.ones((3, 4), dtype))
            assert isinstance(y.data, np.ndarray) and y.dtype == dtype and y.shape == ()
    assert F.sum(np.arange(4)).item() == 6
    assert F.mean(np.arange(4)).dtype == np.float32


test_what_does_not_fit_is_an_error = lab.refusals(
    (lambda: F.sum(leaf(normal(2, 3)), 2), "axis 2 is out of bounds"),
    (lambda: F.max(leaf(np.zeros((0, 3)))), "zero-size"),
)
