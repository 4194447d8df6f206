"""The functions that a port from PyTorch meets, against differences.

They are the calls of test_positional.py, which holds them to PyTorch. docs/reference/functions.md says what
is where.
"""

import re

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.functional import test_positional as positional
from tests.functional.test_positional import Ours, inputs_of, result_of
from tests.gradcheck import check_direction, check_gradients, contiguous, leaf, normal, sliced
from tests.ranks import ROOT


def case(call):
    """(ours, inputs) of a text."""
    inputs = inputs_of(call)

    def function(*given):
        return result_of(call, Ours(), dict(zip(inputs, given, strict=True)))

    return function, list(inputs.values())


POSITIONS = ("argmax", "argmin", "argsort", "one_hot")  # arrays
ONE_WAY = ("embedding(IDS, X, 1)", "embedding(IDS, X, -3)")  # one row has no gradient
CALLS = {
    call: case(call) for call in positional.CASES if not call.startswith(POSITIONS) and call not in ONE_WAY
}
CALLS_OF_OURS = {  # PyTorch has no function of these
    "swiglu": (F.swiglu, [3 * normal(2, 1, 6)]),
    "global_avg_pool2d": (F.global_avg_pool2d, [normal(2, 3, 4, 5)]),
}
FORMULAS = {
    "bhqd,bhkd->bhqk": [(2, 2, 3, 4), (2, 2, 5, 4)],
    "bqd , bkd": [(2, 3, 4), (2, 5, 4)],
    "...ij,jk->...ik": [(2, 3, 4), (4, 2)],
    "i,j->ij": [(3,), (4,)],
    "bij->b": [(2, 3, 4)],
    "ij->ji": [(2, 3)],
    "bi,ij,bj->b": [(2, 3), (3, 4), (2, 4)],
    "i,i->": [(3,), (3,)],
    "Ab...,A->b...": [(2, 3, 4), (2,)],
}
ALL = CALLS | CALLS_OF_OURS


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layout", [contiguous, sliced])
def test_gradients_are_those_of_differences(name, layout):
    op, arrays = ALL[name]
    check_direction(op, *(leaf(layout(array)) for array in arrays))


@pytest.mark.parametrize("formula", FORMULAS)
def test_einsum(formula):
    arrays = [normal(*shape, seed=i) for i, shape in enumerate(FORMULAS[formula])]
    check_gradients(lambda *x: F.einsum(formula, *x), *map(leaf, arrays))
    got = F.einsum(formula, *arrays).data
    np.testing.assert_allclose(got, np.einsum(formula.replace(" ", ""), *arrays), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ALL)
def test_float32_stays_float32(name):
    op, arrays = ALL[name]
    if not re.search(r"\w_\b", name):  # without numbers in float64
        assert op(*(Tensor(array.astype(np.float32)) for array in arrays)).dtype == np.float32


def test_positions_are_arrays():
    x = Tensor([[3.0, 1.0, 3.0], [0.0, 2.0, 1.0]])
    for array, expected in (
        (x.argmax(), 0),
        (x.argmax(1), [0, 1]),
        (x.argmin(-1), [1, 0]),
        (x.argsort(1, descending=True), [[0, 2, 1], [1, 2, 0]]),
        (x.topk(2)[1], [[0, 2], [1, 2]]),
        (x.sort(0)[1], [[1, 0, 1], [0, 1, 0]]),
        (F.one_hot([[0, 2]]), [[[1, 0, 0], [0, 0, 1]]]),
        (F.one_hot(np.array([1]), 2), [[0, 1]]),
    ):
        assert isinstance(array, np.ndarray) and array.dtype == np.int64 and array.tolist() == expected


