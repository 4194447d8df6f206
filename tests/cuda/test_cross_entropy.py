"""Cross entropy: nan and wrong targets, launches, and rows that are longer than shared memory."""

import numpy as np
import pytest

from shardrt.kernels import cuda as kernels
from shardrt.kernels.cuda import cross_entropy as cuda
from shardrt.kernels.cuda._launch import STATIC_SHARED
from tests.contracts import check
from tests.contracts.losses import IGNORE, losses
from tests.cuda.numbers import assert_close, guarded, normal


@pytest.mark.parametrize("width", [8, 37, 3001])
def test_nan_makes_the_loss_of_its_row_nan_and_no_gradient_of_an_ignored_one(emulated, width):
    values = normal(3, width)
    values[:2, width // 2] = np.nan
    targets = np.array([1, IGNORE, 1])
    with guarded("float32") as array:
        logits, losses, lse = array(values), array(np.zeros(3)), array(np.zeros(3))
        cuda.forward(logits, targets, losses, lse, IGNORE)
        np.testing.assert_array_equal(np.isnan(losses), [True, False, False])
        cuda.backward(logits, targets, lse, logits, None, IGNORE)
        assert np.isnan(logits[0]).all() and (logits[1] == 0).all() and np.isfinite(logits[2]).all()


@pytest.mark.parametrize("wrong", [-1, 40, 2**40])
def test_a_target_outside_of_the_vocabulary_makes_its_row_nan_and_reads_nothing(emulated, wrong):
    targets = np.array([3, wrong, IGNORE])
    with guarded("float32") as array:
        logits, losses, lse = array(normal(3, 40)), array(np.zeros(3)), array(np.zeros(3))
        cuda.forward(logits, targets, losses, lse, IGNORE)
        np.testing.assert_array_equal(np.isnan(losses), [False, True, False])
        cuda.backward(logits, targets, lse, logits, None, IGNORE)
        assert np.isfinite(logits[[0, 2]]).all() and np.isnan(logits[1]).all()


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
@pytest.mark.parametrize("room", [None, 0, 100, 1000], ids=["held", "read again", "in part", "in part, more"])
def test_in_place_a_row_is_held_in_shared_memory_or_read_again(emulated, monkeypatch, element, room):
    if room is not None:
        monkeypatch.setattr(emulated, "shared", STATIC_SHARED + room)
    check(kernels, "cross_entropy.forward_in_place", element)
    cuda.backward_in_place(*[None] * 5)
    assert set(emulated.launches) == {"in_place"}


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
@pytest.mark.parametrize("room", [None, 0, 1000])
def test_in_place_reads_the_part_of_a_row_that_shared_memory_holds_once(emulated, monkeypatch, element, room):
    if room is not None:
        monkeypatch.setattr(emulated, "shared", STATIC_SHARED + room)
    if not hasattr(emulated, "bytes_read"):
        pytest.skip("the emulator's race checker counts the bytes")
    with guarded(element) as array:
        logits = array(normal(3, 2051))
        targets = np.full(3, 2051)  # no word: each thread reads the logit of a word
        losses, lse = (array(np.zeros(3), dtype=np.float32) for _ in range(2))
        cuda.forward_in_place(logits, targets, losses, lse, IGNORE)
        held = (2 * logits.nbytes - emulated.bytes_read["logits"]) / 3
        if room == 1000:
            assert 1000 - 48 <= held <= 1000  # a row begins and ends anywhere in 16 bytes
        else:
            assert held == (0 if room == 0 else logits[0].nbytes)


def test_in_place_a_wrong_target_and_nan_are_as_otherwise(emulated):
    targets = np.array([3, 40, IGNORE, 1])
    with guarded("float32") as array:
        logits, losses, lse = array(normal(4, 40)), array(np.zeros(4)), array(np.zeros(4))
        logits[2:, 7] = np.nan
        cuda.forward_in_place(logits, targets, losses, lse, IGNORE)
        np.testing.assert_array_equal(np.isnan(losses), [False, True, False, True])
        assert np.isfinite(logits[0]).all() and (logits[2] == 0).all() and np.isnan(logits[[1, 3]]).all()


def test_as_many_threads_as_a_long_row_needs_and_no_more_shared_memory_than_there_is(emulated, monkeypatch):
    """On an H100 a vocabulary of 50257 is held, also in 32 bits, and most of one of 128256 in 16."""
    asked = []
    monkeypatch.setattr(emulated, "launch", lambda *call: asked.append((call[5][-2], call[4], call[6])))
    with guarded("bfloat16") as array:
        targets, losses, lse = np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros(1, np.float32)
        for vocab, dtype in ((2000, None), (50257, None), (50257, np.float32), (128256, None)):
            cuda.forward_in_place(array(np.zeros((1, vocab)), dtype=dtype), targets, losses, lse, IGNORE)
        monkeypatch.setattr(emulated, "shared", 99 << 10)  # of the smallest GPUs
        cuda.forward_in_place(array(np.zeros((1, 128256))), targets, losses, lse, IGNORE)
    assert asked == [
        (2000, 256, 4016),
        (50257, 1024, 100530),
        (50257, 1024, 201044),
        (115952, 1024, (227 << 10) - 512),
        (50416, 1024, (99 << 10) - 512),
    ]


@pytest.mark.parametrize("level", [0.0, 1e4, -1e4])
def test_a_part_without_a_finite_logit_adds_nothing_and_logits_may_be_large(emulated, level):
    with guarded("float32") as array:
        pairs, targets = array(np.full((2, 2, 2), np.nan)), np.array([1, 41])
        loss, lse, logits = array(np.zeros(2)), array(np.zeros(2)), array(normal(2, 40) + level)
        for part, given in enumerate((logits, array(np.full((2, 40), -np.inf)))):
            cuda.forward_part(given, targets, pairs[part, 1], pairs[part, 0], IGNORE, 40 * part, 80)
        cuda.join(pairs, targets, loss, lse, IGNORE)
        np.testing.assert_array_equal(pairs[1, 0], -np.inf)
        assert_close(lse, losses(logits.astype(np.float64), np.array([1, 1]))[1])
        assert np.isfinite(loss[0]) and loss[1] == np.inf


@pytest.mark.parametrize("wrong", [-1, 80, 2**40])
def test_a_target_in_no_part_makes_its_row_nan_in_all_of_them(emulated, wrong):
    targets = np.array([3, wrong, IGNORE])
    with guarded("float32") as array:
        pairs, losses, lse = array(np.zeros((2, 2, 3))), array(np.zeros(3)), array(np.zeros(3))
        logits = [array(normal(3, 40, seed=part)) for part in range(2)]
        for part in range(2):
            cuda.forward_part(logits[part], targets, pairs[part, 1], pairs[part, 0], IGNORE, 40 * part, 80)
        cuda.join(pairs, targets, losses, lse, IGNORE)
        np.testing.assert_array_equal(np.isnan(losses), [False, True, False])
        for part in range(2):
            cuda.backward(logits[part], targets, lse, logits[part], None, IGNORE, 40 * part)
            assert np.isnan(logits[part][1]).all() and np.isfinite(logits[part][[0, 2]]).all()
            assert (logits[part][2] == 0).all()
