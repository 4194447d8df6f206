"""Rows by index, and their gradient: indices outside of a table, parts of tables, the order of sums."""

import numpy as np
import pytest

from shardrt.kernels.cpu import embedding as cpu
from shardrt.kernels.cuda import embedding as cuda
from tests.contracts.products import indices_of
from tests.cuda.numbers import assert_close, guarded, normal


def test_rows_of_one_index_stay_in_order(emulated):
    """1e8 + 1 - 1e8 is 0 in float32, and 1e8 - 1e8 + 1 is 1: the sort is stable."""
    with guarded("float32") as array:
        dy, dweight = array([[1e8], [1e8], [1.0], [-1e8], [-1e8], [1.0]]), array(np.zeros((400, 1)))
        cuda.backward(np.array([399, 3, 399, 3, 399, 3]), dy, dweight)
        assert dweight[399, 0] == 0
        assert dweight[3, 0] == 1


@pytest.mark.parametrize("vocab", [40, 256])
@pytest.mark.parametrize("width", [4, 33])
def test_an_index_outside_gives_nan_and_has_no_gradient(emulated, vocab, width):
    indices = indices_of("often", 333, vocab)
    wrong = np.zeros(333, bool)
    wrong[[0, 7, *range(100, 170)]] = True  # so many that a run of them crosses blocks
    given = indices.copy()
    given[wrong] = [vocab, -1, *[2**32 + 1] * 70]
    with guarded("float32") as array:
        weight, y = array(normal(vocab, width)), array(np.zeros((333, width)))
        cuda.forward(given, weight, y)
        np.testing.assert_array_equal(y[~wrong], weight[indices[~wrong]])
        assert np.isnan(y[wrong]).all()
        dy, dweight = array(normal(333, width)), array(np.zeros((vocab, width)))
        cuda.backward(given, dy, dweight)
        expected = np.zeros((vocab, width))
        cpu.backward(indices[~wrong], dy[~wrong].astype(np.float64), expected)
        assert_close(dweight, expected)


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [16, 33])
def test_a_part_of_a_table_gives_its_rows_and_zeros_for_others(emulated, element, width):
    """In blocks of rows that are all of another part, too; nothing of these is read backward."""
    indices = indices_of("often", 333, 40)
    indices[:100] = 3
    indices[50] = 40  # in no part
    with guarded(element) as array:
        table, dy = array(normal(40, width)), array(normal(333, width, seed=1))
        expected, y = np.ones((40, width)), array(np.zeros((333, width)))
        cpu.backward(indices[indices < 40], dy[indices < 40].astype(np.float64), expected)
        for first, stop in ((0, 2), (2, 30), (30, 40)):
            here = (indices >= first) & (indices < stop)
            cuda.forward(indices, array(table[first:stop]), y, first, 40)
            np.testing.assert_array_equal(y[here], table[indices[here]])
            np.testing.assert_array_equal(y[~here & (indices < 40)], 0)
            assert np.isnan(y[50].astype(np.float32)).all()
            theirs, own = array(dy), array(np.ones((stop - first, width)))
            theirs[~here] = np.nan
            cuda.backward(indices, theirs, own, first)
            assert_close(own, expected[first:stop])


def test_a_part_without_rows_gives_zeros_and_has_no_gradient(emulated):
    with guarded("float32") as array:
        empty, y, indices = array(np.zeros((0, 5))), array(np.ones((2, 5))), np.array([0, 3])
        cuda.forward(indices, empty, y, 4, 4)
        cuda.backward(indices, y, empty, 4)
        np.testing.assert_array_equal(y, 0)
        assert emulated.launches == ["gather"]
