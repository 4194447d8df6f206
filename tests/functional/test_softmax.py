"""functional/softmax.py: large numbers, errors. The rest is in test_beside_pytorch.py."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.gradcheck import normal


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
