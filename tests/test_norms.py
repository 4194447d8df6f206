"""Norms and clipping of gradients: PyTorch's numbers, and the same bits however they are sharded."""

import warnings
from math import inf, isnan, nan

import numpy as np
import pytest

from shardrt import nn
from shardrt.comm import create, world
from shardrt.nn.storage import Storage
from shardrt.nn.utils import (
    NonfiniteNorm,
    clip_grad_norm_,
    clip_grad_norm_on_device_,
    clip_grad_value_,
    grad_norm,
)
from tests import lab
from tests.ranks import run_ranks

NORMS = [1, 2, 2.5, inf]
SHAPES = [(207, 311), (5,), (64, 303), (1,), (1000,)]


class Piece(Storage):
    """What one rank holds of parameters that lie flat, one after the other, and are cut evenly."""

    shard = None
    edge = full = gradient_target = extents_of = zero_grad = lambda self, *args: None

    def __init__(self, parameters, gradients, communicator=None):
        sizes = [gradient.size for gradient in gradients]
        self.first = dict(zip(map(id, parameters), np.cumsum([0, *sizes]).tolist(), strict=False))
        rank, ranks = (communicator.rank, communicator.size) if communicator else (0, 1)
        length = -(-sum(sizes) // ranks)
        self.low, self.high = rank * length, min((rank + 1) * length, sum(sizes))
        self.communicator = communicator
        flat = np.concatenate([gradient.ravel() for gradient in gradients])
        self._gradient = flat[self.low : self.high].copy()
        for parameter in parameters:
            parameter.storage = self

    @property
    def gradient(self):
        return self._gradient

    def range_of(self, parameter):
        first = self.first[id(parameter)]
        start = min(max(first, self.low), self.high)
        stop = min(max(first + parameter.size, self.low), self.high)
        return start - self.low, stop - self.low


def gradients(dtype=np.float32, scale=1.0):
    random = np.random.default_rng(0)
    return [
        (scale * random.standard_normal(s) * np.exp(random.standard_normal(s))).astype(dtype) for s in SHAPES
    ]


def parameters_with(values, communicators=(None,)):
    """Parameters whose gradients are `values`, every second one with the last communicator, flat and cut."""
    parameters = [nn.Parameter(value.shape, nn.init.Zeros(), dtype=value.dtype) for value in values]
    for start, communicator in enumerate(communicators):
        step = len(communicators)
        Piece(parameters[start::step], values[start::step], communicator)
    return parameters


def torch_parameters(values):
    torch = pytest.importorskip("torch")
    parameters = [torch.nn.Parameter(torch.zeros(value.shape, dtype=torch.float64)) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value, dtype=torch.float64)
    return torch, parameters


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize(("max_norm", "dtype"), [(0.5, np.float32), (0.5, np.float64), (1e6, np.float32)])
def test_clipping_gives_the_norm_and_the_gradients_of_pytorch(norm_type, max_norm, dtype):
    torch, theirs = torch_parameters(gradients(dtype))
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    parameters = parameters_with(gradients(dtype))
    measured = grad_norm(parameters, norm_type)
    assert (
        clip_grad_norm_(parameters, max_norm, norm_type) == measured == pytest.approx(float(expected), 1e-12)
    )
    clipped = np.concatenate([parameter.grad.numpy().ravel() for parameter in theirs])
    np.testing.assert_allclose(
        parameters[0].storage.gradient, clipped, rtol=1e-12 if dtype == np.float64 else 4e-7
    )


@pytest.mark.parametrize("norm_type", NORMS)
def test_the_norm_has_the_same_bits_at_every_world_size(norm_type):
    expected = grad_norm(parameters_with(gradients()), norm_type)

    def body():
        one = parameters_with(gradients(), [create()])
        two = parameters_with(gradients(), [create().duplicate(), create().duplicate()])
        part_plain = parameters_with(gradients(), [create(), None])
        return [grad_norm(parameters, norm_type) for parameters in (one, two, part_plain)]

    for ranks in (1, 2, 3, 8):
        for norms in run_ranks(ranks, body):
            assert norms == [expected] * 3


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_nan_or_infinity_on_one_rank_is_the_norm_on_all(norm_type, bad):
    def body():
        values = gradients()
        values[-1][-1] = bad  # on the last rank only
        return grad_norm(parameters_with(values, [create()]), norm_type)

    for norm in run_ranks(3, body):
        assert isnan(norm) if isnan(bad) else norm == inf


@pytest.mark.parametrize("max_norm", [0.1, 1e6, inf])
@pytest.mark.parametrize("bad", [0.5, nan])
def test_clipping_without_the_host_is_clipping_but_for_last_bits(max_norm, bad):
    def body(clip):
        values = gradients()
        values[-1][-1] = bad  # on the last rank only
        parameters = parameters_with(values, [create(), create()])
        norm = clip(parameters, max_norm)
        return norm, [parameter.storage.gradient for parameter in parameters[:2]]

    def without_the_host(parameters, limit):
        return clip_grad_norm_on_device_(parameters, limit).item()

    expected, ours = run_ranks(3, body, clip_grad_norm_), run_ranks(3, body, without_the_host)
    for exact, found in zip(expected, ours, strict=True):
        np.testing.assert_allclose(found[0], exact[0], rtol=1e-12)
        for one, other in zip(found[1], exact[1], strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-7 if max_norm == 0.1 else 0)


@pytest.mark.parametrize("bad", [nan, inf])
def test_clipping_by_a_norm_that_is_no_number_does_what_pytorch_does(bad):
    values = gradients()
    values[1][2] = bad
    torch, theirs = torch_parameters(values)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    parameters = parameters_with(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # infinity * 0
        clip_grad_norm_(parameters, 1.0)
    clipped = np.concatenate([parameter.grad.numpy().ravel() for parameter in theirs])
    np.testing.assert_array_equal(parameters[0].storage.gradient, clipped)


def test_a_norm_that_is_no_number_can_be_asked_to_be_an_error_and_then_changes_nothing():
    values = gradients()
    values[1][2] = nan
    parameters = parameters_with(values)
    before = parameters[0].storage.gradient.copy()
    with pytest.raises(NonfiniteNorm, match="norm of order 2.0 of the gradients is nan"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    np.testing.assert_array_equal(parameters[0].storage.gradient, before)


@pytest.mark.parametrize("bad", [nan, inf])
def test_gradients_can_be_left_where_the_norm_is_no_number(bad):
    values = gradients()
    values[1][2] = bad
    parameters = parameters_with(values)
    before = parameters[0].storage.gradient.copy()
    norm = clip_grad_norm_on_device_(parameters, 1.0, leave_nonfinite=True).item()
    np.testing.assert_array_equal([norm], [bad])
    np.testing.assert_array_equal(parameters[0].storage.gradient, before)


def test_an_infinite_limit_only_measures():
    parameters = parameters_with(gradients())
    before = parameters[0].storage.gradient.copy()
    assert clip_grad_norm_(parameters, inf) == grad_norm(parameters)
    assert np.array_equal(parameters[0].storage.gradient, before)


def test_values_are_clipped_as_pytorch_clips_them():
    values = gradients()
    values[0][0, :3] = nan, inf, -inf
    torch, theirs = torch_parameters(values)
    torch.nn.utils.clip_grad_value_(theirs, 0.25)

    def body():
        parameters = parameters_with(values, [create()])
        clip_grad_value_(parameters, 0.25)
        return parameters[0].storage.gradient

    clipped = np.concatenate([parameter.grad.numpy().ravel() for parameter in theirs])
    np.testing.assert_array_equal(np.concatenate(run_ranks(3, body)), clipped)


def test_without_gradients_the_norm_is_zero():
    parameters = list(nn.Linear(3, 4).parameters())
    for norm_type in NORMS:
        assert clip_grad_norm_(parameters, 1.0, norm_type) == 0


def test_one_small_reduction_per_communicator():
    calls = []

    class Counting:
        rank, size = 0, 1

        def all_reduce(self, buffer, *, op, stream):
            calls.append((buffer.nbytes, op))

    shared = Counting()
    parameters = parameters_with(gradients(), [shared, Counting(), shared])
    grad_norm(parameters, 2)
    assert calls == [(16, "sum")] * 2
    grad_norm(parameters, inf)
    assert calls[2:] == [(8, "max")] * 2


@pytest.mark.parametrize("norm_type", [1, 2, inf])
def test_the_norm_of_a_sharded_model_is_that_of_the_plain_one(norm_type):
    def body(sharded):
        model = lab.build()[0] if sharded else lab.seeded()
        lab.backward(model)  # the mean over ranks of equal gradients
        return grad_norm(model.parameters(), norm_type)

    expected = body(False)
    for ranks in (1, 4):  # a power of two: sums of equal gradients are exact
        assert run_ranks(ranks, body, True) == [expected] * ranks
    assert run_ranks(3, body, True) == [pytest.approx(expected, rel=1e-6)] * 3
    assert world.current().size == 1


def some():
    return parameters_with(gradients())


test_a_wrong_argument_is_an_error = lab.refusals(
    (lambda: clip_grad_norm_(some(), 0), "clip_grad_norm_: max_norm must be positive, got 0"),
    (lambda: clip_grad_norm_(some(), nan), "max_norm must be positive, got nan"),
    (lambda: clip_grad_norm_(some(), 1.0, 0), "clip_grad_norm_: norm_type must be positive.*got 0"),
    (lambda: grad_norm(some(), -inf), "grad_norm: norm_type must be positive.*got -inf"),
    (lambda: clip_grad_norm_on_device_(some(), nan), "max_norm must be positive, got nan"),
    (lambda: clip_grad_value_(some(), -1), "clip_value must not be negative, got -1"),
)
