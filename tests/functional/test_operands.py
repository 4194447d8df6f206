"""Every operator with every kind of operand, on both sides: values, dtypes and gradients.

What is tried is a table: operators x operands x sides x shapes x dtypes; the dtypes are PyTorch's.
"""

import operator
from itertools import product

import numpy as np
import pytest

from shardrt import Tensor, no_grad
from shardrt import functional as F
from tests.combinations import noting
from tests.gradcheck import check_gradients, leaf, normal

OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "**": operator.pow,
}
FUNCTIONS = {
    "maximum": (F.maximum, np.maximum),
    "minimum": (F.minimum, np.minimum),
    "where": (
        lambda x, y: F.where(np.array([True, False, True]), x, y),
        lambda x, y: np.where([True, False, True], x, y),
    ),
}
OPS = {sign: (op, op) for sign, op in OPERATORS.items()} | FUNCTIONS
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
NUMBERS = {
    "int": 2,
    "float": 2.5,
    "bool": True,
    "np.int64": np.int64(2),
    "np.uint8": np.uint8(2),
    "np.float32": np.float32(2.5),
    "np.float64": np.float64(2.5),
    "np.bool": np.True_,
    "0-d int array": np.array(2),
    "0-d float32 array": np.array(2.5, np.float32),
    "0-d float64 array": np.array(2.5),
    "0-d bool array": np.array(True),
}
ZERO_D = {
    "0-d float32 tensor": lambda: Tensor(np.array(2.5, np.float32), requires_grad=True),
    "0-d float64 tensor": lambda: Tensor(np.array(2.5), requires_grad=True),
    "0-d int tensor": lambda: Tensor(np.array(2)),
}


def positive(shape, dtype):
    return (np.abs(normal(*shape)) + 0.5).astype(dtype)


def sides(op, x, y):
    return ((op(x, y), (x, y)), (op(y, x), (y, x)))


def raw(x):
    return x.data.astype(np.float64) if isinstance(x, Tensor) else np.float64(x)


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("name", OPS)
def test_a_number_leaves_the_dtype_of_a_float_tensor(name, kind):
    for case in product([(), (3,), (2, 3)], [np.float32, np.float64]):
        with noting(*case):
            assert_it_leaves_the_dtype(name, kind, *case)


def assert_it_leaves_the_dtype(name, kind, shape, dtype):
    op, numpy = OPS[name]
    x, number = Tensor(positive(shape, dtype), requires_grad=True), NUMBERS[kind]
    for result, (first, second) in sides(op, x, number):
        assert isinstance(result, Tensor) and result.requires_grad and result.dtype == dtype
        np.testing.assert_allclose(result.data, numpy(raw(first), raw(second)), rtol=1e-5)
        x.grad = None
        result.sum().backward()
        assert x.grad.dtype == dtype and x.grad.shape == shape
    if dtype == np.float64 and kind in ("float", "0-d float64 array"):
        check_gradients(lambda x: op(x, number), x)
        check_gradients(lambda x: op(number, x), x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ZERO_D)
@pytest.mark.parametrize("name", OPS)
def test_a_tensor_without_dimensions_takes_the_dtype_of_one_with_some(name, kind, dtype):
    op, numpy = OPS[name]
    x, other = Tensor(positive((2, 3), dtype), requires_grad=True), ZERO_D[kind]()
    for result, (first, second) in sides(op, x, other):
        assert result.dtype == dtype and result.shape == (2, 3)
        np.testing.assert_allclose(result.data, numpy(raw(first), raw(second)), rtol=1e-5)
        x.grad = other.grad = None
        result.sum().backward()
        assert x.grad.dtype == dtype
        assert other.grad is None or other.grad.dtype == other.dtype
    if dtype == np.float64 and kind == "0-d float64 tensor":
        check_gradients(op, x, other)
        check_gradients(op, other, x)


def test_two_float_tensors_without_dimensions_do_not_mix_as_others_do_not():
    with pytest.raises(TypeError, match="add: float32 with float64"):
        Tensor(np.array(1.0, np.float32)) + Tensor(np.array(1.0))


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("name", ["+", "-", "*", "/", "maximum"])
def test_integers_stay_integers_until_a_float_comes(name, kind):
    for dtype in (np.int32, np.int64):
        with noting(dtype):
            assert_they_stay_integers(name, kind, dtype)


def assert_they_stay_integers(name, kind, dtype):
    op, numpy = OPS[name]
    x, number = Tensor(np.array([1, 2, 3], dtype)), NUMBERS[kind]
    expected = np.float32 if name == "/" or np.asarray(number).dtype.kind == "f" else dtype
    for result, (first, second) in sides(op, x, number):
        assert result.dtype == expected
        np.testing.assert_allclose(result.data, numpy(raw(first), raw(second)), rtol=1e-6)


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("compare", COMPARISONS, ids=lambda op: op.__name__)
def test_comparisons_with_numbers_give_arrays_on_both_sides(compare, kind):
    values, number = np.array([1.0, 2.0, 2.5], np.float32), NUMBERS[kind]
    for result, expected in (
        (compare(Tensor(values), number), compare(values, number)),
        (compare(number, Tensor(values)), compare(number, values)),
    ):
        assert isinstance(result, np.ndarray) and result.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("sign", ["+", "-", "*", "/"])
def test_assignment_with_numbers_keeps_the_dtype(sign, kind):
    op = {"+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv}[sign]
    for shape in ((), (3,)):
        x = Tensor(np.full(shape, 3, np.float32), requires_grad=True)
        y = op(x * 1, NUMBERS[kind])
        assert y.dtype == np.float32 and y.requires_grad
        array = x.data
        with no_grad():
            assert op(x, NUMBERS[kind]) is x and x.data is array
        np.testing.assert_allclose(x.data, y.data)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
def test_losses_are_added_up_by_sum(shape):
    x = leaf(normal(*shape))
    check_gradients(lambda x: sum([x, x * x]), x)
    total = 0
    for loss in (x.sum(), (x * 2).sum(), np.float32(1)):
        total = total + loss
    assert isinstance(total, Tensor) and total.shape == ()
    np.testing.assert_allclose(total.item(), 3 * x.data.sum() + 1)


@pytest.mark.parametrize("sign", OPERATORS)
@pytest.mark.parametrize("other", [None, "2", 1j, object()], ids=["None", "text", "complex", "object"])
def test_what_is_no_number_is_a_type_error_on_both_sides(sign, other):
    for call in (lambda: OPERATORS[sign](leaf([1.0]), other), lambda: OPERATORS[sign](other, leaf([1.0]))):
        with pytest.raises(TypeError, match="data must be numbers"):
            call()


@pytest.mark.torch
def test_dtypes_are_those_of_pytorch():
    torch = pytest.importorskip("torch")
    for sign in ("+", "*", "/"):
        for dtype in (np.float32, np.float64, np.int64):
            for number in (2, 2.5, True, np.array(2.5), np.array(2.5, np.float32), np.array(2)):
                values, no_array = np.array([1, 2, 3], dtype), not isinstance(number, np.ndarray)
                theirs = number if no_array else torch.from_numpy(number)
                expected = OPERATORS[sign](torch.from_numpy(values), theirs).numpy().dtype
                got = OPERATORS[sign](Tensor(values), number if no_array else Tensor(number)).dtype
                assert got == expected, (sign, dtype, number)
