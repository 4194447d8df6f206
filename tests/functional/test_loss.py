"""functional/loss.py: targets that are ignored, the gradient in place, chunks of rows."""

import numpy as np
import pytest

from shardrt import Tensor, device
from shardrt import functional as F
from tests.gradcheck import check_gradients, leaf, normal

REDUCTIONS = ["mean", "sum", "none"]


def targets_for(shape, vocab, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, shape)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_with_ignored_targets(reduction, inplace):
    targets = np.array([[1, -100, 0], [-100, -100, 4]])
    check_gradients(
        lambda x: F.cross_entropy(x * 2, targets, reduction=reduction, inplace=inplace), leaf(normal(2, 3, 5))
    )


def test_an_ignored_index_that_is_a_class():
    targets = np.array([0, 1, 2])
    x = leaf(normal(3, 3))
    check_gradients(lambda x: F.cross_entropy(x, targets, ignore_index=1), x)
    assert (x.grad[1] == 0).all()


def test_all_targets_ignored_give_no_number_but_gradient_zero():
    x = leaf(normal(2, 3))
    loss = F.cross_entropy(x, [-100, -100])
    loss.backward()
    assert np.isnan(loss.item()) and (x.grad == 0).all()
    assert F.cross_entropy(x, [-100, -100], reduction="sum").item() == 0


def test_in_place_the_gradient_takes_the_memory_of_the_logits():
    x = leaf(normal(2, 3))
    logits = x * 1.0
    F.cross_entropy(logits, [0, 1], inplace=True).backward()
    np.testing.assert_array_equal(logits.data, x.grad)


def test_in_place_backward_runs_once():
    logits = leaf(normal(2, 3)) * 1.0
    loss = F.cross_entropy(logits, [0, 1], inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="CrossEntropy"):
        loss.backward()


def test_in_place_is_an_error_for_a_leaf():
    with pytest.raises(ValueError, match="inplace"):
        F.cross_entropy(leaf(normal(2, 3)), [0, 1], inplace=True)


@pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.int64])
def test_targets_of_any_integer_type(dtype):
    x, targets = normal(2, 3, 5), targets_for((2, 3), 5)
    expected = F.cross_entropy(x, targets).item()
    assert F.cross_entropy(x, targets.astype(dtype)).item() == expected
    assert F.cross_entropy(x, Tensor(targets.astype(dtype))).item() == expected
    assert F.cross_entropy(x, np.asfortranarray(targets)).item() == expected


def test_the_first_target_out_of_range_is_named():
    with pytest.raises(ValueError, match=r"targets\[1, 0\] must be in \[0, 5\), got 5"):
        F.cross_entropy(normal(2, 2, 5), [[0, -100], [5, 7]])
    with pytest.raises(ValueError, match=r"targets\[0\] must be in \[0, 5\), got -1"):
        F.cross_entropy(normal(1, 5), [-1])


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match=r"got \(2, 5\) and \(3,\)"):
        F.cross_entropy(normal(2, 5), [0, 1, 2])
    with pytest.raises(ValueError, match="reduction"):
        F.cross_entropy(normal(2, 5), [0, 1], reduction="average")
    with pytest.raises(TypeError, match="targets must be integers"):
        F.cross_entropy(normal(2, 5), [0.0, 1.0])
    with pytest.raises(TypeError, match="logits int64"):
        F.cross_entropy(np.ones((2, 5), int), [0, 1])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_in_chunks_it_is_the_same_but_for_rounding(reduction):
    targets = targets_for((7, 9), 101)
    targets[2, 3:] = -100
    results = []
    for chunk in (None, 0, 1, 10, 63, 99):
        x = Tensor(normal(7, 9, 16).astype(np.float32), requires_grad=True)
        weight = Tensor(normal(101, 16).astype(np.float32), requires_grad=True)
        first = (F.linear(x, weight) ** 2).mean()  # the weight's gradient is added to another
        if chunk is not None:
            loss = F.linear_cross_entropy(x, weight, targets, reduction=reduction, chunk=chunk)
        else:
            loss = F.cross_entropy(F.linear(x, weight), targets, reduction=reduction)
        (first + (loss * 0.3).sum()).backward()
        results.append((np.array(loss.data), x.grad, weight.grad))
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other)


def test_in_chunks_the_logits_are_never_all_there():
    here = device.current()
    x = Tensor(normal(512, 8).astype(np.float32), requires_grad=True)
    weight = Tensor(normal(1000, 8).astype(np.float32), requires_grad=True)
    peaks = []
    for chunk in (16, 512):
        here.reset_peak()
        before = here.peak_bytes()
        F.linear_cross_entropy(x, weight, targets_for((512,), 1000), chunk=chunk).backward()
        peaks.append(here.peak_bytes() - before)
        x.grad = weight.grad = None
    assert peaks[0] <= 4 * (16 * 1000 + 2 * 8 * 512 + 8 * 1000 + 2 * 512) + 4096
    assert peaks[1] >= 4 * 512 * 1000


def test_without_chunks_backward_runs_once():
    loss = F.linear_cross_entropy(leaf(normal(2, 4)), leaf(normal(5, 4)), [0, 1], chunk=0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="LinearCrossEntropy"):
        loss.backward()


@pytest.mark.parametrize("frozen", ["x", "weight"])
@pytest.mark.parametrize("chunk", [0, 2])
def test_the_gradient_of_one_of_the_two_alone(frozen, chunk):
    x, weight = leaf(normal(3, 4)), leaf(normal(5, 4))
    (x if frozen == "x" else weight).requires_grad = False
    trained = weight if frozen == "x" else x
    check_gradients(lambda _: F.linear_cross_entropy(x, weight, [0, 4, 2], chunk=chunk), trained)


@pytest.mark.parametrize("chunk", [0, 128])
def test_no_rows_have_loss_and_gradient_zero(chunk):
    x, weight = leaf(np.zeros((0, 4))), leaf(normal(5, 4))
    loss = F.linear_cross_entropy(x, weight, np.zeros(0, np.int64), reduction="sum", chunk=chunk)
    loss.backward()
    assert loss.item() == 0 and not weight.grad.any()


def test_what_does_not_fit_in_chunks_is_an_error():
    x, weight = normal(2, 4), normal(5, 4)
    with pytest.raises(ValueError, match=r"x must be \(..., inputs\) and weight"):
        F.linear_cross_entropy(x, normal(5, 3), [0, 1])
    with pytest.raises(ValueError, match=r"linear_cross_entropy: targets\[1\] must be in \[0, 5\), got 5"):
        F.linear_cross_entropy(x, weight, [0, 5])
    with pytest.raises(ValueError, match="chunk must be at least 0, got -1"):
        F.linear_cross_entropy(x, weight, [0, 1], chunk=-1)
