"""functional/softmax.py: large numbers, nan, errors. The rest is in test_beside_pytorch.py."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests import lab
from tests.gradcheck import normal


def test_large_numbers_do_not_overflow():
    x = np.array([[1e4, 0.0, -1e4]], np.float32)
    assert F.softmax(x).data.tolist() == [[1, 0, 0]]
    assert F.log_softmax(x).data.tolist() == [[0, -1e4, -2e4]]


@pytest.mark.parametrize("place", [0, 1, 7, 16, 39])
def test_a_nan_shows_in_its_row_and_in_no_other(place):
    """Also in what has kernels of its own for rows of exponentials: the loss, attention."""
    x = np.random.default_rng(0).standard_normal((2, 40)).astype(np.float32)
    x[0, place] = np.nan
    losses = F.cross_entropy(x, np.array([3, 3]), reduction="none").data
    q = x[:, None, :, None]  # two samples of 40 tokens, one number each
    attended = F.scaled_dot_product_attention(*map(Tensor, (q, q, q))).data
    assert np.isnan(F.softmax(x).data).all(1).tolist() == [True, False]
    assert np.isnan(losses).tolist() == [True, False]
    assert (
        np.isnan(attended).all((1, 2, 3)).tolist()
        == np.isnan(attended).any((1, 2, 3)).tolist()
        == [True, False]
    )


test_what_does_not_fit_is_an_error = lab.refusals(
    (lambda: F.softmax(normal(2, 3), 2), "out of bounds"),
    (lambda: F.softmax(Tensor(3.0)), "one dimension"),
    (lambda: F.log_softmax(np.arange(3)), TypeError, "log_softmax.*int64"),
)
