"""functional/embedding.py: gradients against differences, indices that repeat, errors."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.gradcheck import LAYOUTS, check_gradients, leaf, normal

INDICES = np.array([[0, 3, 3], [3, 1, 0]])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("indices", [INDICES, INDICES.T, INDICES[:, 0], np.int64(3)], ids=str)
def test_gradients(layout, indices):
    check_gradients(lambda w: F.embedding(np.asarray(indices), w), leaf(layout(normal(5, 3))))


def test_gradients_of_one_row_and_of_one_column():
    check_gradients(lambda w: F.embedding([0, 0], w), leaf(normal(1, 4)))
    check_gradients(lambda w: F.embedding([0, 2, 0], w), leaf(normal(3, 1)))


def test_a_table_used_twice_and_tied_to_a_linear_layer():
    def tied(w):
        x = F.embedding(INDICES, w) * F.embedding(INDICES.T.reshape(2, 3), w)
        return F.linear(x, w)

    check_gradients(tied, leaf(normal(5, 3)))


def test_a_table_may_be_the_result_of_an_op():
    check_gradients(lambda w: F.embedding(INDICES, w.T * 2), leaf(normal(3, 5)))


def test_rows_that_no_index_names_have_gradient_zero():
    weight = leaf(normal(5, 3))
    F.embedding([1, 1], weight).sum().backward()
    assert weight.grad.tolist() == [[0] * 3, [2] * 3, [0] * 3, [0] * 3, [0] * 3]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint16])
def test_indices_of_any_integer_type(dtype):
    weight = normal(5, 3)
    np.testing.assert_array_equal(F.embedding(INDICES.astype(dtype), weight).data, weight[INDICES])
    np.testing.assert_array_equal(F.embedding(Tensor(INDICES.astype(dtype)), weight).data, weight[INDICES])


def test_the_first_index_out_of_range_is_named():
    with pytest.raises(ValueError, match=r"indices\[1, 0\] is 5, not in \[0, 5\)"):
        F.embedding([[0, 1], [5, -1]], normal(5, 3))
    with pytest.raises(ValueError, match=r"indices\[0\] is -1"):
        F.embedding([-1], normal(5, 3))


def test_indices_that_are_no_integers_are_an_error():
    with pytest.raises(TypeError, match="indices must be integers, got float64"):
        F.embedding(np.ones(3), normal(5, 3))
