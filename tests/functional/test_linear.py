"""functional/linear.py: gradients against differences; where the weight's gradient goes."""

from itertools import pairwise

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, nn
from shardrt import functional as F
from shardrt.activation_offload import offload_activations
from shardrt.autograd import WRITTEN
from shardrt.kernels import onednn
from shardrt.kernels.cpu import _choice, linear, matmul
from shardrt.recompute import checkpoint
from tests import lab
from tests.gradcheck import LAYOUTS, check_gradients, contiguous, leaf, normal

SHAPES = [(3, 5, 2), (1, 1, 1), (7, 1, 3), (2, 9, 1)]  # rows, inputs, outputs


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(sizes, layout):
    rows, inputs, outputs = sizes
    x, weight, bias = normal(rows, inputs), normal(outputs, inputs, seed=1), normal(outputs)
    check_gradients(F.linear, leaf(layout(x)), leaf(contiguous(weight)), leaf(bias))
    check_gradients(F.linear, leaf(contiguous(x)), leaf(layout(weight)), leaf(layout(bias)))


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_gelu_in_one_op_is_linear_and_gelu_to_the_bit(sizes):
    rows, inputs, outputs = sizes
    x, weight, bias = normal(rows, inputs), normal(outputs, inputs, seed=1), normal(outputs)
    for given in ((x, weight, bias), (x, weight)):
        check_gradients(F.linear_gelu, *map(leaf, given))
        together, apart = [leaf(a) for a in given], [leaf(a) for a in given]
        y = F.linear_gelu(*together)
        other = F.gelu(F.linear(*apart), approximate="tanh")
        np.testing.assert_allclose(y.data, other.data, rtol=1e-14, atol=1e-15)
        y.backward(normal(rows, outputs, seed=2))
        other.backward(normal(rows, outputs, seed=2))
        for one, two in zip(together, apart, strict=True):
            np.testing.assert_allclose(one.grad, two.grad, rtol=1e-13, atol=1e-14)


def test_gelu_in_one_op_adds_to_gradients():
    inputs = leaf(normal(3, 4)), leaf(normal(4, 4)), leaf(normal(4))
    check_gradients(lambda x, w, b: F.linear_gelu(F.linear_gelu(x, w, b), w, b), *inputs)


# -- GELU's backward in the product that makes its gradient


@pytest.fixture
def fused(monkeypatch):
    """How often it was; the CPU has no such product, so here is one."""
    used = []

    def backward_input_gelu(dy, weight, inner, dinner):
        linear.backward_input(dy, weight, dinner)
        linear.backward_gelu(dinner.copy(), inner, dinner, None, False)
        used.append(1)
        return True

    monkeypatch.setattr(linear, "backward_input_gelu", backward_input_gelu)
    return used


def mlp(x, up, bias, down, more):
    return F.linear(F.linear_gelu(x, up, bias), down, more)


SIZES = (3, 4), (5, 4), (5,), (2, 5), (2,)  # x, up, its bias, down, its bias


def wanting(*wanted):
    """The inputs of mlp, of which some want a gradient."""
    return [Tensor(normal(*s, seed=i), requires_grad=i in wanted) for i, s in enumerate(SIZES)]


@pytest.mark.parametrize("wanted", [(0, 1, 2, 3, 4), (0,), (1,), (2,), (1, 2), (0, 2, 3), (3, 4)], ids=str)
def test_gradients_through_gelu_in_one_product(fused, wanted):
    check_gradients(mlp, *wanting(*wanted))
    assert bool(fused) == bool({0, 1, 2} & set(wanted))


def test_gradients_through_two_gelus(fused):
    def twice(x, weight, bias, out):
        return F.linear(F.linear_gelu(F.linear_gelu(x, weight, bias), weight, bias), out)

    check_gradients(twice, leaf(normal(3, 4)), leaf(normal(4, 4)), leaf(normal(4)), leaf(normal(2, 4)))
    assert len(fused) == 2


def hidden_twice(x, up, bias, down, more):
    hidden = F.linear_gelu(x, up, bias)
    return F.linear(hidden, down, more).sum() + (hidden * hidden).sum()


def hidden_before(x, up, bias, down, more):
    hidden = F.linear_gelu(x, up, bias)
    other = (hidden * hidden).sum()
    return F.linear(hidden, down, more).sum() + other


