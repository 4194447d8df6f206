"""Tokens to experts and back: the choice, the order of rows, and the copies between tokens and rows.

A copy is one choice of one token: number token * k + choice. Rows are copies in order of (expert, token), and
a token's choices are in ascending order of experts, so that sums over them have one order.
"""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import exact, fused, reordered
from shardrt.kernels.cpu._threads import run_rows


@cost("scores -> experts", flops=lambda scores, experts: scores.size * experts.shape[1])
def top_k(scores: Array, experts: Array) -> None:
    """The k largest of each row, ties to the lowest: scores (tokens, count) -> experts int64 (tokens, k).

    In ascending order. What is not a number counts as -infinity.
    """
    run_rows(_top_k, experts.shape[0], scores.size * experts.shape[1], scores, experts)


@cost("scores experts -> y", flops=lambda y: y.size)
def take(scores: Array, experts: Array, y: Array) -> None:
    """y[t, j] = scores[t, experts[t, j]]; y (tokens, k)."""
    run_rows(_take, experts.shape[0], experts.size, scores, experts, y)


@cost("dy experts -> dscores", flops=lambda dscores: dscores.size)
def put(dy: Array, experts: Array, dscores: Array) -> None:
    """Backward of take: dscores is 0 where nothing was taken."""
    run_rows(_put, experts.shape[0], dscores.size, dy, experts, dscores)


@cost("experts priority -> places copies counts")
def order(
    experts: Array, priority: Array | None, capacity: int, places: Array, copies: Array, counts: Array
) -> None:
    """Where each copy lies among the rows.

    experts int64 (tokens, k); priority (tokens, k) of non-negative numbers, or None: an expert of more than
    `capacity` copies keeps those of the highest, then those of the first tokens. places int64 (tokens, k):
    the row of each copy, -1 where it is dropped; copies int64 (rows,): the copy in each row, -1 behind the
    last; counts int64 (2, count): of each expert's copies before and after.
    """
    kept = experts.reshape(-1)
    counts[0] = np.bincount(kept, minlength=counts.shape[1])
    if priority is not None:
        kept = kept.copy()
        for expert in np.nonzero(counts[0] > capacity)[0]:
            mine = np.nonzero(kept == expert)[0]
            bits = priority.reshape(-1)[mine].view(f"u{priority.itemsize}")  # in the order of the numbers
            kept[mine[np.argsort(~bits, kind="stable")[capacity:]]] = -1
    counts[1] = np.minimum(counts[0], capacity) if priority is not None else counts[0]
    _order(kept, np.cumsum(counts[1]) - counts[1], places.reshape(-1), copies)


@cost("x weights copies -> y", flops=lambda y: y.size, more=lambda x, copies: _moved(x, copies))
def spread(x: Array, weights: Array | None, copies: Array, k: int, y: Array) -> None:
    """y[r] = x[copies[r] // k], times that copy's weight: tokens to rows; 0 behind the last row.

    x (tokens, width), weights (tokens, k) or None, y (rows, width).
    """
    factors = np.ones(1, x.dtype) if weights is None else weights.reshape(-1)
    run_rows(_spread, copies.size, y.size, x, factors, weights is not None, copies, k, y)


@cost(
    "x weights places -> y",
    flops=lambda x, places: 2 * places.size * x.shape[1],
    more=lambda x, places: _moved(x, places),
)
def collect(x: Array, weights: Array | None, places: Array, y: Array) -> None:
    """y[t] = the sum of x[places[t, j]] over j, each times weights[t, j]: rows to tokens.

    x (rows, width), weights (tokens, k) or None, y (tokens, width). What was dropped adds nothing.
    """
    factors = np.ones((1, 1), x.dtype) if weights is None else weights
    run_rows(_collect, places.shape[0], x.size, x, factors, weights is not None, places, y)


@cost(
    "x dy places -> dweights",
    flops=lambda x, places: 2 * places.size * x.shape[1],
    more=lambda x, places: _moved(x, places),
)
def weights_backward(dy: Array, x: Array, places: Array, dweights: Array) -> None:
    """Of the weights in collect: dweights[t, j] = dy[t] . x[places[t, j]], 0 where the copy was dropped."""
    run_rows(_weights_backward, places.shape[0], x.size, dy, x, places, dweights)


@exact
def _top_k(start, stop, scores, experts):
    count, k = scores.shape[1], experts.shape[1]
    free = np.empty(count, np.bool_)
    for row in range(start, stop):
        free[:] = True
        for _ in range(k):
            best, highest = -1, scores.dtype.type(0)
            for i in range(count):
                value = scores[row, i]
                if value != value:
                    value = scores.dtype.type(-np.inf)
                if free[i] and (best < 0 or value > highest):
                    best, highest = i, value
            free[best] = False
        j = 0
        for i in range(count):
            if not free[i]:
                experts[row, j] = i
                j += 1


@exact
def _take(start, stop, scores, experts, y):
    for row in range(start, stop):
        for j in range(experts.shape[1]):
            y[row, j] = scores[row, experts[row, j]]


@exact
def _put(start, stop, dy, experts, dscores):
    for row in range(start, stop):
        dscores[row, :] = 0
        for j in range(experts.shape[1]):
            dscores[row, experts[row, j]] = dy[row, j]


@exact
def _order(experts, ends, places, copies):
    rows = 0
    for copy in range(experts.size):
        expert = experts[copy]
        if expert < 0:
            places[copy] = -1
            continue
        place = ends[expert]
        ends[expert] = place + 1
        places[copy] = place
        copies[place] = copy
        rows += 1
    copies[rows:] = -1


@exact
def _spread(start, stop, x, weights, weighted, copies, k, y):
    for row in range(start, stop):
        copy, out = copies[row], y[row]
        if copy < 0:
            out[:] = 0
            continue
        source = x[copy // k]
        factor = weights[copy] if weighted else x.dtype.type(1)
        for i in range(out.size):
            out[i] = factor * source[i]


@fused
def _collect(start, stop, x, weights, weighted, places, y):
    for row in range(start, stop):
        out = y[row]
        out[:] = 0
        for j in range(places.shape[1]):
            place = places[row, j]
            if place < 0:
                continue
            source = x[place]
            factor = weights[row, j] if weighted else x.dtype.type(1)
            for i in range(out.size):
                out[i] += factor * source[i]


@reordered
def _weights_backward(start, stop, dy, x, places, dweights):
    for row in range(start, stop):
        upper = dy[row]
        for j in range(places.shape[1]):
            place = places[row, j]
            total = dweights.dtype.type(0)
            if place >= 0:
                source = x[place]
                for i in range(upper.size):
                    total += upper[i] * source[i]
            dweights[row, j] = total


def _moved(x: Array, places: Array) -> int:
    """Bytes that move besides all of x: a row of x moves for each of `places`."""
    return (places.size - len(x)) * x.shape[1] * x.dtype.itemsize
