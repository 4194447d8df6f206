"""functional/matmul.py: gradients against differences, values against NumPy's."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests import lab
from tests.gradcheck import check_gradients, contiguous, leaf, normal, sliced

SHAPES = [
    ((3, 5), (5, 2)),
    ((1, 1), (1, 1)),
    ((4, 3, 5), (4, 5, 2)),
    ((4, 3, 5), (5, 2)),
    ((2, 3, 1, 5), (5, 2)),
    ((3, 5), (4, 5, 2)),
    ((2, 1, 3, 5), (4, 5, 2)),
    ((1, 3, 5), (4, 5, 1)),
    ((5,), (5, 2)),
    ((3, 5), (5,)),
    ((5,), (5,)),
    ((5,), (4, 5, 2)),
    ((4, 3, 5), (5,)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("layout", [contiguous, sliced])
def test_gradients_and_values(shapes, layout):
    x, y = layout(normal(*shapes[0])), layout(normal(*shapes[1], seed=1))
    np.testing.assert_allclose(F.matmul(x, y).data, x @ y, rtol=1e-12, atol=1e-12)
    check_gradients(F.matmul, leaf(x), leaf(contiguous(y)))
    check_gradients(F.matmul, leaf(contiguous(x)), leaf(y))


def test_gradients_of_a_product_with_its_own_transpose():
    check_gradients(lambda x: x @ x.T, leaf(normal(4, 3)))
    check_gradients(lambda x: F.transpose(x, 1, 2) @ x, leaf(normal(2, 4, 3)))


def test_only_what_backward_needs_is_saved():
    x, y = leaf(normal(2, 3)), Tensor(normal(3, 4))
    assert F.matmul(x, y).node.saved[0] is None


test_what_does_not_fit_is_an_error = lab.refusals(
    (lambda: F.matmul(normal(2, 3), normal(2, 3)), "must be the number of rows of y"),
    (lambda: F.matmul(normal(), normal(2)), "one dimension"),
    (lambda: F.matmul(normal(2, 3, 4), normal(3, 4, 5)), "broadcast"),
    (
        lambda: F.matmul(normal(2, 2), normal(2, 2).astype(np.float32)),
        *(TypeError, "matmul.*x float64, y float32"),
    ),
)