def hidden_in_two_products(x, up, bias, down, more):
    hidden = F.linear_gelu(x, up, bias)
    return F.linear(hidden, down, more) * F.linear(hidden, down)


def hidden_as_weight(x, up, bias, down, more):
    hidden = F.linear_gelu(x, up, bias)
    return F.linear(hidden, hidden)


def hidden_cut(x, up, bias, down, more):
    return F.linear(F.linear_gelu(x, up, bias)[1:], down, more)


@pytest.mark.parametrize(
    "use", [hidden_twice, hidden_before, hidden_in_two_products, hidden_as_weight, hidden_cut]
)
def test_what_is_used_elsewhere_too_gets_the_sum_of_its_gradients(fused, use):
    check_gradients(use, *wanting(0, 1, 2, 3, 4))
    assert not fused


def test_a_gradient_that_somebody_looks_at_is_that_of_the_result(fused):
    inputs, seen = wanting(0, 1, 2, 3, 4), []
    hidden = F.linear_gelu(*inputs[:3])
    hidden.register_hook(lambda gradient: seen.append(gradient.copy()))
    hidden.retain_grad()
    F.linear(hidden, *inputs[3:]).backward(normal(3, 2))
    for gradient in (*seen, hidden.grad):
        np.testing.assert_allclose(gradient, normal(3, 2) @ inputs[3].data, rtol=1e-13)
    assert not fused


def test_backward_through_gelu_can_run_again(fused):
    inputs = wanting(0, 1, 2, 3, 4)
    hidden = F.linear_gelu(*inputs[:3])
    y = F.linear(hidden, *inputs[3:])
    y.backward(normal(3, 2), retain_graph=True)
    first = [x.grad.copy() for x in inputs]
    y.backward(normal(3, 2), retain_graph=True)
    for x, gradient in zip(inputs, first, strict=True):
        np.testing.assert_allclose(x.grad, 2 * gradient, rtol=1e-13)
    inputs[0].grad = None
    hidden.backward(normal(3, 5))  # a gradient that has not gone through it
    np.testing.assert_allclose(
        inputs[0].grad, normal(3, 5) * slope(inputs[:3]) @ inputs[1].data, rtol=1e-8, atol=1e-9
    )


def slope(given):
    """Of GELU at what linear gives, by central differences."""
    inner = F.linear(*given).data
    low, high = (F.gelu(Tensor(inner + h), approximate="tanh").data for h in (-1e-6, 1e-6))
    return (high - low) / 2e-6


@pytest.mark.parametrize("policy", ["full", "matmul"])
def test_gradients_through_gelu_of_what_is_recomputed_or_was_offloaded(fused, policy):
    """The same bits as of a module whose arrays stay."""

    def gradients(*prepare):
        shardrt.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16, gelu=True), nn.Linear(16, 4))
        for each in prepare:
            each(model)
        (model(Tensor(normal(3, 4).astype(np.float32))) ** 2).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    for prepare in (
        [lambda model: checkpoint(model, policy)],
        [offload_activations],
        [lambda model: checkpoint(model, policy), offload_activations],
        [lambda model: checkpoint(model[0], policy)],
        [lambda model: offload_activations(model[0])],
    ):
        for one, other in zip(gradients(*prepare), expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert len(fused) == 4, "not where only the first of both layers is recomputed, or offloaded"


def twice(x, w, b=None):
    return F.linear(F.linear(x, w, b), w, b)


USES = {  # the layer, and shapes of what it gets
    "weight and bias are results of ops": (
        lambda x, w, b: F.linear(x, (w * 2).T, b[1:] * 3),
        *((3, 5), (5, 2), (3,)),
    ),
    "a weight used twice": (twice, (3, 4), (4, 4), (4,)),
    "a result used twice as weight": (lambda x, w: twice(x, w * w), (3, 4), (4, 4)),
    "one tensor as input and weight": (lambda w: F.linear(w, w), (3, 4)),
    "a weight in other ops too": (lambda x, w: F.linear(x, w) * (w * w).sum(), (3, 4), (2, 4)),
}


@pytest.mark.parametrize("use", USES)
def test_gradients_of_what_is_used(use):
    function, *shapes = USES[use]
    check_gradients(function, *(leaf(normal(*shape)) for shape in shapes))


def test_gradients_add_up_over_backwards():
    x, weight, bias = normal(3, 4), leaf(normal(2, 4)), leaf(normal(2))
    F.linear(x, weight, bias).sum().backward()
    first = weight.grad.copy(), bias.grad.copy()
    F.linear(x, weight, bias).sum().backward()
    np.testing.assert_allclose(weight.grad, 2 * first[0], rtol=1e-14)
    np.testing.assert_allclose(bias.grad, 2 * first[1], rtol=1e-14)


def test_a_weights_gradient_is_written_where_it_belongs():
    """No array of its size is made: backward gives the token, and `grad` is what was there before."""
    weight = leaf(normal(2, 4))
    y = F.linear(normal(3, 4), weight)
    assert y.node.backward(np.ones((3, 2))) == (None, WRITTEN, None)
    before = weight.grad
    F.linear(normal(3, 4), weight).sum().backward()
    assert weight.grad is before


@pytest.mark.parametrize("trained", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)], ids=str)
def test_gradients_that_nobody_wants_are_not_made(trained):
    arrays = normal(3, 4), normal(2, 4), normal(2)
    inputs = [Tensor(a, requires_grad=bool(t)) for a, t in zip(arrays, trained, strict=True)]
    check_gradients(F.linear, *inputs)
    assert [x.grad is not None for x in inputs] == [bool(t) for t in trained]


