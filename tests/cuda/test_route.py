"""Tokens to experts and back: the CPU's choices and rows exactly, its sums in float64."""

import numpy as np
import pytest

from shardrt.kernels.cpu import route as cpu
from shardrt.kernels.cuda import route as cuda
from tests.cuda.numbers import ELEMENTS, assert_close, dtype_of, guarded, normal

EXACT = {"float64": "float64"}  # what weights have; of other elements float32


def weights_of(array, element, *shape):
    return array(np.abs(normal(*shape)), dtype=dtype_of(EXACT.get(element, "float32")))


def scores_of(kind, tokens, count):
    scores = normal(tokens, count)
    if kind == "ties":
        scores = np.round(scores)
    if kind == "equal":
        scores[:] = 1
    if kind == "odd":
        scores[::2, ::3], scores[1::2], scores[:, 1::4] = np.nan, -np.inf, np.inf
    return scores


def chosen(kernels, scores, k):
    experts = np.full((len(scores), k), -7, np.int64)
    kernels.top_k(scores, experts)
    return experts


@pytest.mark.parametrize("element", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "odd"])
@pytest.mark.parametrize("count, k", [(1, 1), (4, 2), (8, 8), (33, 5), (70, 33)])
def test_the_choice(emulated, element, kind, count, k):
    with guarded(element) as array:
        scores = array(scores_of(kind, 11, count))
        experts = array(np.full((11, k), -7), dtype=np.int64)
        cuda.top_k(scores, experts)
        np.testing.assert_array_equal(experts, chosen(cpu, scores, k))


@pytest.mark.parametrize("element", ["float32", "float64"])
def test_the_scores_of_the_chosen_and_their_gradient(emulated, element):
    with guarded(element) as array:
        scores, dy = array(normal(9, 40)), array(normal(9, 3))
        experts = chosen(cpu, scores, 3)
        y, dscores = array(np.full((9, 3), np.nan)), array(np.full((9, 40), np.nan))
        cuda.take(scores, experts, y)
        cuda.put(dy, experts, dscores)
        expected = np.zeros((9, 40), dy.dtype)
        np.put_along_axis(expected, experts, dy, 1)
        np.testing.assert_array_equal(y, np.take_along_axis(scores, experts, 1))
        np.testing.assert_array_equal(dscores, expected)


def experts_of(kind, tokens, count, k):
    if kind == "one":
        return np.tile(np.arange(count - k, count), (tokens, 1))
    scores = normal(tokens, count) + (np.arange(count) if kind == "skewed" else 0)
    return chosen(cpu, scores, k)


def ordered(kernels, array, experts, count, priority, capacity):
    rows = experts.size if priority is None else min(experts.size, count * capacity)
    places, copies, counts = (
        array(np.full(s, -7), dtype=np.int64) for s in (experts.shape, rows, (2, count))
    )
    kernels.order(experts, priority, capacity, places, copies, counts)
    return places, copies, counts


@pytest.mark.parametrize("element", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["random", "skewed", "one"])
@pytest.mark.parametrize("tokens, count, k", [(1, 4, 2), (50, 4, 2), (33, 64, 8), (300, 7, 7), (9, 300, 3)])
def test_the_order_of_rows(emulated, element, kind, tokens, count, k):
    experts = experts_of(kind, tokens, count, k)
    with guarded(element) as array:
        priority = array(np.round(np.abs(normal(tokens, k)), 1))
        if tokens > 20:
            priority[::7, 0] = np.nan
        for by, capacity in ((None, 0), (priority, 0), (priority, 3), (priority, 10_000)):
            got, wanted = (ordered(kernels, array, experts, count, by, capacity) for kernels in (cuda, cpu))
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("width", [1, 16, 33])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("capacity", [None, 5])
def test_to_the_rows_and_back(emulated, element, width, shift, capacity):
    experts = experts_of("skewed", 23, 6, 3)
    with guarded(element) as array:
        weights = weights_of(array, element, 23, 3)
        priority = None if capacity is None else weights
        places, copies, _ = ordered(cpu, array, experts, 6, priority, capacity or 0)
        x, inside = array(normal(23, width), shift), array(normal(copies.size, width), shift)
        y, back = array(np.zeros_like(inside), shift), array(np.zeros_like(x), shift)
        for factors in (None, weights):
            wide = None if factors is None else factors.astype(np.float64)
            for name, given, places_of, out in (
                ("spread", x, (copies, 3), y),
                ("collect", inside, (places,), back),
            ):
                out[...] = np.nan
                getattr(cuda, name)(given, factors, *places_of, out)
                expected = np.zeros(out.shape)
                getattr(cpu, name)(given.astype(np.float64), wide, *places_of, expected)
                assert_close(out, expected)
        found = array(np.full((23, 3), np.nan), dtype=weights.dtype)
        cuda.weights_backward(x, inside, places, found)
        expected = np.zeros((23, 3))
        cpu.weights_backward(x.astype(np.float64), inside.astype(np.float64), places, expected)
        assert_close(found, expected)


def test_no_tokens(emulated):
    none = np.zeros((0, 2), np.int64)
    with guarded("float32") as array:
        cuda.top_k(array(np.zeros((0, 4))), none)
        _, _, counts = ordered(cuda, array, none, 4, None, 0)
        np.testing.assert_array_equal(counts, 0)
        cuda.spread(array(np.zeros((0, 3))), None, np.zeros(0, np.int64), 2, array(np.zeros((0, 3))))
        cuda.collect(array(np.zeros((0, 3))), None, none, array(np.zeros((0, 3))))
