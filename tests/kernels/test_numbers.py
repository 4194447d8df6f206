"""Kernels against NumPy in float64, with poisoned outputs, and the promises that no op test sees.

Forward and backward of every op are held against finite differences and PyTorch in tests/functional.
"""

import math

import numpy as np
import pytest

from shardrt.kernels import cpu as K
from shardrt.kernels.cpu import _jit

DTYPES = [np.float32, np.float64]
TOLERANCE = {np.float32: 2e-6, np.float64: 1e-12}


def normal(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def poisoned(shape, dtype):
    return np.full(shape, np.nan, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp_is_accurate_over_its_whole_range(dtype):
    x = np.linspace(-87, 88, 100_001).astype(dtype)
    y = poisoned(x.shape, dtype)
    _apply_exp(x, y)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(y - exact) <= 3 * np.finfo(dtype).eps * exact).all()


def test_exp_underflows_to_zero_and_keeps_nan():
    x = np.array([-100, -np.inf, np.nan], np.float32)
    y = poisoned(3, np.float32)
    _apply_exp(x, y)
    assert y[0] == 0 and y[1] == 0 and np.isnan(y[2])


def test_erf_is_accurate_relative_to_its_value():
    x = np.concatenate([np.linspace(-5, 5, 20_001), np.geomspace(1e-30, 1e-3, 100)]).astype(np.float32)
    y = poisoned(x.shape, np.float32)
    _apply_erf(x, y)
    exact = np.array([math.erf(v) for v in x.tolist()])
    assert (np.abs(y - exact) <= 4 * np.finfo(np.float32).eps * np.abs(exact)).all()


def test_erf_ends_at_one_and_keeps_nan():
    x = np.array([4, -4, 1e30, -np.inf, np.inf, np.nan], np.float32)
    y = poisoned(6, np.float32)
    _apply_erf(x, y)
    np.testing.assert_array_equal(y, [1, -1, 1, -1, 1, np.nan])


@_jit.fused
def _apply_erf(x, y):
    for i in range(x.size):
        y[i] = _jit.erf(x[i])


@_jit.fused
def _apply_exp(x, y):
    for i in range(x.size):
        y[i] = _jit.exp(x[i])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 5), (33, 65, 17)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_matmul_of_every_kind_of_view(dtype, shape, accumulate):
    m, n, k = shape
    plain_a, plain_b = normal((m, k), dtype), normal((k, n), dtype, 1)
    spaced_a, spaced_b = normal((m, 2 * k), dtype)[:, :k], normal((2 * k, n), dtype, 1)[::2]
    for a in (plain_a, np.asfortranarray(plain_a), spaced_a, normal((k, m), dtype).T, plain_a[:, ::-1]):
        for b in (plain_b, np.asfortranarray(plain_b), spaced_b, normal((n, k), dtype).T):
            room = normal((m, n + 3), dtype, 2) if accumulate else poisoned((m, n + 3), dtype)
            out = room[:, :n]
            expected = a.astype(np.float64) @ b + (out if accumulate else 0)
            K.matmul.matmul(a, b, out, accumulate=accumulate)
            np.testing.assert_allclose(out, expected, rtol=0, atol=20 * k * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_random_numbers_are_the_same_bits_in_any_pieces(dtype, kind, kernel_threads):
    def fill(out, offset):
        numbers = (0.5, 2.0) if kind == "normal" else ()
        getattr(K.philox, kind)(out, 7, 2**63 + 5, offset, *numbers)
        return out

    whole = fill(poisoned(40_007, dtype), 1)
    edges = [0, 1, 2, 3, 5, 8, 1000, 1001, 30_002, 40_007]
    for low, high in zip(edges, edges[1:], strict=False):
        assert np.array_equal(fill(poisoned(high - low, dtype), 1 + low), whole[low:high])


def test_philox_gives_the_published_numbers():
    """Known answers of Random123 for philox4x32-10: counter and key all zero, and all ones."""
    zero = K.philox.words(np.uint64(0), np.uint64(0), np.uint64(0))
    ones = K.philox.words(np.uint64(2**64 - 1), np.uint64(2**64 - 1), np.uint64(2**64 - 1))
    assert [int(w) for w in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert [int(w) for w in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def outputs_of_all(dtype):
    """What the kernels with reductions and tiles write for one larger input each."""
    x, dy = normal((300, 200), dtype), normal((300, 200), dtype, 1)
    weight = normal(200, dtype, 2)
    y, dx = poisoned((2, 300, 200), dtype)
    mean, rstd, lse, losses = poisoned((4, 300), dtype)
    dweight, dbias = poisoned((2, 200), dtype)
    found = []
    K.layer_norm.forward(x, weight, weight, y, mean, rstd, 1e-5)
    K.layer_norm.backward(dy, x, weight, mean, rstd, dx, dweight, dbias, False)
    found += [y.copy(), dx.copy(), dweight.copy(), dbias.copy()]
    K.rms_norm.forward(x, weight, y, rstd, 1e-5)
    K.rms_norm.backward(dy, x, weight, rstd, dx, dweight, False)
    found += [y.copy(), dx.copy(), dweight.copy()]
    K.linear.backward_bias(x, dbias, False)
    targets = np.arange(300, dtype=np.int64) % 200
    K.cross_entropy.forward(x, targets, losses, lse, -100)
    K.cross_entropy.backward(x, targets, lse, dx, np.array(0.25), -100)
    found += [dbias.copy(), losses, lse, dx.copy(), K.reduce.power_sums(x.reshape(-1), 2.0)]
    q = normal((2, 150, 3, 3, 8), dtype)  # batch, time, (q, k, v), heads, head_dim
    q, k, v = (q[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    out, weights = poisoned((2, 3, 150, 8), dtype), poisoned((2, 3, 150), dtype)
    gradients = poisoned((3, 2, 3, 150, 8), dtype)
    K.attention.forward(q, k, v, out, weights, causal=True, scale=0.3)
    K.attention.backward(out, q, k, v, out, weights, *gradients, causal=True, scale=0.3)
    return [*found, out, weights, gradients]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype):
    before = K.threads()
    results = []
    for count in (1, 2, 3):
        K.set_threads(count)
        results.append(outputs_of_all(dtype))
    K.set_threads(before)
    for alone, two, three in zip(*results, strict=True):
        assert np.isfinite(alone).all()
        assert np.array_equal(alone, two) and np.array_equal(alone, three)
