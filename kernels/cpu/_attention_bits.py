"""Attention's matmuls in bfloat16 by oneDNN: the tiles of attention.py; queries, keys and values are bits.

Scores, sums of exponentials and gradients are float32. Operands of a matmul are rounded: probabilities, dy
and the gradients of scores. Products are made ready once for each size of a tile, and told addresses.
"""

from typing import Any, NamedTuple

import numpy as np

from shardrt.kernels import onednn
from shardrt.kernels.cost import Array
from shardrt.kernels.cpu._jit import exp, larger, reordered
from shardrt.kernels.cpu.cast import narrowed, widened

TILE = 128  # queries: with 256 keys, their scores and gradients are 256 KiB in float32


Span = tuple[slice, slice, int]  # of queries, of the keys for them, and the last of these that the first sees


class Call(NamedTuple):
    """One call of attention's forward or backward, as those of all its heads need it.

    arrays: those of attention.forward or backward. spans: of each sequence. group: how many heads of queries
    share one of keys and values. chunks: whether keys may be in several spans, or in none. window: how many
    keys a query sees at most, in a causal call.
    """

    arrays: tuple[Array, ...]
    spans: list[list[Span]]
    group: int
    chunks: bool
    causal: bool
    scale: Any
    window: int

    @property
    def keys(self) -> int:
        """Of the longest span."""
        return max((others.stop - others.start for row in self.spans for _, others, _ in row), default=0)

    @property
    def heads(self) -> int:
        """Of queries, in a sequence."""
        return self.arrays[0].shape[1]


