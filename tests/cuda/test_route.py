"""The order of tokens by expert is the CPU's; no tokens at all."""

import numpy as np
import pytest

from shardrt.kernels.cpu import route as cpu
from shardrt.kernels.cuda import route as cuda
from tests.contracts.routes import chosen
from tests.cuda.numbers import guarded, normal


def experts_of(kind, tokens, count, k):
    if kind == "one":
        return np.tile(np.arange(count - k, count), (tokens, 1))
    scores = normal(tokens, count) + (np.arange(count) if kind == "skewed" else 0)
    return chosen(scores, k)


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


def test_no_tokens(emulated):
    none = np.zeros((0, 2), np.int64)
    with guarded("float32") as array:
        cuda.top_k(array(np.zeros((0, 4))), none)
        _, _, counts = ordered(cuda, array, none, 4, None, 0)
        np.testing.assert_array_equal(counts, 0)
        cuda.spread(array(np.zeros((0, 3))), None, np.zeros(0, np.int64), 2, array(np.zeros((0, 3))))
        cuda.collect(array(np.zeros((0, 3))), None, none, array(np.zeros((0, 3))))
