"""AdamWBF16 and LionBF16: moments that are rounded at random, with the same bits wherever shards are cut."""

from functools import partial

import numpy as np
import pytest

from shardrt import manual_seed
from shardrt.fsdp import memory_plan
from shardrt.kernels.cpu import adamw, stochastic
from shardrt.optim.low_bit import AdamWBF16, LionBF16
from tests import lab
from tests.optim.test_8bit import ADAMW as EIGHT
from tests.optim.test_8bit import EXACT, at_step, losses, made, moments, with_given_gradients
from tests.optim.test_8bit import LION as EIGHT_LION

ADAMW = partial(AdamWBF16, lr=1e-2, weight_decay=0.1)
LION = partial(LionBF16, lr=1e-3, weight_decay=0.1)
SETTINGS = (0.999, 1e-3, 1.0, 0.9, 0.999, 1e-8)


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def row(start, stop, first, stream=5):
    return (start, stop, *SETTINGS, 3, 0, stream, 0, first)


def test_a_number_becomes_one_of_its_two_neighbours_and_its_mean_is_the_number():
    count = 40000
    param, grad = np.zeros(count, np.float32), np.full(count, 0.3, np.float32)
    m, v = np.full(count, 0x3F80, np.uint16), np.full(count, 0x3F80, np.uint16)  # 1.0
    exact = [np.zeros(count, np.float32), grad, np.ones(count, np.float32), np.ones(count, np.float32)]
    stochastic.adamw(param, grad, m, v, np.array([row(0, count, 0)]))
    adamw.step(*exact, np.array([(0, count, *SETTINGS)]))
    np.testing.assert_allclose(param, exact[0], rtol=1e-6)
    for bits, values in zip((m, v), exact[2:], strict=True):
        found = widened(bits)
        assert np.unique(found).size == 2
        assert np.abs(found - values[0]).max() < 2.0**-7
        assert abs(found.mean(dtype=np.float64) - values[0]) < 5 * 2.0**-8 / np.sqrt(count)


def test_a_second_moment_follows_gradients_that_become_smaller():
    count = 4096
    param, grad = np.ones(count, np.float32), np.full(count, 0.1, np.float32)
    m, v = (np.full(count, 0x3F80, np.uint16) for _ in range(2))
    for number in range(1000):
        stochastic.adamw(param, grad, m, v, np.array([row(0, count, 0, number)]))
    expected = 0.01 + 0.99 * 0.999**1000
    np.testing.assert_allclose(widened(v).mean(dtype=np.float64), expected, rtol=5e-3)


def test_an_element_has_the_same_bits_in_any_range():
    random = np.random.default_rng(0)
    whole = [random.standard_normal(103).astype(np.float32) for _ in range(2)]
    whole += [np.zeros(103, np.uint16), np.zeros(103, np.uint16)]
    parts = [array.copy() for array in whole]
    stochastic.adamw(*whole, np.array([row(0, 103, 32)]))
    stochastic.adamw(*parts, np.array([row(0, 16, 32), row(16, 103, 48)]))
    lab.assert_equal(parts, whole)


@pytest.mark.parametrize("optimizer", [ADAMW, LION], ids=["AdamWBF16", "LionBF16"])
def test_equal_gradients_give_equal_bits_on_any_number_of_ranks(optimizer):
    found = [lab.first(ranks, with_given_gradients, optimizer) for ranks in (1, 2, 4)]
    lab.assert_equal(found[1:], found[:1] * 2)


def test_another_seed_rounds_otherwise():
    def seeded(seed):
        values = [np.ones(64, np.float32) for _ in range(2)] + [np.zeros(64, np.uint16) for _ in range(2)]
        stochastic.adamw(*values, np.array([(0, 64, *SETTINGS, seed, 0, 5, 0, 0)]))
        return values[2]

    assert (seeded(1) != seeded(2)).any()
    np.testing.assert_array_equal(seeded(1), seeded(1))


@pytest.mark.parametrize("low, exact", [(ADAMW, EIGHT), (LION, EIGHT_LION)], ids=["AdamWBF16", "LionBF16"])
def test_training_reaches_the_loss_of_float32(low, exact):
    """Within 1 % after 60 steps."""
    assert abs(losses(low)[-1] / losses(EXACT[exact])[-1] - 1) < 0.01


def test_the_memory_plan_knows_to_the_byte():
    manual_seed(0)
    model, _ = lab.build()
    plan = memory_plan(model, optimizer_states=1)
    optimizer = ADAMW(model.parameters())
    states = sum(array.nbytes for piece in optimizer.slices for array in piece.state.values())
    assert plan.device["optimizer state"] == states


def stepped(folder, optimizer, first, stop, saves=False):
    """Moments after steps [first, stop), from a checkpoint if they are not the first ones."""
    model, own = made(optimizer)
    checkpoints = at_step(folder, model, own)
    if first:
        checkpoints.restore()
    for number in range(first, stop):
        lab.backward(model, None, lab.batches(4)[number])
        lab.update(own)
    if saves:
        checkpoints.save(stop)
    return moments(model, own)


@pytest.mark.parametrize("optimizer", [ADAMW, LION, EIGHT], ids=["AdamWBF16", "LionBF16", "AdamW8bit"])
def test_a_resumed_run_has_the_same_bits(tmp_path, optimizer):
    whole = lab.first(2, stepped, tmp_path / "whole", optimizer, 0, 4)
    lab.first(2, stepped, tmp_path / "cut", optimizer, 0, 2, True)
    lab.assert_equal(lab.first(2, stepped, tmp_path / "cut", optimizer, 2, 4), whole)
