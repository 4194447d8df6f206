"""Contracts of the way of tokens to experts and back."""

import numpy as np

from tests.contracts import Call, Out, Wide, contract
from tests.cuda.numbers import normal

EXACT = ("float32", "float64")


def scores_of(kind, tokens, count):
    scores = normal(tokens, count)
    if kind == "ties":
        scores = np.round(scores)
    if kind == "equal":
        scores[:] = 1
    if kind == "odd":
        scores[::2, ::3], scores[1::2], scores[:, 1::4] = np.nan, -np.inf, np.inf
    return scores


def chosen(scores, k):
    """The k highest of each row in ascending order, of equal ones the first; nan counts as -infinity."""
    order = np.argsort(-np.where(np.isnan(scores), -np.inf, scores), 1, kind="stable")
    return np.sort(order[:, :k], 1)


@contract("route.top_k")
def top_k():
    for kind in ("random", "ties", "equal", "odd"):
        for count, k in ((1, 1), (4, 2), (8, 8), (33, 5), (70, 33)):
            args = scores_of(kind, 11, count), Out()
            yield Call(args, lambda scores, k=k: chosen(scores, k), elements=EXACT)
    no_tokens = np.zeros((0, 4)), Out(np.zeros((0, 2), np.int64))
    yield Call(no_tokens, lambda scores, experts: experts, elements=EXACT)


@contract("route.take")
def take():
    scores = normal(9, 40)
    args = scores, chosen(scores, 3), Out()
    yield Call(args, lambda x, at: np.take_along_axis(x, at, 1), exact=True, elements=EXACT)


@contract("route.put")
def put():
    def gradient(dy, experts):
        dscores = np.zeros((9, 40))
        np.put_along_axis(dscores, experts, dy, 1)
        return dscores

    args = normal(9, 3), chosen(normal(9, 40), 3), Out()
    yield Call(args, gradient, exact=True, elements=EXACT)


def order_of(experts, priority, capacity, count):
    """places, copies, counts: an expert keeps the copies of highest priority, of equal ones the first."""
    chosen = experts.reshape(-1)
    places, copies = np.full(chosen.size, -1), []
    counts = np.zeros((2, count), np.int64)
    for expert in range(count):
        mine = np.flatnonzero(chosen == expert)
        counts[0, expert] = mine.size
        if priority is not None:
            by = np.where(np.isnan(priority), np.inf, priority).reshape(-1)[mine]
            mine = np.sort(mine[np.argsort(-by, kind="stable")[:capacity]])
        counts[1, expert] = mine.size
        places[mine] = len(copies) + np.arange(mine.size)
        copies += list(mine)
    rows = chosen.size if priority is None else min(chosen.size, count * capacity)
    copies = np.pad(np.array(copies, np.int64), (0, rows - len(copies)), constant_values=-1)
    return places.reshape(experts.shape), copies, counts


@contract("route.order")
def order():
    """Of experts at random, of some that most choose, and of those that all choose."""
    for tokens, count, k in ((0, 4, 2), (1, 4, 2), (50, 4, 2), (33, 64, 8), (300, 7, 7), (9, 300, 3)):
        for skew in (0.0, 1.0, 1e9):
            experts = chosen(normal(tokens, count) + skew * np.arange(count), k)
            priority = np.round(np.abs(normal(tokens, k)), 1)
            if tokens > 20:
                priority[::7, 0] = np.nan
            for by, capacity in ((None, 0), (priority, 0), (priority, 3), (priority, 10_000)):

                def truth(experts, priority=None, capacity=capacity, count=count):
                    return order_of(experts, priority, capacity, count)

                args = experts, by, capacity, Out(), Out(), Out()
                yield Call(args, truth, elements=EXACT, offsets=(0,))


def places_of(capacity):
    """places (tokens, k) and copies (rows,) of 23 tokens with 3 experts each; -1 where a token is dropped."""
    experts = chosen(normal(23, 6) + np.arange(6), 3)
    copies = []
    for expert in range(6):
        own = np.flatnonzero(experts.reshape(-1) == expert)
        copies += list(
            own
            if capacity is None
            else np.pad(own[:capacity], (0, max(0, capacity - len(own))), constant_values=-1)
        )
    copies = np.array(copies, np.int64)
    places = np.full(experts.size, -1)
    places[copies[copies >= 0]] = np.flatnonzero(copies >= 0)
    return places.reshape(experts.shape), copies


def ways():
    """places, copies, width, and weights or None."""
    for capacity in (None, 5):
        for width in (1, 16, 33):
            for weights in ((), (Wide(np.abs(normal(23, 3))),)):
                yield *places_of(capacity), width, weights


@contract("route.spread")
def spread():
    def rows(x, *rest):
        *weights, copies = rest
        there = x[copies // 3] * (weights[0].reshape(-1)[copies][:, None] if weights else 1.0)
        return np.where(copies[:, None] >= 0, there, 0)

    for _, copies, width, weights in ways():
        yield Call((normal(23, width), *(weights or (None,)), copies, 3, Out()), rows)
    yield Call((np.zeros((0, 3)), None, np.zeros(0, np.int64), 2, Out()), lambda x, copies: x)


@contract("route.collect")
def collect():
    def sums(x, *rest):
        *weights, places = rest
        back = x[places] * (weights[0][..., None] if weights else 1.0)
        return np.where(places[..., None] >= 0, back, 0).sum(1)

    for places, copies, width, weights in ways():
        yield Call((normal(copies.size, width), *(weights or (None,)), places, Out()), sums)
    yield Call((np.zeros((0, 3)), None, np.zeros((0, 2), np.int64), Out()), lambda x, places: x)


@contract("route.weights_backward")
def weights_backward():
    def gradient(dy, x, places):
        return np.where(places >= 0, (dy[:, None] * x[places]).sum(2), 0)

    for places, copies, width, weights in ways():
        if not weights:
            args = normal(23, width), normal(copies.size, width, seed=1), places, Out(wide=True)
            yield Call(args, gradient)
