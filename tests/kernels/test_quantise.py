"""kernels/cpu/quantise.py: the error of each number is at most half a step of its block."""

import time

import numpy as np
import pytest

from shardrt.kernels import cpu as K
from shardrt.kernels.packed import packed_bytes


def numbers(count, seed=0):
    random = np.random.default_rng(seed)
    return (random.standard_normal(count) * 10.0 ** random.integers(-4, 4, count)).astype(np.float32)


def packed_of(x, bits, block):
    out = np.full(packed_bytes(x.size, bits, block), 99, np.uint8)
    K.quantise.pack(x, out, bits, block)
    return out


def errors(x, bits, block):
    """The largest error that each number may have, in float64: half a step, and bfloat16's rounding."""
    found = []
    for start in range(0, x.size, block):
        part = x[start : start + block].astype(np.float64)
        low, high = part.min(), part.max()
        if bits == 8:
            error = 0.5 * np.abs(part).max() / 127
        else:
            span = high - low + abs(low) / 128  # the least number is rounded down
            error = span / 30 + span / 256
        found += [error] * part.size
    return np.array(found)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("count", "block"), [(1, 32), (255, 64), (1000, 256), (4096, 256), (70_001, 2048)])
def test_the_error_is_at_most_half_a_step(bits, count, block):
    x, back = numbers(count), np.full(count, np.nan, np.float32)
    packed = packed_of(x, bits, block)
    K.quantise.unpack(packed[None], back, bits, block)
    assert (np.abs(back.astype(np.float64) - x) <= errors(x, bits, block) * (1 + 1e-5)).all()
    again = np.empty_like(back)
    K.quantise.unpack(packed_of(back, bits, block)[None], again, bits, block)
    kept = (np.abs(back) >= 1e-30) if bits == 8 else np.ones(count, bool)
    np.testing.assert_allclose(again[kept], back[kept], rtol=1e-6)  # numbers that have codes keep them


def test_numbers_around_one_have_steps_of_their_own_in_4_bits():
    """A norm's weights, which 15 steps from -1 to 1 would make equal."""
    x, back = np.linspace(0.8, 1.2, 64, dtype=np.float32), np.empty(64, np.float32)
    K.quantise.unpack(packed_of(x, 4, 64)[None], back, 4, 64)
    assert len(np.unique(back)) == 16
    K.quantise.unpack(packed_of(np.ones(64, np.float32), 4, 64)[None], back, 4, 64)
    assert (back == 1).all()


def test_a_span_that_is_narrow_next_to_its_numbers_is_kept_in_4_bits():
    for x in (np.linspace(1.003, 1.0045, 32), np.full(32, 1.0039), np.linspace(-1.0045, -1.003, 32)):
        x, back = x.astype(np.float32), np.empty(32, np.float32)
        K.quantise.unpack(packed_of(x, 4, 32)[None], back, 4, 32)
        assert np.abs(back - x).max() < 4e-4


@pytest.mark.parametrize("bits", [8, 4])
def test_sums_add_rows_in_order(bits):
    rows, count, block = 3, 777, 64
    packed = np.stack([packed_of(numbers(count, seed), bits, block) for seed in range(rows)])
    each = np.empty(rows * count, np.float32)
    K.quantise.unpack(packed, each, bits, block)
    first, second, third = each.reshape(rows, count)
    start = numbers(count, 9)
    out = start.copy()
    K.quantise.sum_rows(packed, out, bits, block, 0.25, True)
    np.testing.assert_array_equal(out, ((first + second) + third) * np.float32(0.25) + start)
    K.quantise.sum_rows(packed, out, bits, block, 0.25, False)
    np.testing.assert_array_equal(out, ((first + second) + third) * np.float32(0.25))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_with_nan_becomes_nan_and_leaves_no_error(bits):
    x = numbers(96)
    x[40], x[95] = np.inf, np.nan
    packed, back, error = packed_of(x, bits, 32), np.empty(96, np.float32), x.copy()
    K.quantise.unpack(packed[None], back, bits, 32)
    assert np.isfinite(back[:32]).all()
    assert np.isnan(back[32:]).all()
    K.quantise.subtract(packed, error, bits, 32)
    np.testing.assert_array_equal(error[:32], x[:32] - back[:32])
    assert (error[32:] == 0).all()


def test_zeros_and_tiny_numbers_become_zero():
    x, back = np.array([0, 1e-40, -1e-38, 9e-31] * 8, np.float32), np.ones(32, np.float32)
    K.quantise.unpack(packed_of(x, 8, 32)[None], back, 8, 32)
    assert (back == 0).all()


@pytest.mark.parametrize(("bits", "block"), [(3, 64), (8, 0), (4, 48)])
def test_other_bits_and_blocks_are_refused(bits, block):
    with pytest.raises(ValueError, match="quantise: (bits|block) must be"):
        K.quantise.pack(np.ones(64, np.float32), np.zeros(128, np.uint8), bits, block)


def test_loops_of_4_bits_are_vectorised():
    """They take up to 1.6 times as long as those of 8 bits; without vectors, 2.5 to 6 times."""
    count, block, took = 32 << 10, 256, {}  # on one thread
    x, out = numbers(count), np.empty(count, np.float32)
    packed = {bits: packed_of(x, bits, block) for bits in (8, 4)}
    calls = {
        "pack": lambda bits: K.quantise.pack(x, packed[bits], bits, block),
        "unpack": lambda bits: K.quantise.unpack(packed[bits][None], out, bits, block),
        "subtract": lambda bits: K.quantise.subtract(packed[bits], out, bits, block),
    }
    for _ in range(15):  # alternating
        for name, call in calls.items():
            for bits in (8, 4):
                began = time.thread_time()
                for _ in range(10):
                    call(bits)
                spent = time.thread_time() - began
                took[name, bits] = min(spent, took.get((name, bits), spent))
    for name in calls:
        assert took[name, 4] < 2.2 * took[name, 8], (name, took)
