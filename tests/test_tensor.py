"""tensor.py: construction, interchange, operators, and what may be changed in place."""

import numpy as np
import pytest

from shardrt import Tensor, nn, no_grad
from shardrt import functional as F
from tests import lab
from tests.gradcheck import check_gradients, leaf, normal


@pytest.mark.parametrize(
    "data, dtype",
    [
        ([1.0, 2.0], np.float32),
        (3.5, np.float32),
        ([1, 2], np.int64),
        ([True], np.bool_),
        (np.ones(2, np.float32), np.float32),
        (np.ones(2), np.float64),
        (np.ones(2, np.float16), np.float32),
        (np.float64(2), np.float64),
        (np.ones(2, np.int32), np.int32),
    ],
    ids=str,
)
def test_floats_become_float32_unless_they_are_a_float64_array(data, dtype):
    assert Tensor(data).dtype == dtype
    assert Tensor(data, dtype=np.float64).dtype == np.float64


test_what_is_no_tensor_is_refused = lab.refusals(
    (lambda: Tensor([1, 2], requires_grad=True), TypeError, "only floats can require a gradient, got int64"),
    (lambda: Tensor(["a"]), TypeError, "must be numbers"),
    (lambda: Tensor([None]), TypeError, "must be numbers"),
    (lambda: Tensor(np.array([1j])), TypeError, "must be numbers"),
    (lambda: Tensor(Tensor([1.0])), TypeError, "detach"),
)


def test_an_array_is_not_copied():
    array = np.ones((2, 3), np.float32)
    assert Tensor(array).data is array
    assert Tensor(array).numpy() is array
    assert np.asarray(Tensor(array)) is array
    assert np.array(Tensor(array)) is not array


def test_shape_size_and_numbers():
    x = Tensor(normal(2, 3))
    assert (x.shape, x.ndim, x.size, len(x), x.T.shape) == ((2, 3), 2, 6, 2, (3, 2))
    assert [row.shape for row in x] == [(3,), (3,)]
    one = Tensor([2.5])
    assert (one.item(), float(one), int(one), bool(one)) == (2.5, 2.5, 2, True)
    assert f"{one:.3f} {one.sum():6.1f}" == "2.500    2.5" and f"{one}" == repr(one)
    with pytest.raises(ValueError):
        x.item()
    with pytest.raises(ValueError, match="ambiguous"):
        bool(x)


def test_numpy_and_dlpack_see_the_same_memory():
    x = Tensor(normal(2, 3))
    assert np.shares_memory(np.from_dlpack(x), x.data)
    assert np.exp(x).shape == (2, 3) and isinstance(np.hypot(x, x), np.ndarray)
    assert np.asarray(x, np.float32).dtype == np.float32


@pytest.mark.torch
def test_torch_sees_the_same_memory():
    torch = pytest.importorskip("torch")
    x = Tensor(normal(2, 3))
    theirs = torch.from_dlpack(x)
    theirs[0, 0] = 7
    assert x[0, 0].item() == 7
    assert np.shares_memory(Tensor(np.from_dlpack(theirs)).data, x.data)


def test_repr_shows_values_dtype_and_gradient():
    assert repr(Tensor([1.0, 2.0])) == "Tensor([1., 2.], dtype=float32)"
    assert repr(leaf(3.0)) == "Tensor(3., dtype=float64, requires_grad=True)"
    assert len(repr(Tensor(np.zeros((1000, 1000))))) < 500


def test_comparisons_give_arrays_and_tensors_have_a_hash():
    x, y = Tensor([1.0, 2.0]), Tensor([1.0, 3.0])
    for result, expected in (
        (x == y, [True, False]),
        (x != y, [False, True]),
        (x < y, [False, True]),
        (x <= 1, [True, False]),
        (x > np.zeros(2), [True, True]),
        (x >= y, [True, False]),
        (np.zeros(2) < x, [True, True]),
    ):
        assert isinstance(result, np.ndarray) and result.tolist() == expected
    assert len({x, y, x}) == 2


OPERATORS = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "@": lambda x, y: x @ y,
}


