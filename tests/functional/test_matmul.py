"""functional/matmul.py: gradients against differences, values against NumPy's."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.gradcheck import LAYOUTS, check_gradients, contiguous, leaf, normal

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
@pytest.mark.parametrize("layout", LAYOUTS)
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


@pytest.mark.parametrize(
    "x, y, text",
    [((2, 3), (2, 3), "do not fit"), ((), (2,), "one dimension"), ((2, 3, 4), (3, 4, 5), "broadcast")],
)
def test_sizes_that_do_not_fit_are_an_error(x, y, text):
    with pytest.raises(ValueError, match=text):
        F.matmul(normal(*x), normal(*y))


def test_dtypes_do_not_mix():
    with pytest.raises(TypeError, match="matmul.*x float64, y float32"):
        F.matmul(normal(2, 2), normal(2, 2).astype(np.float32))