def test_where_the_slope_is_not_defined_the_gradient_is_0_as_in_pytorch():
    x = leaf(np.zeros((2, 3)))
    for op in (F.norm, F.std, F.abs, lambda x: F.normalize(x)):
        x.grad = None
        op(x).sum().backward()
        if op in (F.norm, F.std, F.abs):
            assert x.grad.tolist() == [[0.0] * 3] * 2
        assert np.isfinite(x.grad).all()


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda x: F.mse_loss(x, np.ones((2, 1))), ValueError, r"one shape, got \(2, 3\) and \(2, 1\)"),
        (
            lambda x: F.mse_loss(x, x, reduction="avg"),
            ValueError,
            "reduction must be 'mean', 'sum' or 'none'",
        ),
        (lambda x: F.gather(x, 1, [0]), ValueError, "does not fit"),
        (lambda x: F.gather(x, 1, [[3]]), ValueError, r"index\[0, 0\] must be in \[0, 3\), got 3"),
        (lambda x: F.gather(x, 1, [[0.5]]), TypeError, "index must be integers"),
        (lambda x: F.index_add(x, 0, [0], x), ValueError, r"source must be \(1, 3\)"),
        (
            lambda x: F.scatter_add(x, 0, [[0]], np.ones((1, 1), np.float32)),
            TypeError,
            "one dtype, got float64",
        ),
        (
            lambda x: F.masked_scatter(x, x.data == x.data, [1.0]),
            ValueError,
            "must have 6 elements, one for each True of mask, got 1",
        ),
        (lambda x: F.topk(x, 4), ValueError, "k must be 0 to 3"),
        (lambda x: F.one_hot([2], 2), ValueError, r"values\[0\] must be in \[0, 2\), got 2"),
        (lambda x: F.nll_loss(x, [0]), ValueError, "targets must be"),
        (lambda x: F.nll_loss(x, [0, 3]), ValueError, r"targets\[1\] must be in \[0, 3\), got 3"),
        (lambda x: F.pad(x, (1,)), ValueError, "before, after"),
        (lambda x: F.pad(x, (-2, -2)), ValueError, "remove more than"),
        (lambda x: F.pad(x, (3, 0), "reflect"), ValueError, "can't pad axis 1"),
        (lambda x: F.pad(x, (1, 0), "mirror"), ValueError, "mode must be"),
        (lambda x: F.glu(x), ValueError, "even size"),
        (lambda x: F.flatten(x, 1, 0), ValueError, "must not come after the last, got 1 and 0"),
        (lambda x: F.repeat_interleave(x, [1, 2], 1), ValueError, "must have 3 counts, .* got 2"),
        (lambda x: F.group_norm(x, 2), ValueError, "in 2 groups"),
        (lambda x: F.conv1d(x, x), ValueError, "conv1d: x must be"),
        (lambda x: F.adaptive_avg_pool2d(x, 1), ValueError, "multiples of"),
        (lambda x: F.interpolate(x, 2), ValueError, "must be .batch"),
        (lambda x: F.interpolate(x[None, None], 2, 2.0), ValueError, "either size or scale_factor"),
        (lambda x: F.einsum("ij,jk->ik", x), ValueError, r"names 2 operand\(s\), got 1"),
        (
            lambda x: F.einsum("ij,jk->ik", x, x),
            ValueError,
            "index 'j' of 'ij,jk->ik' has size 3 in one operand and 2 in another",
        ),
        (lambda x: F.einsum("ii->i", x[:, :2]), ValueError, "repeats a letter"),
        (lambda x: F.einsum("ijk->i", x), ValueError, "must name all .* dimensions of shape"),
        (lambda x: F.einsum("ij->k", x), ValueError, "must be a formula"),
        (lambda x: F.cat, AttributeError, r"use F\.concatenate"),
        (lambda x: F.zeros, AttributeError, "use NumPy's"),
        (lambda x: F.no_such, AttributeError, "has no 'no_such'$"),
        (lambda x: x.cuda(), AttributeError, "on the device that init_device_mesh names"),
        (lambda x: x.no_such, AttributeError, "no attribute 'no_such'$"),
    ],
)
def test_what_does_not_fit_is_a_sentence(call, error, text):
    with pytest.raises(error, match=text):
        call(leaf(normal(2, 3)))


def test_the_page_of_functions_names_what_is_there():
    named = set(re.findall(r"`F\.(\w+)`", (ROOT / "docs" / "reference" / "functions.md").read_text()))
    assert len(named) > 60 and named <= set(F.__all__)
