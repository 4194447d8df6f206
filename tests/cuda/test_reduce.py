"""Sums in a fixed order: over buffers with the CPU's bits, over rows, of powers; and the largest element."""

from math import fsum

import numpy as np
import pytest

from shardrt.kernels.cpu import cast
from shardrt.kernels.cpu import reduce as cpu
from shardrt.kernels.cuda import reduce as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

PARTS = [1, 2, 3, 5, 6, 7, 8, 9, 17, 65]


@pytest.mark.parametrize("element", ["float32", "float64"])
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_sum_into_has_the_bits_of_the_cpu(emulated, element, parts, accumulate):
    with guarded(element) as array:
        pieces = [array(normal(131, seed=seed)) for seed in range(parts)]
        out = array(normal(131, seed=99) if accumulate else np.full(131, np.nan))
        expected = out.copy()
        cuda.sum_into(out, pieces, 0.3, accumulate)
        cpu.sum_into(expected, pieces, 0.3, accumulate)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("count", [1, 3, 17, 2051])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("parts", [3, 9])
def test_sum_into_of_every_type(emulated, element, count, shift, parts):
    with guarded(element) as array:
        pieces = [array(normal(count, seed=seed), shift) for seed in range(parts)]
        out = array(np.full(count, np.nan), shift)
        cuda.sum_into(out, pieces, 0.5, False)
        assert_close(out, 0.5 * sum(piece.astype(np.float64) for piece in pieces))


def test_sum_into_one_of_the_parts(emulated):
    with guarded("float32") as array:
        pieces = [array(normal(100, seed=seed)) for seed in range(10)]
        expected = np.empty(100, np.float32)
        cpu.sum_into(expected, pieces, 1.0, False)
        cuda.sum_into(pieces[4], pieces, 1.0, False)
        np.testing.assert_array_equal(pieces[4], expected)


def test_many_parts_are_summed_in_chunks(emulated, monkeypatch):
    monkeypatch.setattr(cuda, "_CHUNK", 64)
    with guarded("float32") as array:
        pieces = [array(normal(131, seed=seed)) for seed in range(9)]
        out, expected = array(np.full(131, np.nan)), np.empty(131, np.float32)
        cuda.sum_into(out, pieces, 1.0, False)
        cpu.sum_into(expected, pieces, 1.0, False)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("parts", [1, 3, 8, 11])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_sum_packed_has_the_bits_of_the_cpu(emulated, kind, parts, accumulate, shift):
    with guarded("float32") as array:
        pieces = []
        for seed in range(parts):
            pieces.append(array(np.zeros(131), shift, np.uint16))
            cast.pack(normal(131, seed=seed).astype(np.float32), pieces[-1], kind)
        out = array(normal(131, seed=99) if accumulate else np.full(131, np.nan), shift)
        expected = out.copy()
        cuda.sum_packed(out, pieces, 0.3, accumulate, kind)
        cpu.sum_packed(expected, pieces, 0.3, accumulate, kind)
        np.testing.assert_array_equal(out, expected)


def test_sum_packed_refuses_other_kinds(emulated):
    with pytest.raises(ValueError, match="got 'float32'"):
        cuda.sum_packed(np.zeros(1, np.float32), [np.zeros(1, np.uint16)], 1.0, False, "float32")


def test_column_sum_of_8192_rows_keeps_every_multiprocessor_busy(emulated, monkeypatch):
    """A block of 256 threads that each load eight times 16 bytes: 384 of them, an H200 has 132."""
    asked = []
    monkeypatch.setattr(emulated, "launch", lambda *call: asked.append(call[2:5]))
    with guarded("bfloat16") as array:
        cuda.column_sum(array(np.zeros((8192, 768))), array(np.zeros(768)), False)
    assert asked == [("column_blocks", (128, 3, 1), 256), ("combine", (24, 1, 1), 1024)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kinds", [("float32", "float32"), ("bfloat16", "float32")], ids=str)
def test_two_sums_of_partial_sums_take_one_launch_where_they_are_of_one_type(emulated, accumulate, kinds):
    with guarded("float32") as array:
        partials = [array(normal(70, 45, seed=seed)) for seed in range(2)]
        outs = [array(normal(45, seed=9), dtype=dtype_of(kind)) for kind in kinds]
        expected = [
            p.sum(0) + (o.astype(np.float64) if accumulate else 0)
            for p, o in zip(partials, outs, strict=True)
        ]
        cuda.combine_two(list(zip(partials, outs, strict=True)), accumulate)
        for found, exactly in zip(outs, expected, strict=True):
            assert_close(found, exactly)
    assert emulated.launches == ["combine"] * len(set(kinds))


@pytest.mark.parametrize("accumulate", [False, True])
def test_column_sum_of_no_rows(emulated, accumulate):
    with guarded("float32") as array:
        out = array(np.ones(5))
        cuda.column_sum(np.zeros((0, 5), np.float32), out, accumulate)
        np.testing.assert_array_equal(out, 1 if accumulate else 0)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("p", [1.0, 2.0, 2.5, 3.0])
@pytest.mark.parametrize("count", [1, 17, 4099, 65539])
def test_power_sums_round_to_the_exact_sum(emulated, element, p, count):
    with guarded(element) as array:
        x = array(normal(count) * 10.0 ** np.random.default_rng(1).integers(-2, 3, count))
        found = fsum(cuda.power_sums(x, p).ravel())
        exact = fsum(cpu.power_sums(x.astype(np.float64), p).ravel())
        assert found == exact if p != 2.5 else found == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("element", ["float32", "float64", "bfloat16"])
def test_power_sums_are_the_same_however_the_array_is_cut(emulated, element):
    with guarded(element) as array:
        x = array(normal(5000))
        whole = fsum(cuda.power_sums(x, 2.0).ravel())
        pieces = [cuda.power_sums(x[start:stop], 2.0) for start, stop in ((0, 1), (1, 3333), (3333, 5000))]
        assert fsum(np.concatenate(pieces).ravel()) == whole


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 999])
def test_power_sums_of_what_is_not_finite(emulated, bad, place):
    x = normal(1000).astype(np.float32)
    x[place] = bad
    with guarded("float32") as array:
        np.testing.assert_array_equal(cuda.power_sums(array(x), 2.0), [[abs(bad), 0]])


