"""functional/pool.py: gradients against differences, values and gradients against PyTorch, bad arguments."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.gradcheck import LAYOUTS, check_gradients, leaf, normal

OPS = [F.max_pool2d, F.avg_pool2d]
CASES = [
    ((2, 3, 6, 7), 2, None, 0),
    ((1, 2, 7, 5), 3, 2, 1),
    ((2, 1, 5, 6), (2, 3), (1, 2), (1, 0)),
    ((1, 1, 9, 4), (3, 1), (4, 1), 0),  # pixels that no window sees
]


@pytest.mark.parametrize("op", OPS)
def test_gradients(op):
    for shape, *geometry in CASES:
        check_gradients(lambda x: op(x, *geometry), leaf(normal(*shape)))  # noqa: B023
    for layout in LAYOUTS:
        check_gradients(lambda x: op(x, 3, 1, 1), leaf(layout(normal(2, 2, 4, 5))))
        check_gradients(F.global_avg_pool2d, leaf(layout(normal(2, 3, 4, 5))))


def test_of_equal_numbers_the_first_has_the_gradient_and_nan_stays():
    x = Tensor(np.ones((1, 1, 2, 4), np.float32), requires_grad=True)
    F.max_pool2d(x, 2).backward(np.array([[[[2, 3]]]], np.float32))
    np.testing.assert_array_equal(x.grad[0, 0], [[2, 0, 3, 0], [0, 0, 0, 0]])
    x.data[0, 0, 1, 1] = np.nan
    np.testing.assert_array_equal(F.max_pool2d(x, 2).data[0, 0], [[np.nan, 1]])


@pytest.mark.torch
@pytest.mark.parametrize("op", OPS)
def test_equal_to_torch(op):
    torch = pytest.importorskip("torch")
    for shape, window, stride, padding in [*CASES, ((2, 16, 56, 55), 3, 2, 1)]:
        x = np.round(normal(*shape).astype("float32"), 1)  # with equal numbers
        ours, theirs = Tensor(x, requires_grad=True), torch.tensor(x, requires_grad=True)
        y = op(ours, window, stride, padding)
        expected = getattr(torch.nn.functional, op.__name__)(theirs, window, stride, padding)
        dy = normal(*y.shape, seed=1).astype("float32")
        y.backward(dy)
        expected.backward(torch.tensor(dy))
        np.testing.assert_allclose(y.data, expected.detach().numpy(), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(ours.grad, theirs.grad.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_bad_arguments_are_an_error(op):
    x = normal(1, 1, 4, 4)
    for args, told in [
        ((x[0], 2), "x must be"),
        ((x, 5), "larger than x"),
        ((x, 0), "kernel_size must be"),
        ((x, 2, 0), "stride must be"),
        ((x, (2, 3), 1, (2, 0)), "at most half of the window"),
    ]:
        with pytest.raises(ValueError, match=f"{op.__name__}: .*{told}"):
            op(*args)
