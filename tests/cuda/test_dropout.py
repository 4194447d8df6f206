"""Dropout by counter: the CPU's mask, and the same one in backward."""

import numpy as np
import pytest

from shardrt.kernels.cpu import dropout as cpu
from shardrt.kernels.cuda import dropout as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, guarded, normal

KEYS = (2**63 + 5, 2**33 + 1)  # seed, call


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("count", [1, 3, 17, 2051])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("offset", [0, 5, 2**34])
def test_forward(emulated, element, count, shift, offset):
    with guarded(element) as array:
        x, y = array(normal(count), shift), array(np.full(count, np.nan), shift)
        cuda.forward(x, y, 0.3, *KEYS, offset)
        expected = np.empty(count)
        cpu.forward(x.astype(np.float64), expected, 0.3, *KEYS, offset)
        assert_close(y, expected)
        np.testing.assert_array_equal(y == 0, expected == 0)


def test_float32_has_the_bits_of_the_cpu(emulated):
    with guarded("float32") as array:
        x, y = array(normal(2051)), array(np.full(2051, np.nan))
        cuda.forward(x, y, 0.1, *KEYS, 4)
        expected = np.empty(2051, np.float32)
        cpu.forward(x, expected, 0.1, *KEYS, 4)
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("element", ELEMENTS)
def test_backward_has_the_mask_of_forward(emulated, element):
    with guarded(element) as array:
        ones, y, dx = array(np.ones(515)), array(np.full(515, np.nan)), array(np.full(515, np.nan))
        cuda.forward(ones, y, 0.5, *KEYS, 8)
        cuda.backward(ones, dx, 0.5, *KEYS, 8)
        np.testing.assert_array_equal(y == 0, dx == 0)
        assert 0.4 < np.mean(dx == 0) < 0.6


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_and_everything_dropped(emulated, p):
    with guarded("float32") as array:
        x, y = array(normal(130)), array(np.full(130, np.nan))
        cuda.forward(x, y, p, *KEYS, 0)
        np.testing.assert_array_equal(y, x if p == 0 else np.zeros(130))


def test_in_place(emulated):
    with guarded("float32") as array:
        x, y = array(normal(515)), array(np.full(515, np.nan))
        cuda.forward(x, y, 0.25, *KEYS, 0)
        cuda.forward(x, x, 0.25, *KEYS, 0)
        np.testing.assert_array_equal(x, y)


def test_a_place_in_memory_stands_for_the_seed_and_is_added_to_the_call(emulated):
    x, expected = normal(515).astype(np.float32), np.empty(515, np.float32)
    cpu.forward(x, expected, 0.4, *KEYS, 8)
    for call in (0, 3, 2**64 - 5):
        place = np.array([KEYS[0], (KEYS[1] - call) % 2**64], np.uint64)
        for kernels in (cuda, cpu):
            for function in (kernels.forward, kernels.backward):
                y = np.full(515, np.nan, np.float32)
                function(x, y, 0.4, 0, call, 8, place)
                np.testing.assert_array_equal(y, expected)
