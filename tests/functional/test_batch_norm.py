"""functional/batch_norm.py: against differences and PyTorch; ranks together as one rank with all images."""

import numpy as np
import pytest

from shardrt import Tensor, device
from shardrt import functional as F
from shardrt.comm import init_device_mesh
from tests.gradcheck import check_gradients, leaf, normal
from tests.ranks import run_ranks

SHAPES = [(3, 2, 4, 5), (2, 3, 1, 1), (4, 3), (1, 2, 3, 2)]


def parameters(channels):
    return normal(channels, seed=1) + 1, normal(channels, seed=2)


def running(channels):
    return normal(channels, seed=3), normal(channels, seed=4) ** 2 + 0.5


@pytest.mark.parametrize("training", [True, False])
def test_gradients(training):
    for shape in SHAPES:
        given = running(shape[1])
        weight, bias = parameters(shape[1])
        function = lambda x, w, b: F.batch_norm(x, *given, w, b, training)  # noqa: B023, E731
        check_gradients(function, leaf(normal(*shape)), leaf(weight), leaf(bias))


def test_parameters_used_twice_get_both_gradients():
    weight, bias = parameters(2)
    check_gradients(
        lambda x, w, b: F.batch_norm(F.batch_norm(x, *running(2), w, b, True) * x, *running(2), w, b, True),
        leaf(normal(2, 2, 3, 3)),
        leaf(weight),
        leaf(bias),
    )


@pytest.mark.torch
@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_those_of_torch(training):
    """test_positional.py compares results and gradients."""
    torch = pytest.importorskip("torch")
    x, ours = normal(5, 7, 9, 11) * 3 + 5, running(7)
    theirs = [torch.tensor(array) for array in ours]
    F.batch_norm(x, *ours, *parameters(7), training, 0.3)
    torch.nn.functional.batch_norm(torch.tensor(x), *theirs, None, None, training, 0.3)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-12)


def test_ranks_together_are_one_rank_with_the_whole_batch():
    """Two layers, so that a gradient passes through one; ranks have 1, 2, 3 and 4 of the images."""
    x, dy = normal(10, 3, 4, 4) * 2 + 3, normal(10, 3, 4, 4, seed=5)
    weight, bias = parameters(3)

    def run(part, communicator=None):
        inputs = [Tensor(a.copy(), requires_grad=True) for a in (x[part], weight, bias)]
        mean, var = running(3)
        y = inputs[0]
        for _ in range(2):
            y = F.batch_norm(y * y, mean, var, *inputs[1:], True, communicator=communicator)
        y.backward(dy[part])
        return y.data, mean, var, *(tensor.grad for tensor in inputs)

    def rank():
        communicator = init_device_mesh("auto").communicator("batch_norm")
        first = communicator.rank * (communicator.rank + 1) // 2
        return run(slice(first, first + communicator.rank + 1), communicator)

    y, mean, var, dx, dweight, dbias = run(slice(None))
    ranks = run_ranks(4, rank)
    close = {"rtol": 1e-11, "atol": 1e-12}
    np.testing.assert_allclose(np.concatenate([r[0] for r in ranks]), y, **close)
    np.testing.assert_allclose(np.concatenate([r[3] for r in ranks]), dx, **close)
    np.testing.assert_allclose(sum(r[4] for r in ranks), dweight, **close)
    np.testing.assert_allclose(sum(r[5] for r in ranks), dbias, **close)
    for other in ranks:
        np.testing.assert_allclose(other[1], mean, **close)
        np.testing.assert_array_equal(other[1:3], ranks[0][1:3])
        np.testing.assert_allclose(other[2], var, **close)


def test_bad_arguments_are_an_error():
    weight, bias = parameters(3)
    with pytest.raises(ValueError, match=r"weight must be \(2,\) for x \(4, 2\), got \(3,\)"):
        F.batch_norm(normal(4, 2), *running(3), weight, bias, True)
    with pytest.raises(ValueError, match=r"running_var must be \(3,\)"):
        F.batch_norm(normal(4, 3), running(3)[0], running(2)[1], weight, bias, True)
    with pytest.raises(ValueError, match="more than one value per channel"):
        F.batch_norm(normal(1, 3, 1, 1), *running(3), weight, bias, True)
    with pytest.raises(ValueError, match="x must be"):
        F.batch_norm(normal(3), *running(3), weight, bias, True)
    with pytest.raises(TypeError, match="x float32, weight float64"):
        F.batch_norm(device.current().zeros((4, 3), np.float32), *running(3), weight, bias, True)