@pytest.mark.parametrize("sign", OPERATORS)
def test_operators_take_tensors_arrays_and_numbers_on_both_sides(sign):
    operator = OPERATORS[sign]
    a, b = normal(3, 3), normal(3, 3, seed=1) + 3
    others = [Tensor(b), b] + ([] if sign == "@" else [2, 2.5, np.float64(2.5)])
    for other in others:
        raw = other.data if isinstance(other, Tensor) else other
        for result, expected in (
            (operator(leaf(a), other), operator(a, raw)),
            (operator(other, leaf(a)), operator(raw, a)),
        ):
            assert isinstance(result, Tensor) and result.requires_grad
            np.testing.assert_allclose(result.data, expected, rtol=1e-14)


METHODS = {
    "exp": (),
    "log": (),
    "sqrt": (),
    "tanh": (),
    "softmax": (0,),
    "log_softmax": (0,),
    "sum": (1, True),
    "mean": (0,),
    "max": (1,),
    "reshape": ((3, 2),),
    "transpose": (0, 1),
    "permute": ((1, 0),),
    "expand": ((4, 2, 3),),
    "squeeze": (),
    "unsqueeze": (1,),
    "split": ([1, 1],),
    "chunk": (2,),
}


@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_the_function_of_its_name(name):
    values = np.abs(normal(2, 3)) + 1
    actual, expected = (
        getattr(leaf(values), name)(*METHODS[name]),
        getattr(F, name)(leaf(values), *METHODS[name]),
    )
    for one, other in zip(np.atleast_1d(actual), np.atleast_1d(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_sizes_may_be_given_one_by_one_or_as_one_tuple():
    x = leaf(normal(2, 3))
    assert x.reshape(3, 2).shape == x.reshape((3, 2)).shape == x.view(3, -1).shape == (3, 2)
    assert x.permute(1, 0).shape == x.permute([1, 0]).shape == (3, 2)
    assert x.expand(4, -1, 3).shape == (4, 2, 3)


def test_backward_takes_a_gradient_as_list_array_or_tensor():
    for gradient in ([1.0, 2.0], np.array([1.0, 2.0]), Tensor([1.0, 2.0])):
        x = leaf(normal(2))
        (x * 3).backward(gradient)
        assert x.grad.tolist() == [3, 6]


def test_detach_shares_the_array_and_forgets_the_past():
    x = leaf(normal(2)) * 2
    y = x.detach()
    assert y.data is x.data and y.is_leaf and not y.requires_grad


def in_place(sign, x, y):
    if sign == "+":
        x += y
    elif sign == "-":
        x -= y
    elif sign == "*":
        x *= y
    else:
        x /= y
    return x


@pytest.mark.parametrize("sign", "+-*/")
def test_assignment_with_an_operator_leaves_the_old_values_to_backward(sign):
    values = normal(3)
    weight, x = leaf(np.ones(3)), Tensor(values.copy())
    y = weight * x
    old = x.data
    x = in_place(sign, x, Tensor(values + 3))
    np.testing.assert_array_equal(x.data, OPERATORS[sign](values, values + 3))
    with no_grad():
        x = in_place(sign, x, 2.0)
    y.sum().backward()
    np.testing.assert_array_equal(old, values)
    np.testing.assert_array_equal(weight.grad, values)


@pytest.mark.parametrize("sign", "+-*/")
def test_assignment_with_an_operator_is_recorded(sign):
    x, y = leaf(normal(3)), leaf(normal(3, seed=1) + 4)
    check_gradients(lambda x, y: in_place(sign, x * 1, y), x, y)
    check_gradients(lambda y: in_place(sign, Tensor(x.data), y), y)


@pytest.mark.parametrize("sign", "+-*/")
def test_a_leaf_that_is_trained_is_changed_under_no_grad_alone_and_then_in_place(sign):
    values = normal(3)
    for x in (
        leaf(values.copy()),
        nn.Parameter((3,), nn.init.Zeros(), requires_grad=False, dtype=np.float64),
    ):
        x.data = values.copy()
        with pytest.raises(RuntimeError, match=rf"use x = x \{sign} y"):
            in_place(sign, x, 2.0)
        array = x.data
        with no_grad():
            assert in_place(sign, x, np.full(3, 2, np.float32)) is x and x.data is array
        np.testing.assert_array_equal(array, OPERATORS[sign](values, 2))
    single = nn.Parameter((3,), nn.init.Zeros())
    with no_grad(), pytest.raises(TypeError, match="same_kind"):
        single += 1j


def test_a_result_is_not_cut_off_from_its_past_by_assignment():
    y = leaf(np.ones(3)) * 2
    with no_grad(), pytest.raises(RuntimeError, match="detach x"):
        y += 1