def test_a_frozen_weight_saves_no_input():
    y = F.linear(leaf(normal(3, 4)), Tensor(normal(2, 4)))
    assert y.node.saved[0] is None


test_what_does_not_fit_is_an_error = lab.refusals(
    (
        lambda: F.linear(normal(3, 5), normal(2, 4)),
        r"x must be \(\.\.\., 4\) for weight \(2, 4\), got \(3, 5\)",
    ),
    (lambda: F.linear(normal(3, 4), normal(4)), "weight must be"),
    (lambda: F.linear(normal(3, 4), normal(2, 4), normal(4)), r"bias must be \(2,\)"),
    (lambda: F.linear(normal(), normal(2, 4)), "x must be"),
    (lambda: F.linear(normal(3, 4).astype("f4"), normal(2, 4)), TypeError, "x float32, weight float64"),
    (lambda: F.linear_gelu(normal(3, 4), normal(4)), "linear_gelu: weight must be"),
)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("way", ["blas", "onednn"])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("rows, inputs, outputs", [(64, 96, 5003), (33, 65, 4097), (200, 64, 9001)])
def test_rows_of_a_weights_gradient_have_the_bits_of_the_whole(
    rows, inputs, outputs, low, way, accumulate, monkeypatch
):
    """Whoever computes it; outputs are more than a block."""
    if way == "onednn" and (onednn.library() is None or (low and not onednn.computes_bf16())):
        pytest.skip("no oneDNN, or none for bfloat16 on this processor")
    monkeypatch.setattr(_choice, "choose", lambda *_: way)
    monkeypatch.setattr(_choice, "LEAST", 0)
    x, dy = (normal(rows, count, seed=count).astype(np.float32) for count in (inputs, outputs))
    if low:
        x, dy = ((array.view(np.uint32) >> 16).astype(np.uint16) for array in (x, dy))
    before = normal(outputs, inputs, seed=3).astype(np.float32)
    whole = before.copy()
    linear.backward_weight(x, dy, whole, accumulate)
    made, places = before.copy(), [0, 16, 33, 700, outputs - 300, outputs]
    for first, stop in pairwise(places):
        linear.backward_weight(x, dy, made[first:stop], accumulate, first)
    np.testing.assert_array_equal(made, whole)


def test_a_library_whose_sums_depend_on_place_is_found_and_named(monkeypatch):
    """NumPy's OpenBLAS packs operands; another library may go by alignment, as MKL does."""
    assert matmul.ignores_place()
    real = matmul._by_blas

    def by_alignment(a, b, bias, out, accumulate):
        real(a, b, bias, out, accumulate)
        if b.__array_interface__["data"][0] % 16:
            out[-1, -1] = np.nextafter(out[-1, -1], np.float32(np.inf))

    monkeypatch.setattr(matmul, "_by_blas", by_alignment)
    with pytest.warns(UserWarning, match="sums in another order at other memory alignments"):
        assert not matmul.ignores_place.__wrapped__()
