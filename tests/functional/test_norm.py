"""functional/norm.py: norms of sums; parameters that are used twice, or not trained."""

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from tests import lab
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
def test_gradients_of_the_norm_of_one_tensor_twice_and_of_one_that_alone_is_trained(norm):
    def function(x, added, weight, bias):
        total, y = NORMS[norm][0](x, added, weight, bias)
        return total * y + (bias * 0).sum()

    weight, bias = parameters(5)
    x = leaf(normal(3, 5))
    check_gradients(lambda x, w, b: function(x, x, w, b), x, leaf(weight), leaf(bias))
    frozen = [Tensor(a) for a in (normal(3, 5), weight, bias)]
    check_gradients(lambda added: function(frozen[0], added, *frozen[1:]), leaf(normal(3, 5, seed=4)))


USES = {  # the norm, and shapes of what it gets
    "both parameters twice": (lambda x, w, b: layer_norm(layer_norm(x, w, b) * 2, w, b), (3, 5), (5,), (5,)),
    "the weight twice, of RMS norm": (lambda x, w: rms_norm(rms_norm(x, w) * x, w), (3, 5), (5,)),
    # One gradient is there already when the kernel writes both: it must add to one and not to the other.
    "the weight twice": (lambda x, w, b: layer_norm(layer_norm(x, w) * 2, w, b), (3, 5), (5,), (5,)),
    "the bias twice": (
        lambda x, w, b: layer_norm(layer_norm(x, x[0] * 0 + 1, b) * 2, w, b),
        *((3, 5), (5,), (5,)),
    ),
    "one tensor as weight and bias": (lambda x, w: layer_norm(x, w, w), (3, 5), (5,)),
    "results of ops": (lambda x, w, b: layer_norm(x, w[::2] * 2, b[::2]), (3, 5), (10,), (10,)),
    "a result of an op, of RMS norm": (lambda x, w: rms_norm(x, w[::2]), (3, 5), (10,)),
}


@pytest.mark.parametrize("use", USES)
def test_gradients_of_parameters(use):
    function, *shapes = USES[use]
    check_gradients(function, *(leaf(normal(*shape, seed=i)) for i, shape in enumerate(shapes)))


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


SINGLE, OTHER = np.ones(5, np.float32), r"x and added must have one shape, got \(3, 5\) and \(5,"
UNFIT = r"weight must be \(5,\) for x \(3, 5\), got \(4,\)"
SCALAR = "normalized_shape must be the last sizes of x, got"
test_what_does_not_fit_is_an_error = lab.refusals(
    (lambda: F.add_rms_norm(normal(3, 5), normal(5), normal(5)), f"add_rms_norm: {OTHER}"),
    (
        lambda: F.add_layer_norm(normal(3, 5), normal(3, 5).astype("f4"), normal(5)),
        *(TypeError, "add_layer_norm: .*x float64, added float32"),
    ),
    (lambda: layer_norm(normal(3, 5), normal(4)), UNFIT),
    (lambda: rms_norm(normal(3, 5), normal(4)), UNFIT),
    (lambda: layer_norm(Tensor(1.0), normal(1)), SCALAR),
    (lambda: rms_norm(Tensor(1.0), normal(1)), SCALAR),
    (lambda: layer_norm(normal(3, 5), SINGLE), TypeError, "x float64, weight float32"),
    (lambda: rms_norm(normal(3, 5), SINGLE), TypeError, "x float64, weight float32"),
)
