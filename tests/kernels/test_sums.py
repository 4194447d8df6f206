"""kernels/cpu/reduce.py: the tree of sums over ranks, in 32 and 16 bits, and sums of powers, to the bit."""

from fractions import Fraction
from math import fsum, inf, isnan, nan, nextafter

import numpy as np
import pytest

from shardrt.kernels import cpu as K
from shardrt.nn.exact import norm_of
from tests.contracts.sums import tree

SIZE = 40_003
CUTS = [(0, 17), (17, 17), (17, 20_000), (20_000, SIZE)]


def normal(size, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def in_pieces(sum_up, out, parts):
    """The same sum, made piece by piece."""
    cut = out.copy()
    for low, high in CUTS:
        sum_up(cut[low:high], [cut[low:high] if part is out else part[low:high] for part in parts])
    return cut


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("size", [7, SIZE])
@pytest.mark.parametrize("own", [None, 0, 1])
def test_two_parts_few_or_many_add_up_without_a_word_about_infinity(size, scale, own):
    parts = [normal(size, np.float32, seed) for seed in range(2)]
    parts[0][:2], parts[1][:2] = inf, (-inf, 1)
    out = np.empty(size, np.float32) if own is None else parts[own]
    with np.errstate(all="ignore"):
        expected = np.float32(scale) * (parts[0] + parts[1])
    K.reduce.sum_into(out, parts, scale, False)
    assert isnan(out[0]) and out[1] == inf
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 8, 9, 23])
@pytest.mark.parametrize(("accumulate", "own"), [(True, None), (False, 0), (False, -1)])
def test_a_sum_is_the_tree_of_neighbours_and_may_be_cut_anywhere(
    dtype, parts, accumulate, own, kernel_threads
):
    buffers = [normal(SIZE, dtype, seed) for seed in range(parts)]
    out = normal(SIZE, dtype, 99) if own is None else buffers[own]
    expected = dtype(0.3) * tree(buffers)
    if accumulate:
        expected = out + expected

    def sum_up(out, parts):
        K.reduce.sum_into(out, parts, 0.3, accumulate)

    cut = in_pieces(sum_up, out, buffers)
    sum_up(out, buffers)
    assert np.array_equal(out, expected)
    assert np.array_equal(cut, expected)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_packed_sum_is_the_sum_of_the_unpacked(kind, parts, accumulate, kernel_threads):
    packed, unpacked = np.empty((parts, SIZE), np.uint16), np.empty((parts, SIZE), np.float32)
    for i in range(parts):
        K.cast.pack(normal(SIZE, np.float32, i) * np.float32(1e-3), packed[i], kind)
        K.cast.unpack(packed[i], unpacked[i], kind)
    out = normal(SIZE, np.float32, 99)
    expected = out.copy()
    K.reduce.sum_into(expected, list(unpacked), 0.3, accumulate)

    def sum_up(out, parts):
        K.reduce.sum_packed(out, parts, 0.3, accumulate, kind)

    cut = in_pieces(sum_up, out, list(packed))
    sum_up(out, list(packed))
    assert np.array_equal(out, expected)
    assert np.array_equal(cut, expected)


def power_sum(x, p, cuts=((None, None),)):
    return fsum(value for low, high in cuts for value in K.reduce.power_sums(x[low:high], p).ravel())


@pytest.mark.parametrize("p", [1, 2, 3, 0.5, 2.5])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_of_powers_has_the_same_bits_however_it_is_cut(p, dtype, kernel_threads):
    size = 200_001
    x = normal(size, dtype) * np.exp(2 * normal(size, dtype, 1))  # over ten orders of magnitude
    whole = power_sum(x, p)
    for pieces in (2, 3, 7, 64):
        edges = [size * i // pieces for i in range(pieces + 1)]
        assert power_sum(x, p, zip(edges, edges[1:], strict=False)) == whole
    assert power_sum(x[::-1].copy(), p) == whole


def test_infinity_and_nan_come_out_of_a_sum_of_powers():
    for p in (1, 2, 3, 2.5):
        x = np.ones(70_000, np.float32)
        x[69_000] = -inf
        assert power_sum(x, p) == inf
        x[3] = nan
        assert isnan(power_sum(x, p))


def strange(size, seed=0):
    """Floats of every exponent: each pattern of bits that is finite, subnormals and both zeros too."""
    bits = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)
    bits[(bits >> 23) & 255 == 255] &= 0x807FFFFF  # not finite: made subnormal
    bits[:6] = [0, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0x80000000][:size]
    return bits.view(np.float32)


def numbers(table):
    """What the two limbs of each row say; several pairs may say the same."""
    return [low + (high << 24) for low, high in table.tolist()]


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("size", [0, 6, 7, 70_001])
def test_an_exact_norm_is_the_rational_one_rounded_once(p, size, kernel_threads):
    for x in (strange(size), strange(size)[-1:] * np.float32(1e-20), normal(size, np.float32)):
        counts = (np.abs(x).astype(np.float64) * 2.0**149).tolist()  # of the smallest float32
        exact = Fraction(sum(int(count) ** p for count in counts), 2 ** (149 * p))
        norm = norm_of(K.reduce.exact_power_sums(x, p), p)
        if p == 1:
            assert norm == float(exact)
        elif norm == 0:
            assert exact == 0
        else:  # the root lies between the middles to the float64 below and that above
            below, above = (Fraction(norm) + Fraction(nextafter(norm, to)) for to in (0, inf))
            assert (below / 2) ** 2 <= exact <= (above / 2) ** 2


def test_exact_sums_may_be_cut_anywhere_and_hold_the_largest_numbers(kernel_threads):
    x = np.full(2_200_000, np.finfo(np.float32).max, np.float32)
    x[::3] = strange(x[::3].size)
    whole = K.reduce.exact_power_sums(x, 2)
    for edges in ([0, 1, 65_537, 2_200_000], [0, 1_048_575, 1_048_577, 2_200_000]):
        parts = [K.reduce.exact_power_sums(x[a:b], 2) for a, b in zip(edges, edges[1:], strict=False)]
        assert numbers(sum(parts)) == numbers(whole)
    assert numbers(K.reduce.exact_power_sums(x[::-1].copy(), 2)) == numbers(whole)
    largest = K.reduce.exact_power_sums(np.full(2**17, x[1], np.float32), 2)
    assert numbers(largest)[254] == 2**17 * (2**24 - 1) ** 2


@pytest.mark.parametrize("p", [1, 2])
def test_exact_norms_tell_infinity_and_nan(p):
    x = strange(70_000)
    for value, count, expected in ((-inf, 3, inf), (nan, 2, nan)):
        x[[69_000, 1, 2][:count]] = value
        table = K.reduce.exact_power_sums(x, p)
        assert table[255].tolist() == ([0, 3] if expected == inf else [2, 1])
        np.testing.assert_equal(norm_of(table, p), expected)
