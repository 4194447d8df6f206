"""functional/pool.py: bad arguments. The rest is in tests/contracts and test_beside_pytorch.py."""

import pytest

from shardrt import functional as F
from tests.gradcheck import normal

OPS = [F.max_pool2d, F.avg_pool2d]


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
