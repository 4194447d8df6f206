"""PyTorch's words for arguments, and NumPy's functions on tensors: they work, or say what does."""

import inspect

import numpy as np
import pytest

from shardrt import Tensor, no_grad
from shardrt import functional as F
from tests.gradcheck import leaf, normal


def test_every_function_with_an_axis_takes_dim_too():
    with_axis = {
        n for n in F.__all__ if {"axis", "axis0"} & inspect.signature(getattr(F, n)).parameters.keys()
    }
    x, index = leaf(normal(3, 3)), np.zeros((1, 3), np.int64)
    others = {
        "gather": {"index": index},
        "index_select": {"index": [0]},
        "scatter": {"index": index, "source": normal(1, 3)},
        "scatter_add": {"index": index, "source": normal(1, 3)},
        "index_add": {"index": [0], "source": normal(3, 1)},
        "topk": {"k": 2},
        "split": {"sizes": 2},
        "chunk": {"chunks": 3},
        "repeat_interleave": {"counts": 2},
        "roll": {"shift": 1},
        "cosine_similarity": {"y": normal(3, 3)},
        "squeeze": {},
    }
    for name in with_axis - {"max", "min", "transpose", "squeeze", "flip", "roll", "glu"}:
        given = [x, x] if name in ("concatenate", "stack") else x
        own = getattr(F, name)(given, axis=1, **others.get(name, {}))
        theirs = getattr(F, name)(given, dim=1, **others.get(name, {}))
        for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (own, theirs)), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
    np.testing.assert_array_equal(x.transpose(dim0=0, dim1=1), x.transpose(0, 1))
    np.testing.assert_array_equal(x.flip(dims=(0,)), x.flip(0))
    np.testing.assert_array_equal(x.roll(shifts=1, dims=0), x.roll(1, 0))
    np.testing.assert_array_equal(x.clamp(min=0, max=1), x.clamp(0, 1))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: x.max(dim=1), "x.argmax"),
        (lambda x: x.sum(axis=1, dim=1), "axis was passed twice"),
        (lambda x: F.softmax(x, dim=1, dtype="float32"), "F.cast"),
        (lambda x: x.sum(dims=1), "unexpected keyword"),
    ],
)
def test_what_is_not_there_says_what_to_do(call, message):
    with pytest.raises(TypeError, match=message):
        call(leaf(normal(3, 3)))


def test_words_that_ask_for_nothing_are_taken():
    x = leaf(normal(3, 3))
    q = x.reshape(1, 1, 3, 3)
    same = F.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=None, dropout_p=0.0)
    np.testing.assert_array_equal(same, F.scaled_dot_product_attention(q, q, q))
    assert F.cross_entropy(input=x, target=[0, 1, 2], label_smoothing=0.0, weight=None).item() > 0


NUMPY = {
    "add": (np.add, F.add, 2),
    "subtract": (np.subtract, F.sub, 2),
    "multiply": (np.multiply, F.mul, 2),
    "divide": (np.divide, F.div, 2),
    "maximum": (np.maximum, F.maximum, 2),
    "matmul": (np.matmul, F.matmul, 2),
    "exp": (np.exp, F.exp, 1),
    "tanh": (np.tanh, F.tanh, 1),
    "negative": (np.negative, F.neg, 1),
    "absolute": (np.abs, F.abs, 1),
}


@pytest.mark.parametrize("name", NUMPY)
def test_a_function_of_numpy_keeps_the_gradient(name):
    theirs, own, arguments = NUMPY[name]
    other = [normal(3, 3, seed=1)] * (arguments - 1)
    grads = []
    for function in (theirs, own):
        x = leaf(normal(3, 3))
        y = function(*other, x)  # an array on the left
        assert isinstance(y, Tensor)
        y.sum().backward()
        grads.append(x.grad)
    np.testing.assert_array_equal(*grads)


def test_a_function_of_numpy_that_would_lose_the_gradient_is_an_error():
    x = leaf(normal(3, 3))
    for call in (np.sinh, np.add.reduce, lambda x: np.exp(x, out=normal(3, 3))):
        with pytest.raises(TypeError, match="would lose the gradient"):
            call(x)
    array = normal(3, 3)
    with pytest.raises(TypeError, match="lose the gradient"):
        array += x
    with pytest.raises(TypeError, match="can't be a tensor"):
        np.add(array, array, out=x)


def test_where_no_gradient_is_followed_arrays_come_back():
    x = leaf(normal(3, 3))
    with no_grad():
        np.testing.assert_array_equal(np.sinh(x), np.sinh(x.data))
    np.testing.assert_array_equal(np.hypot(x.detach(), 1.0), np.hypot(x.data, 1.0))
    assert np.isfinite(x).all() and isinstance(np.isfinite(x), np.ndarray)
    assert (x.data == x).all() and (x.data <= x).all()
