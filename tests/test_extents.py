"""nn/extents.py: its integers say what NumPy's index arrays say."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardrt.nn.extents import Extent, contiguous, cut, size_of, spans, take
from shardrt.nn.overlaps import miscounted, overlaps, put

unhurried = settings(deadline=None)


@st.composite
def runs(draw, stride=None):
    length = draw(st.integers(1, 6 if stride is None else min(6, stride)))
    apart = draw(st.integers(length, length + 9)) if stride is None else stride
    return Extent(draw(st.integers(0, 40)), length, apart, draw(st.integers(1, 8)))


parts = st.lists(runs(), max_size=4).map(tuple)
places = st.integers(-5, 120)


def index(part):
    """The elements of a part, in its order."""
    begins = [r.first + r.stride * np.arange(r.count)[:, None] + np.arange(r.length) for r in part]
    return np.concatenate([np.zeros(0, int), *(elements.ravel() for elements in begins)]).astype(int)


@unhurried
@given(parts)
def test_spans_are_the_elements_in_their_order(part):
    found = [(place + i, first + i) for place, first, length in spans(part) for i in range(length)]
    assert found == list(enumerate(index(part).tolist()))
    assert size_of(part) == len(found)
    assert all(r.stop == index((r,)).max() + 1 for r in part)


@unhurried
@given(parts, places, places)
def test_a_cut_is_a_slice_of_the_elements(part, start, stop):
    expected = index(part)[max(start, 0) : max(stop, 0)]
    found = cut(part, start, stop)
    np.testing.assert_array_equal(index(found), expected)
    assert all(r.length >= 1 and r.count >= 1 and r.stride >= r.length for r in found)


@unhurried
@given(parts, runs())
def test_overlaps_are_the_elements_that_both_have(part, other):
    mine, theirs = index(part), index((other,))
    assert len(set(theirs.tolist())) == theirs.size
    found = [(a + i, b + i) for a, b, count in overlaps(part, other) for i in range(count)]
    where = {element: place for place, element in enumerate(theirs.tolist())}
    expected = [(place, where[e]) for place, e in enumerate(mine.tolist()) if e in where]
    assert sorted(found) == expected


@unhurried
@given(st.data(), st.integers(1, 12), st.integers(1, 40))
def test_miscounted_is_the_first_element_that_is_not_in_exactly_one(data, stride, longest):
    pieces = data.draw(st.lists(runs(stride), max_size=4))
    pieces += [Extent(data.draw(st.integers(0, 40)), data.draw(st.integers(1, longest)), 99, 1)]
    counts = np.bincount(index(pieces))
    wrong = [(element, count) for element, count in enumerate(counts.tolist()) if count != 1]
    assert miscounted(pieces, counts.size) == (wrong[0] if wrong else None)
    rest = [contiguous(element, 1)[0] for element, count in wrong if not count]
    if all(count <= 1 for count in counts):
        assert miscounted([*pieces, *rest], counts.size) is None


@unhurried
@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_columns_of_a_matrix_are_one_runs_and_rows_a_run(rows, columns, data):
    matrix = np.arange(rows * columns).reshape(rows, columns)
    low, high = sorted(data.draw(st.tuples(st.integers(0, columns - 1), st.integers(1, columns))))
    high = max(high, low + 1)
    some_columns = (Extent(low, high - low, columns, rows),)
    np.testing.assert_array_equal(take(some_columns, matrix), matrix[:, low:high].ravel())
    top = data.draw(st.integers(0, rows))
    np.testing.assert_array_equal(take(contiguous(0, top * columns), matrix), matrix[:top].ravel())
    other = np.zeros_like(matrix)
    put(some_columns, other, matrix[:, low:high].ravel())
    np.testing.assert_array_equal(other[:, low:high], matrix[:, low:high])
    assert not np.delete(other, np.s_[low:high], axis=1).any()


def test_neighbours_are_taken_without_a_copy():
    whole = np.arange(12).reshape(3, 4)
    assert take(contiguous(4, 8), whole).base is whole.base
    assert take((), whole).size == 0
