"""functional/softmax.py: large numbers, errors. The rest is in test_beside_pytorch.py."""

import numpy as np

from shardrt import Tensor
from shardrt import functional as F
from tests import lab
from tests.gradcheck import normal


def test_large_numbers_do_not_overflow():
    x = np.array([[1e4, 0.0, -1e4]], np.float32)
    assert F.softmax(x).data.tolist() == [[1, 0, 0]]
    assert F.log_softmax(x).data.tolist() == [[0, -1e4, -2e4]]


test_what_does_not_fit_is_an_error = lab.refusals(
    (lambda: F.softmax(normal(2, 3), 2), "out of bounds"),
    (lambda: F.softmax(Tensor(3.0)), "one dimension"),
    (lambda: F.log_softmax(np.arange(3)), TypeError, "log_softmax.*int64"),
)
