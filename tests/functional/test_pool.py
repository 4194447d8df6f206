"""functional/pool.py: equal numbers, nan, bad arguments. The rest is in test_beside_pytorch.py."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.gradcheck import normal

OPS = [F.max_pool2d, F.avg_pool2d]


def test_of_equal_numbers_the_first_has_the_gradient_and_nan_stays():
    x = Tensor(np.ones((1, 1, 2, 4), np.float32), requires_grad=True)
    F.max_pool2d(x, 2).backward(np.array([[[[2, 3]]]], np.float32))
    np.testing.assert_array_equal(x.grad[0, 0], [[2, 0, 3, 0], [0, 0, 0, 0]])
    x.data[0, 0, 1, 1] = np.nan
    np.testing.assert_array_equal(F.max_pool2d(x, 2).data[0, 0], [[np.nan, 1]])


@pytest.mark.parametrize("op", OPS)
def test_bad_arguments_are_an_error(op):
    x = normal(1, 1, 4, 4)
    for args, message in [
        ((x[0], 2), "x must be"),
        ((x, 5), "larger than x"),
        ((x, 0), "kernel_size must be"),
        ((x, 2, 0), "stride must be"),
        ((x, (2, 3), 1, (2, 0)), "at most half of the window"),
    ]:
        with pytest.raises(ValueError, match=f"{op.__name__}: .*{message}"):
            op(*args)