class _Heads(NamedTuple):
    """Where the rows of (batch, heads, time, head_dim) lie: an address, and the bytes between neighbours."""

    address: int
    sequence: int
    head: int
    row: int
    item: int
    width: int

    def at(self, sequence: int, head: int, row: int) -> int:
        return self.address + sequence * self.sequence + head * self.head + row * self.row

    def rows(self, count: int) -> onednn.Matrix:
        return onednn.described(count, self.width, self.row // self.item, 1, self.item)


def forward(start: int, stop: int, call: Call) -> None:
    """As attention._forward."""
    onednn.library().with_threads(1, _forward, start, stop, call)


def backward(start: int, stop: int, call: Call) -> None:
    """As attention._backward."""
    onednn.library().with_threads(1, _backward, start, stop, call)


def tiles(time: int, keys: int, first: int, causal: bool) -> list[tuple[int, int, int]]:
    """(first query, one past the last, keys that they see) of every tile."""
    found = [(low, min(low + TILE, time)) for low in range(0, time, TILE)]
    return [(low, high, first + high if causal else keys) for low, high in found]


def _forward(start: int, stop: int, call: Call) -> None:
    (arrays, spans, group, _, causal, scale, window), heads = call, call.heads
    q, k, v, y = map(heads_of, arrays[:4])
    lse = arrays[4]
    (memory,), (bits,) = _scratch(arrays[0], call.keys, 1)
    ready: dict[tuple[int, int], tuple] = {}
    for number in range(start * group, stop * group):
        sequence, head = divmod(number, heads)
        for own, others, first in spans[sequence]:
            here = (sequence, head // group, others.start)
            for low, high, seen in tiles(own.stop - own.start, others.stop - others.start, first, causal):
                size = rows, _ = high - low, seen
                if size not in ready:
                    ready[size] = _products_forward(q, k, v, y, rows, seen)
                score, mix = ready[size]
                place = sequence, head, own.start + low
                scores, weights = (x[: rows * seen].reshape(size) for x in (memory, bits))
                score(q.at(*place), k.at(*here), memory.ctypes.data)
                _softmax(scores, weights, lse[sequence, head, own][low:high], scale, first + low, window)
                mix(bits.ctypes.data, v.at(*here), y.at(*place))


def _products_forward(q: _Heads, k: _Heads, v: _Heads, y: _Heads, rows: int, seen: int) -> tuple:
    scores, weights = (onednn.described(rows, seen, seen, 1, item) for item in (4, 2))
    return (
        onednn.prepared(q.rows(rows), k.rows(seen).turned, scores),
        onednn.prepared(weights, v.rows(seen), y.rows(rows)),
    )


def _backward(start: int, stop: int, call: Call) -> None:
    (arrays, spans, group, chunks, causal, scale, window), heads = call, call.heads
    dy, q, k, v, y, lse, dq, dk, dv = arrays
    at = [heads_of(x) for x in (q, k, v, dq, dk, dv)]
    (memory, dmemory), (bits, dbits) = _scratch(q, call.keys, 2)
    upper = np.empty((min(TILE, q.shape[2]), q.shape[3]), np.uint16)
    addresses = [x.ctypes.data for x in (memory, dmemory, bits, dbits, upper)]
    ready: dict[tuple[int, int, bool], tuple] = {}
    for number in range(start * group, stop * group):
        sequence, head = divmod(number, heads)
        if chunks and head % group == 0:  # keys may be seen by both chunks, or by none
            dk[sequence, head // group] = 0
            dv[sequence, head // group] = 0
        for own, others, first in spans[sequence]:
            there = sequence, head // group, others.start
            own_dy, own_y, own_lse = (x[sequence, head, own] for x in (dy, y, lse))
            count = own.stop - own.start
            # From the last tile, which sees all keys: there the first of a group writes their gradients.
            for low, high, seen in reversed(tiles(count, others.stop - others.start, first, causal)):
                rows, add = high - low, chunks or high < count or head % group > 0
                if (rows, seen, add) not in ready:
                    ready[rows, seen, add] = _products_backward(at, rows, seen, add)
                score, slope, into_v, into_k, into_q = ready[rows, seen, add]
                s, ds, p, dp, u = addresses
                queries, keys, values, dqueries, dkeys, dvalues = (
                    x.at(sequence, head, own.start + low) if i % 3 == 0 else x.at(*there)
                    for i, x in enumerate(at)
                )
                # Dense: sums over strided rows have other bits, and those of a head alone are dense.
                dots = np.empty(rows, lse.dtype)
                outer = np.ascontiguousarray(own_dy[low:high]), np.ascontiguousarray(own_y[low:high])
                _dots_and_bits(*outer, dots, upper)
                score(queries, keys, s)
                slope(u, values, ds)
                shaped = [x[: rows * seen].reshape(rows, seen) for x in (memory, dmemory, bits, dbits)]
                _softmax_backward(*shaped, dots, own_lse[low:high], scale, first + low, window)
                into_v(p, u, dvalues)
                into_k(dp, queries, dkeys)
                into_q(dp, keys, dqueries)


def _products_backward(at: list[_Heads], rows: int, seen: int, add: bool) -> tuple:
    q, k, v, dq, dk, dv = at
    scores, weights = (onednn.described(rows, seen, seen, 1, item) for item in (4, 2))
    upper = onednn.described(rows, q.width, q.width, 1, 2)
    return (
        onednn.prepared(q.rows(rows), k.rows(seen).turned, scores),
        onednn.prepared(upper, v.rows(seen).turned, scores),
        onednn.prepared(weights.turned, upper, dv.rows(seen), accumulate=add),
        onednn.prepared(weights.turned, q.rows(rows), dk.rows(seen), accumulate=add),
        onednn.prepared(weights, k.rows(seen), dq.rows(rows)),
    )


def heads_of(x: Array) -> _Heads:
    return _Heads(x.__array_interface__["data"][0], *x.strides[:3], x.itemsize, x.shape[3])


def _scratch(q: Array, keys: int, count: int) -> tuple[list[Array], list[Array]]:
    """So many tiles of scores, in float32 and as bits."""
    size = min(TILE, q.shape[2]) * keys
    return [np.empty(size, np.float32) for _ in range(count)], [
        np.empty(size, np.uint16) for _ in range(count)
    ]


@reordered
def _softmax(scores, weights, lse, scale, first, window):
    """weights: the bits of the probabilities; scores are overwritten.

    Query i sees keys up to first + i, the last `window` of them.
    """
    for i in range(scores.shape[0]):
        line, out = scores[i], weights[i]
        seen = min(first + i + 1, line.size)
        oldest = max(0, first + i + 1 - window)
        near, kept = line[oldest:seen], out[oldest:seen]
        highest = near[0] * scale
        for j in range(near.size):
            highest = larger(highest, near[j] * scale)
        total = scores.dtype.type(0)
        for j in range(near.size):
            value = exp(near[j] * scale - highest)
            near[j] = value
            total += value
        factor = scores.dtype.type(1) / total
        for j in range(near.size):
            kept[j] = narrowed(near[j] * factor)
        out[:oldest] = 0
        out[seen:] = 0
        lse[i] = highest + np.log(total)


@reordered
def _dots_and_bits(dy, y, dots, bits):
    """bits: those of dy. dots: of rows of what they say and of y, so that gradients of scores sum to 0."""
    for i in range(dy.shape[0]):
        upper, line, out = dy[i], y[i], bits[i]
        for j in range(upper.size):
            out[j] = narrowed(upper[j])
        dot = dots.dtype.type(0)
        for j in range(upper.size):
            dot += widened(out[j]) * line[j]
        dots[i] = dot


@reordered
def _softmax_backward(scores, dscores, weights, dweights, dots, lse, scale, first, window):
    """weights: the bits of the probabilities; dweights: of the gradient of the scores before scaling."""
    for i in range(scores.shape[0]):
        line, dline, out, dout = scores[i], dscores[i], weights[i], dweights[i]
        seen = min(first + i + 1, line.size)
        oldest = max(0, first + i + 1 - window)
        near, dnear = line[oldest:seen], dline[oldest:seen]
        kept, dkept = out[oldest:seen], dout[oldest:seen]
        shift, dot = lse[i], dots[i]
        for j in range(near.size):
            probability = exp(near[j] * scale - shift)
            kept[j] = narrowed(probability)
            dkept[j] = narrowed(probability * (dnear[j] - dot) * scale)
        for rest in (out, dout):
            rest[:oldest] = 0
            rest[seen:] = 0
