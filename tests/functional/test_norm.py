"""functional/norm.py: norms of sums; parameters that are used twice, or not trained."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests.gradcheck import check_gradients, leaf, normal


def layer_norm(x, weight, bias=None, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x, weight, eps=1e-6):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def parameters(width):
    return normal(width, seed=1) + 1, normal(width, seed=2)


NORMS = {
    "layer": (F.add_layer_norm, layer_norm),
    "layer, no bias": (lambda x, a, w, b: F.add_layer_norm(x, a, w), lambda x, w, b: layer_norm(x, w)),
    "rms": (lambda x, a, w, b: F.add_rms_norm(x, a, w), lambda x, w, b: rms_norm(x, w)),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("used", ["both", "sum", "norm"])
def test_the_norm_of_a_sum_is_a_sum_and_a_norm(norm, used):
    together, apart = NORMS[norm]
    arrays = normal(67, 9), normal(67, 9, seed=3), *parameters(9)

    def of(function, *inputs):
        total, y = function(*inputs)
        return {"both": total * 2 + y, "sum": total * 2, "norm": y}[used]

    ours, theirs = [leaf(a) for a in arrays], [leaf(a) for a in arrays]
    found = of(together, *ours)
    expected = of(lambda x, a, w, b: (x + a, apart(x + a, w, b)), *theirs)
    np.testing.assert_allclose(found.data, expected.data, rtol=1e-14, atol=1e-14)
    dy = normal(67, 9, seed=5)
    found.backward(dy)
    expected.backward(dy)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            np.testing.assert_allclose(one.grad, other.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_of_the_norm_of_a_sum(norm):
    def function(x, added, weight, bias):
        total, y = NORMS[norm][0](x, added, weight, bias)
        return total * y + (bias * 0).sum()

    weight, bias = parameters(5)
    check_gradients(function, *map(leaf, (normal(3, 5), normal(3, 5, seed=4), weight, bias)))
    x = leaf(normal(3, 5))
    check_gradients(lambda x, w, b: function(x, x, w, b), x, leaf(weight), leaf(bias))
    frozen = [Tensor(a) for a in (normal(3, 5), weight, bias)]
    check_gradients(lambda added: function(frozen[0], added, *frozen[1:]), leaf(normal(3, 5, seed=4)))


def test_sums_of_other_shapes_are_an_error():
    with pytest.raises(
        ValueError, match=r"add_rms_norm: x and added must have one shape, got \(3, 5\) and \(5,"
    ):
        F.add_rms_norm(normal(3, 5), normal(5), normal(5))
    with pytest.raises(TypeError, match="add_layer_norm: .*x float64, added float32"):
        F.add_layer_norm(normal(3, 5), normal(3, 5).astype(np.float32), normal(5))


def test_parameters_used_twice_get_both_gradients():
    weight, bias = parameters(5)
    check_gradients(
        lambda x, w, b: layer_norm(layer_norm(x, w, b) * 2, w, b),
        leaf(normal(3, 5)),
        leaf(weight),
        leaf(bias),
    )
    check_gradients(lambda x, w: rms_norm(rms_norm(x, w) * x, w), leaf(normal(3, 5)), leaf(weight))


def test_one_parameter_used_twice_and_the_other_once():
    """One gradient is there already when the kernel writes both: it must add to one and not to the other."""
    weight, bias = parameters(5)
    for first in (lambda x, w, b: layer_norm(x, w), lambda x, w, b: layer_norm(x, x[0] * 0 + 1, b)):
        check_gradients(
            lambda x, w, b: layer_norm(first(x, w, b) * 2, w, b),  # noqa: B023
            leaf(normal(3, 5)),
            leaf(weight),
            leaf(bias),
        )


def test_one_tensor_as_weight_and_bias():
    check_gradients(lambda x, w: layer_norm(x, w, w), leaf(normal(3, 5)), leaf(normal(5)))


def test_parameters_may_be_results_of_ops():
    weight, bias = parameters(10)
    check_gradients(
        lambda x, w, b: layer_norm(x, w[::2] * 2, b[::2]), leaf(normal(3, 5)), leaf(weight), leaf(bias)
    )
    check_gradients(lambda x, w: rms_norm(x, w[::2]), leaf(normal(3, 5)), leaf(weight))


@pytest.mark.parametrize(
    "trained", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1)], ids=str
)
def test_gradients_that_nobody_wants_are_not_made(trained):
    arrays = normal(3, 5), *parameters(5)
    inputs = [Tensor(a, requires_grad=bool(t)) for a, t in zip(arrays, trained, strict=True)]
    check_gradients(layer_norm, *inputs)
    assert [x.grad is not None for x in inputs] == [bool(t) for t in trained]
    if any(trained[:2]):
        check_gradients(rms_norm, *inputs[:2])


def test_a_constant_row_is_no_trouble():
    y = F.layer_norm(np.full((2, 8), 3.0, np.float32), 8, np.ones(8, np.float32))
    assert (y.data == 0).all()


@pytest.mark.parametrize("op", [layer_norm, rms_norm])
def test_sizes_that_do_not_fit_are_an_error(op):
    with pytest.raises(ValueError, match=r"weight must be \(5,\) for x \(3, 5\), got \(4,\)"):
        op(normal(3, 5), normal(4))
    with pytest.raises(ValueError, match="normalized_shape must be the last sizes of x, got"):
        op(Tensor(1.0), normal(1))
    with pytest.raises(TypeError, match="x float64, weight float32"):
        op(normal(3, 5), np.ones(5, np.float32))
