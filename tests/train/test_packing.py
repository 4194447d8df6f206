"""Packing: no example is cut, little is wasted, and a sample is a function of its number."""

import numpy as np
import pytest

from shardrt.train.held_out import IGNORED
from shardrt.train.packing import Packed, best_fit

ROOM = 512


def lengths(count=3000, seed=0):
    """As conversations have them: many short ones and a few that fill a window."""
    drawn = np.random.default_rng(seed).lognormal(np.log(ROOM / 5), 0.9, count)
    return np.clip(drawn.astype(int), 2, ROOM)


def windows_of(order, borders):
    return [order[first:last].tolist() for first, last in zip(borders, borders[1:], strict=False)]


def first_fit(sizes, room):
    """The rest of each window, where each example goes in turn to the first that has room."""
    rest = []
    for size in sizes:
        place = next((n for n, left in enumerate(rest) if left >= size), None)
        if place is None:
            rest.append(room - size)
        else:
            rest[place] -= size
    return rest


def best_fit_by_search(sizes, room):
    """The definition, in quadratic time: the number of windows, and their least rests."""
    rest = []
    for size in sorted(sizes, reverse=True):
        fitting = [left for left in rest if left >= size]
        if fitting:
            rest.remove(min(fitting))
            rest.append(min(fitting) - size)
        else:
            rest.append(room - size)
    return sorted(rest)


@pytest.mark.parametrize("seed", range(5))
def test_each_example_is_in_one_window_as_best_fit_decreasing_says(seed):
    sizes = lengths(400, seed)
    windows = windows_of(*best_fit(sizes, ROOM))
    assert sorted(n for window in windows for n in window) == list(range(400))
    rest = sorted(int(ROOM - sizes[window].sum()) for window in windows)
    assert rest[0] >= 0 and rest == best_fit_by_search(sizes.tolist(), ROOM)


def test_little_is_padding_and_nothing_is_cut_where_others_waste_or_cut():
    sizes = lengths()
    total, needed = sizes.sum(), -(-sizes.sum() // ROOM)
    windows = len(best_fit(sizes, ROOM)[1]) - 1
    padding = 1 - total / (windows * ROOM)
    assert padding < 0.003 and windows <= needed + 2
    assert 1 - total / (len(first_fit(sizes, ROOM)) * ROOM) > 3 * padding
    one_each = 1 - total / (len(sizes) * ROOM)
    assert one_each > 0.6
    cut = np.unique(np.searchsorted(np.cumsum(sizes), np.arange(1, needed) * ROOM))
    assert len(cut) > 0.2 * len(sizes), "what concatenation would cut"


@pytest.mark.parametrize(("sizes", "wrong"), [([0], "0 to 0"), ([3, 9], "3 to 9")])
def test_a_length_that_no_window_holds_is_an_error(sizes, wrong):
    with pytest.raises(ValueError, match=f"lengths must be from 1 to room = 8, got {wrong}"):
        best_fit(sizes, 8)


def packed():
    """Example k has the tokens 100 k, 100 k + 1, ... and its last two are an answer."""
    sizes = np.array([3, 5, 2, 4, 6, 3, 3])
    begins = np.concatenate([[0], np.cumsum(sizes + 1)])
    tokens = np.concatenate([100 * k + np.arange(size + 1) for k, size in enumerate(sizes)])
    answers = np.zeros(tokens.size, np.uint8)
    answers[begins[1:] - 1] = answers[begins[1:] - 2] = 1
    return sizes, Packed(tokens.astype(np.uint32), answers, begins[:-1], sizes, np.full(7, 2), 8)


def test_windows_have_whole_examples_their_answers_as_targets_and_the_rest_is_padding():
    sizes, windows = packed()
    tokens, targets, documents = windows.rows(range(len(windows)))
    seen = []
    for row, said, own in zip(tokens, targets, documents, strict=True):
        for number in range(own.max() + 1):
            inside = np.flatnonzero(own == number)
            if number == own.max() and not row[inside].any() and (said[inside] == IGNORED).all():
                continue  # padding
            k = int(row[inside[0]]) // 100
            np.testing.assert_array_equal(row[inside], 100 * k + np.arange(sizes[k]))
            expected = 100 * k + np.arange(1, sizes[k] + 1)
            expected[:-2] = IGNORED
            np.testing.assert_array_equal(said[inside], expected)
            seen.append(k)
    assert sorted(seen) == list(range(7))
    np.testing.assert_array_equal(windows.counts, (targets != IGNORED).sum(axis=1))
    assert windows.padding() == pytest.approx(1 - sizes.sum() / tokens.size)


def test_an_epoch_has_every_window_once_in_an_order_of_seed_and_epoch_alone():
    _, windows = packed()
    count = len(windows)
    all_numbers = windows.numbers(range(4 * count), 5)
    for epoch in all_numbers.reshape(4, count):
        assert sorted(epoch) == list(range(count))
    assert len({tuple(epoch) for epoch in all_numbers.reshape(4, count)}) > 1
    assert windows.numbers(range(4 * count), 6).tolist() != all_numbers.tolist()
    parts = [windows.numbers(range(n, n + 1), 5)[0] for n in range(4 * count)]
    assert parts == all_numbers.tolist()
