"""functional/shape.py: gradients against differences, views where NumPy gives views, errors.

test_beside_pytorch.py has more of them.
"""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.gradcheck import check_gradients, contiguous, leaf, normal, sliced

ROWS = np.array([2, 0, 2])
OPS = {
    "reshape": lambda x: F.reshape(x, (5, -1)),
    "reshape to a number of dimensions": lambda x: F.reshape(x, -1),
    "squeeze": F.squeeze,
    "unsqueeze": lambda x: F.unsqueeze(x, -1),
    "permute": lambda x: F.permute(x, (2, 0, 1)),
    "transpose": lambda x: F.transpose(x, 0, -1),
    "expand": lambda x: F.expand(x, (2, 3, 4, -1)),
    "split": lambda x: F.split(x, 2, axis=2),
    "split by sizes": lambda x: F.split(x, [1, 0, 2], axis=0),
    "an integer": lambda x: x[1],
    "a last integer": lambda x: x[..., -1],
    "a slice": lambda x: x[1:, :, ::2],
    "a slice backwards": lambda x: x[::-1],
    "a new axis": lambda x: x[:, None, 0],
    "an array with an index twice": lambda x: x[ROWS],
    "a list": lambda x: x[[0, 2], 0, [4, 4]],
    "arrays and slices": lambda x: x[ROWS, :, 1:4],
    "a mask": lambda x: x[np.arange(15).reshape(3, 1, 5) % 3 == 0],
    "a tensor": lambda x: x[Tensor(ROWS)],
    "one element": lambda x: x[2, 0, 1],
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("layout", [contiguous, sliced])
def test_gradients(name, layout):
    check_gradients(OPS[name], leaf(layout(normal(3, 1, 5))))


@pytest.mark.parametrize("name", ["reshape", "permute", "transpose", "unsqueeze", "a slice", "an integer"])
def test_views_share_memory_forward(name):
    x = leaf(normal(3, 1, 5))
    assert np.shares_memory(OPS[name](x).data, x.data)


def test_pieces_of_a_split_share_memory():
    x = leaf(normal(6, 4))
    assert all(np.shares_memory(piece.data, x.data) for piece in F.split(x, 4))
    assert [piece.shape for piece in F.split(x, 4)] == [(4, 4), (2, 4)]
    assert [piece.shape for piece in F.chunk(x, 4)] == [(2, 4)] * 3


def test_a_piece_of_a_split_that_nothing_uses_has_gradient_zero():
    x = leaf(normal(3, 6))
    first, _, last = F.split(x, 2, axis=1)
    (first * 2 + last).sum().backward()
    assert x.grad.tolist() == [[2, 2, 0, 0, 1, 1]] * 3


def test_a_chain_of_views_has_a_gradient():
    check_gradients(lambda x: x[:, 1:].T.reshape(2, -1)[1].reshape(4, 1) * 2, leaf(normal(4, 3)))


def test_concatenate_takes_tensors_of_several_sizes_and_a_constant():
    check_gradients(
        lambda x, y: F.concatenate([x, np.ones((2, 1)), y], axis=1), leaf(normal(2, 3)), leaf(normal(2, 2))
    )


def test_an_expanded_tensor_may_go_into_any_op():
    x = leaf(normal(1, 5))
    check_gradients(lambda x: F.gelu(F.expand(x, (3, 5))), x)
    check_gradients(lambda x: F.gelu(F.expand(x, (1, 5))), x)


def test_no_array_that_a_kernel_gets_is_read_only():
    """A Numba kernel would be compiled a second time for it."""
    assert F.expand(leaf(normal(5)), (1, 1, 5)).data.flags.writeable
    assert F.sum(leaf(normal(3, 1)), 1).node.backward(np.ones(3))[0].flags.writeable


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda x: F.reshape(x, (4, 4)), "reshape"),
        (lambda x: F.squeeze(x, 0), "axis 0 must have size 1, got 3"),
        (lambda x: F.permute(x, (0, 1)), "must name all 3 axes"),
        (lambda x: F.permute(x, (0, 1, 1)), "repeated axis"),
        (lambda x: F.expand(x, (5,)), "can't be expanded to"),
        (lambda x: F.expand(x, (-1, 3, 1, 5)), "can't be expanded to"),
        (lambda x: F.split(x, [1, 1], 0), "do not add up to 3"),
        (lambda x: F.split(x, 0, 0), "at least 1"),
        (lambda x: F.chunk(x, 0), "at least 1"),
        (lambda x: F.concatenate([]), "at least one tensor"),
        (lambda x: F.concatenate([x, x[:, :, 1:]]), "must be equal except along axis 0"),
        (lambda x: F.unsqueeze(x, 4), "out of bounds"),
    ],
)
def test_what_does_not_fit_is_an_error(call, text):
    with pytest.raises(ValueError, match=text):
        call(leaf(normal(3, 1, 5)))


def test_concatenate_does_not_mix_dtypes():
    with pytest.raises(TypeError, match="float64.*float32"):
        F.concatenate([np.ones(2), np.ones(2, np.float32)])