@pytest.mark.parametrize("count", [0, 1, 3, 2000])
def test_pairs_add_up_to_the_exact_sum(emulated, count):
    random = np.random.default_rng(count)
    pairs = np.ldexp(random.random((count, 2)), random.integers(-20, 20, (count, 1)))
    pairs[:, 1] = np.ldexp(pairs[:, 1] - pairs[:, 0] / 2, -53)
    with guarded("float64") as array:
        out = array(np.full(2, np.nan))
        cuda.add_pairs(array(pairs), out)
        exact = np.empty(2)
        cpu.add_pairs(pairs, exact)
        assert out[0] + out[1] == exact[0] + exact[1] == fsum(pairs.ravel())
        assert out[1] == pytest.approx(fsum([*pairs.ravel(), -out[0]]), rel=1e-12, abs=0)


@pytest.mark.parametrize("bad", [np.inf, np.nan, 1e308])
@pytest.mark.parametrize("place", [0, 299])
def test_pairs_that_are_not_finite_or_too_large_together(emulated, bad, place):
    pairs = np.full((300, 2), [1e308, 1.0])
    pairs[place] = bad, 0
    with guarded("float64") as array:
        out, expected = array(np.zeros(2)), np.zeros(2)
        cuda.add_pairs(array(pairs), out)
        cpu.add_pairs(pairs, expected)
        np.testing.assert_array_equal(out, [np.nan if np.isnan(bad) else np.inf, 0])
        np.testing.assert_array_equal(expected, out)


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("limit", [0.7, 1e9, np.inf])
@pytest.mark.parametrize("value", [0, 2.0, np.inf, np.nan])
def test_the_factor_of_clipping_is_that_of_the_cpu(emulated, value, limit, leave):
    with guarded("float64") as array:
        pairs, out, expected = np.array([[value, 2**-55], [1, 0]]), array(np.zeros(2)), np.zeros(2)
        cuda.clip_factor(array(pairs), limit, leave, out)
        cpu.clip_factor(pairs, limit, leave, expected)
        np.testing.assert_array_equal(out, expected)
    norm = np.sqrt(value + 1)
    with np.errstate(invalid="ignore"):
        factor = 1.0 if leave and not np.isfinite(norm) else np.minimum(limit / (norm + 1e-6), 1.0)
    assert list(out) == pytest.approx([norm, factor], nan_ok=True)


def test_power_sums_of_nothing(emulated):
    assert cuda.power_sums(np.zeros(0, np.float32), 2.0).shape == (0, 2)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("count", [1, 3, 17, 9001])
@pytest.mark.parametrize("shift", [0, 1])
def test_abs_max(emulated, element, count, shift):
    with guarded(element) as array:
        x = array(-np.abs(normal(count)), shift)
        assert cuda.abs_max(x) == np.abs(x.astype(np.float64)).max()


@pytest.mark.parametrize("place", [0, 31, 32, 4100, 9000])
@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_abs_max_is_nan_where_one_is(emulated, element, place):
    values = normal(9001)
    values[-1], values[0], values[place] = np.inf, np.inf, np.nan
    with guarded(element) as array:
        assert np.isnan(cuda.abs_max(array(values)))


def test_abs_max_of_nothing():
    assert cuda.abs_max(np.zeros(0, np.float32)) == 0


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 1000, 65_537, 600_001])
@pytest.mark.parametrize("shift", [0, 1])
def test_exact_power_sums_are_those_of_the_cpu(emulated, p, count, shift):
    bits = np.random.default_rng(count).integers(0, 2**32, count, dtype=np.uint32)
    with guarded("float32") as array:
        x = array(np.zeros(count), shift)
        x.view(np.uint32)[...] = bits  # nan and infinities among them
        found, expected = cuda.exact_power_sums(x, p), cpu.exact_power_sums(x, p)
        carry = np.array(
            [1, 2**24], object
        )  # what the two limbs of a row say; several pairs may say the same
        np.testing.assert_array_equal(found.astype(object) @ carry, expected.astype(object) @ carry)
        np.testing.assert_array_equal(found[255], expected[255])
