"""functional/embedding.py: gradients against differences, indices that repeat, errors."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests import lab
from tests.gradcheck import check_gradients, leaf, normal

INDICES = np.array([[0, 3, 3], [3, 1, 0]])


@pytest.mark.parametrize("indices", [INDICES, INDICES.T, INDICES[:, 0], np.int64(3)], ids=str)
def test_gradients(indices):
    check_gradients(lambda w: F.embedding(np.asarray(indices), w), leaf(normal(5, 3)))


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


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint16])
def test_indices_of_any_integer_type(dtype):
    weight = normal(5, 3)
    np.testing.assert_array_equal(F.embedding(INDICES.astype(dtype), weight).data, weight[INDICES])
    np.testing.assert_array_equal(F.embedding(Tensor(INDICES.astype(dtype)), weight).data, weight[INDICES])


test_what_does_not_fit_is_an_error = lab.refusals(
    (lambda: F.embedding([[0, 1], [5, -1]], normal(5, 3)), r"indices\[1, 0\] must be in \[0, 5\), got 5"),
    (lambda: F.embedding([-1], normal(5, 3)), r"indices\[0\] must be in \[0, 5\), got -1"),
    (lambda: F.embedding(np.ones(3), normal(5, 3)), TypeError, "indices must be integers, got float64"),
)
