"""functional/cast.py: values and gradients as PyTorch's casts give them, in float32 arrays."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.gradcheck import check_gradients, leaf, normal

LOW = ["bfloat16", "float16"]


def test_float64_to_float32_and_back_is_a_real_conversion():
    x = leaf(normal(3, 5))
    y = F.cast(x, "float32")
    assert y.dtype == np.float32 and np.array_equal(y.data, x.data.astype(np.float32))
    y.backward(np.full((3, 5), 0.1, np.float32))
    assert x.grad.dtype == np.float64 and (x.grad == np.float32(0.1)).all()
    check_gradients(lambda x: F.cast(x, "float64") * 2.0, leaf(normal(4)))


def test_a_float32_tensor_as_float64_gets_a_float32_gradient():
    x = Tensor(np.ones(4, np.float32), requires_grad=True)
    F.cast(x, "float64").backward(np.full(4, 0.1))
    assert x.grad.dtype == np.float32 and (x.grad == np.float32(0.1)).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_dtype_it_has_already_gives_the_tensor_itself(dtype):
    x = Tensor(np.ones(3, dtype))
    assert F.cast(x, dtype) is x


@pytest.mark.parametrize("kind", LOW)
@pytest.mark.parametrize("start", ["float32", "float64"])
def test_low_precision_rounds_values_and_gradient_as_pytorch(kind, start):
    torch = pytest.importorskip("torch")
    values, dy = normal(7, 33).astype(start) * 300, normal(7, 33, seed=1).astype(np.float32)
    x = Tensor(values, requires_grad=True)
    y = F.cast(x, kind)
    theirs = torch.tensor(values, requires_grad=True)
    expected = theirs.to(getattr(torch, kind))
    assert y.dtype == np.float32
    assert np.array_equal(y.data, expected.detach().float().numpy())
    y.backward(dy)
    expected.backward(torch.tensor(dy).to(getattr(torch, kind)))
    assert x.grad.dtype == values.dtype
    assert np.array_equal(x.grad, theirs.grad.numpy())


@pytest.mark.parametrize("kind", LOW)
def test_the_gradient_is_rounded_even_where_it_overflows(kind):
    x = Tensor(np.ones(3, np.float32), requires_grad=True)
    F.cast(x, kind).backward(np.array([1e5, -1e-9, 1 + 2**-12], np.float32))
    expected = {"float16": [np.inf, 0, 1], "bfloat16": [99840, -1e-9, 1]}[kind]
    np.testing.assert_allclose(x.grad, expected, rtol=2**-8)
    assert x.grad[2] == 1


@pytest.mark.parametrize("kind", LOW)
def test_strided_input_and_numbers_are_cast(kind):
    x = normal(4, 6).astype(np.float32)
    assert np.array_equal(F.cast(Tensor(x.T), kind).data, F.cast(Tensor(x), kind).data.T)
    assert F.cast(Tensor(3), kind).item() == 3


def test_the_input_is_left_as_it_is():
    x = Tensor(np.full(3, 0.1, np.float32))
    F.cast(x, "bfloat16")
    assert (x.data == np.float32(0.1)).all()


def test_a_dtype_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match="dtype.*'float8'.*'bfloat16'"):
        F.cast(Tensor(1.0), "float8")
