"""Sums: into one of the parts, launches, and the last bits of pairs. More: tests/contracts/sums.py."""

from math import fsum

import numpy as np
import pytest

from shardrt.kernels.cpu import reduce as cpu
from shardrt.kernels.cuda import reduce as cuda
from tests.cuda.numbers import assert_close, dtype_of, guarded, normal


def test_sum_into_one_of_the_parts(emulated):
    with guarded("float32") as array:
        pieces = [array(normal(100, seed=seed)) for seed in range(10)]
        expected = np.empty(100, np.float32)
        cpu.sum_into(expected, pieces, 1.0, False)
        cuda.sum_into(pieces[4], pieces, 1.0, False)
        np.testing.assert_array_equal(pieces[4], expected)


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
