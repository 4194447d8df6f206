"""Casts to float8: the bits of ml_dtypes, both ways, and scales."""

import ml_dtypes
import numpy as np
import pytest

from shardrt.kernels.costs import ON_GPU
from shardrt.kernels.cuda import float8
from shardrt.kernels.cuda.float8 import E4M3, E5M2
from tests.cuda.numbers import guarded, normal

MOST = {E4M3: 448, E5M2: 57344}
LEAST = np.float32(1e-12)
SIZES = [(16, 16), (48, 80), (144, 208)]


def bits_of(numbers, kind):
    """Saturating; ml_dtypes gives infinity (or nan) for what is too large."""
    kept = np.clip(numbers.astype(np.float32), -MOST[kind], MOST[kind])
    return kept.astype(getattr(ml_dtypes, kind)).view(np.uint8)


def scaled(x, kind):
    """(bits, the factor that takes them back, amax) by NumPy, in float32 as the kernel."""
    x = x.astype(np.float32)
    amax = np.abs(x).max()
    held = max(amax, LEAST)
    return bits_of(x * (np.float32(MOST[kind]) / held), kind), held / np.float32(MOST[kind]), amax


def cast(array, x, kind, rowwise=True, columnwise=True, scale=None, known=False):
    """The bits as they lie and transposed, and the scale; poison around all."""
    out = [array(np.full(shape, 0xEE), dtype=np.uint8) for shape in (x.shape, x.shape[::-1])]
    scale = array(np.full(2, np.nan), dtype=np.float32) if scale is None else scale
    given = [each if wanted else None for each, wanted in zip(out, (rowwise, columnwise), strict=True)]
    float8.cast(x, kind, *given, scale, known=known)
    return *out, scale


def every_bfloat16():
    """All finite numbers of it, subnormals too; those from 2**17 on saturate."""
    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    return x[np.isfinite(x.astype(np.float32))]


@pytest.mark.parametrize("kind", MOST)
def test_every_bfloat16_and_what_lies_halfway_is_rounded_as_by_ml_dtypes(emulated, kind):
    """With a scale of 1: 448 (57344) is the largest there."""
    numbers = every_bfloat16().astype(np.float32)
    every = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, kind)).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    halves = (every[1:] + every[:-1]) / 2
    beside = [np.nextafter(halves, np.float32(side)) for side in (-np.inf, np.inf)]
    x = np.concatenate([numbers, every, halves, *beside])
    x = x[np.abs(x) <= MOST[kind]]
    x = np.append(x, np.full(-x.size % 256, MOST[kind], np.float32)).reshape(-1, 16)
    with guarded("float32") as array:
        rowwise, columnwise, scale = cast(array, array(x), kind)
        np.testing.assert_array_equal(rowwise, bits_of(x, kind))
        np.testing.assert_array_equal(columnwise, bits_of(x, kind).T)
        assert list(scale) == [1, MOST[kind]]


@pytest.mark.parametrize("kind", MOST)
def test_what_is_too_large_is_the_largest(emulated, kind):
    """With an amax that is told, smaller than that of x."""
    with guarded("float32") as array:
        x = array(np.tile(np.array([1, 1.5, 1e6, 3e38, -1.04, -3e38, 70000, np.inf], np.float32), (16, 2)))
        scale = array(np.array([np.nan, 1]))
        rowwise, *_ = cast(array, x, kind, scale=scale, known=True)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(rowwise, bits_of(x * np.float32(MOST[kind]), kind))


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize("element", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES)
def test_bits_both_ways_and_the_scale(emulated, element, kind, sizes):
    with guarded(element) as array:
        x = array(normal(*sizes) * 3e-5)
        bits, factor, amax = scaled(x, kind)
        rowwise, columnwise, scale = cast(array, x, kind)
        np.testing.assert_array_equal(rowwise, bits)
        np.testing.assert_array_equal(columnwise, bits.T)
        assert list(scale) == [factor, amax]
        emulated.launches.clear()
        again = cast(array, x, kind, rowwise=False, scale=scale, known=True)
        np.testing.assert_array_equal(again[1], bits.T)
        assert (again[0] == 0xEE).all() and list(scale) == [factor, amax]
        assert emulated.launches == [float8._KERNELS[kind]]


@pytest.mark.parametrize("tiny", [0.0, 1e-30])
def test_a_matrix_of_zeros_and_tiny_numbers_has_a_finite_scale(emulated, tiny):
    with guarded("float32") as array:
        rowwise, _, scale = cast(array, array(np.full((16, 16), tiny)), E4M3)
        assert not rowwise.any() and list(scale) == [LEAST / np.float32(448), np.float32(tiny)]


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_hidden(emulated, kind, odd):
    x = normal(32, 32)
    x[17, 5] = odd
    with guarded("float32") as array:
        rowwise, _, scale = cast(array, array(x), kind)
        with np.errstate(invalid="ignore"):
            back = rowwise.view(getattr(ml_dtypes, kind)).astype(np.float32) * scale[0]
        assert not np.isfinite(back).any()


def test_sizes_and_addresses_that_products_do_not_take_are_refused(emulated):
    with guarded("bfloat16") as array:
        for x in (array(np.ones((16, 24))), array(np.ones((8, 16))), array(np.ones((16, 16)), 1)):
            with pytest.raises(ValueError, match="multiples of 16"):
                cast(array, x, E4M3)


CALLS = {
    "cast": {"known": False},
    "cast, amax known": {"known": True},
    "cast, one way": {"known": False, "columnwise": False},
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_cast_costs_is_reported(emulated, monkeypatch, call):
    """Launches, and bytes: with 132 multiprocessors."""
    monkeypatch.setattr(emulated, "multiprocessors", 132)
    scratch, make, chosen = [], emulated.empty, dict(CALLS[call])
    monkeypatch.setattr(emulated, "empty", lambda *how: scratch.append(make(*how)) or scratch[-1])
    with guarded("bfloat16") as array:
        x, scale = array(normal(64, 208)), array(np.ones(2), dtype=np.float32)
        out = [array(np.zeros(shape), dtype=np.uint8) for shape in (x.shape, x.shape[::-1])]
        out[1] = out[1] if chosen.pop("columnwise", True) else None
        float8.cast(x, E4M3, *out, scale, **chosen)
        cost = ON_GPU.float8.cast(x, E4M3, *out, scale, **chosen)
    once = sum(each.nbytes for each in (x, *out, scale) if each is not None)
    again = 0 if chosen["known"] else x.nbytes + 2 * sum(each.nbytes for each in scratch)
    assert (cost.launches, cost.nbytes) == (len(emulated.launches), once + again)
