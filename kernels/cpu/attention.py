"""Attention in tiles that stay in cache: matmuls by BLAS, the softmax between them fused.

(Dao et al., FlashAttention, 2022, section 3.) Per head, TILE queries at a time: their scores against the keys
that they see are made, used and forgotten. Forward keeps one number per query, the logarithm of its sum of
exponentials; backward makes the scores again from it. Several heads of queries in a row may share one of
keys and values (Ainslie et al., GQA, 2023). Where the processor has fused multiply-adds, the products of
float32 are our own, in smaller tiles (_attention_rows.py). Those of bfloat16 are our own with AVX512-BF16
(_attention_pairs.py), else oneDNN's (_attention_bits.py). With a window, each TILE queries have a span of
keys of their own, so the cost grows with time * (window + TILE).
"""

from typing import Any

import numpy as np

from shardrt.kernels import onednn
from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu import _attention_bits, _attention_pairs, _attention_rows
from shardrt.kernels.cpu._attention_bits import TILE, Call, Span, tiles
from shardrt.kernels.cpu._blas import set_blas_threads
from shardrt.kernels.cpu._jit import exp, larger, reordered
from shardrt.kernels.cpu._threads import run_rows, threads
from shardrt.kernels.cpu.matmul import matmul, widened

_ALL = 1 << 62  # a window without an end


@cost(
    "q k v starts -> y lse",
    flops=lambda q, k, causal, offsets, window: 4 * _pairs(q, k, causal, offsets, window) * q.shape[3],
    sizes=lambda q, k: (*q.shape[:3], k.shape[2], q.shape[3]),
)
def forward(
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    lse: Array,
    *,
    causal: bool,
    scale: float,
    starts: Array | None = None,
    offsets: tuple[int, ...] = (0,),
    window: int | None = None,
) -> None:
    """Compute y = softmax(q k^T scale) v per head.

    q, y (batch, heads, time, head_dim), k, v the same with their own time, and fewer heads where several of q
    share one; any strides but 1 in the last dimension. lse (batch, heads, time). causal: query t sees keys
    up to t. starts: int64 (batch, time), dense, with causal only: query t sees keys from starts[t] on, which
    is the same for all t of a document and where it begins.

    offsets: with causal only, one number or two: the queries are one chunk or two equal ones, each at that
    place among the keys, the second behind the first. So query i of a chunk sees keys up to offset + i.

    window: with causal only, at least 1: of the keys above, a query sees the last `window` alone.

    q, k and v may be uint16, the bits of bfloat16, where the rest is float32.
    """
    q, k, v = _readable(q, k, v)
    kernel = _forward if (own := _own(q)) is None else own.forward
    _over_heads(kernel, q, k, (q, k, v, y, lse), causal, lse.dtype.type(scale), starts, offsets, window)


@cost(
    "dy q k v y lse starts -> dq dk dv",
    flops=lambda q, k, causal, offsets, window: 10 * _pairs(q, k, causal, offsets, window) * q.shape[3],
    sizes=lambda q, k: (*q.shape[:3], k.shape[2], q.shape[3]),
)
def backward(
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    *,
    causal: bool,
    scale: float,
    starts: Array | None = None,
    offsets: tuple[int, ...] = (0,),
    window: int | None = None,
) -> None:
    """dq, dk, dv, each in the shape and with the freedom of strides of q, k, v, from dy and forward.

    With keys that no query sees, their gradients are 0.
    """
    q, k, v = _readable(q, k, v)
    kernel = _backward if (own := _own(q)) is None else own.backward
    arrays = (dy, q, k, v, y, lse, dq, dk, dv)
    _over_heads(kernel, q, k, arrays, causal, lse.dtype.type(scale), starts, offsets, window)


def _readable(*arrays: Array) -> tuple[Array, ...]:
    """Queries, keys and values as matmuls take them here: float32 where none takes bits of bfloat16."""
    if arrays[0].dtype != np.uint16 or onednn.computes_bf16():
        return arrays
    return tuple(widened(x) for x in arrays)


def _own(q: Array) -> Any:
    """The module that computes it in other ways than the products of this one, if one does."""
    if q.dtype == np.uint16:
        return _attention_pairs if _attention_pairs.suits(q.shape[3]) else _attention_bits
    return _attention_rows if _attention_rows.suits(q.shape[3], q.dtype) else None


def _over_heads(
    kernel: Any,
    q: Array,
    k: Array,
    arrays: tuple,
    causal: bool,
    scale: Any,
    starts: Array | None,
    offsets: tuple[int, ...],
    window: int | None,
) -> None:
    """Run `kernel` for every head of keys of every sequence, on all threads of this rank."""
    batch, heads, time, _ = q.shape
    kv_heads = k.shape[1]
    split = threads() > 1
    if split:
        set_blas_threads(1)  # heads go to threads, not pieces of small matmuls
    keys = k.shape[2]
    window = _ALL if window is None else window
    work = batch * heads * time * min(keys, window + TILE)
    rows = [None] * batch if starts is None else starts
    spans = [_spans(row, time, keys, causal, offsets, window) for row in rows]
    chunks = causal and (offsets != (0,) or keys > time or window < keys)
    call = Call(arrays, spans, heads // kv_heads, chunks, causal, scale, window)
    run_rows(kernel, batch * kv_heads, work, call)
    if split:
        set_blas_threads(threads())


def _spans(
    starts: Array | None, time: int, keys: int, causal: bool, offsets: tuple[int, ...], window: int
) -> list[Span]:
    """What attends to itself alone in a sequence: documents in each chunk of queries, or all of it.

    TILE queries at a time with the keys in their windows, where a document is longer than a window.
    """
    if not causal:
        return [(slice(0, time), slice(0, keys), keys)]
    found, each = [], time // len(offsets)
    for number, offset in enumerate(offsets if each else ()):
        chunk = slice(number * each, (number + 1) * each)
        begins = np.zeros(each, np.int64) if starts is None else starts[chunk]
        edges = [*sorted({0, *np.flatnonzero(begins == offset + np.arange(each)).tolist()}), each]
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            begin = int(begins[low])
            each_span = TILE if offset + high - begin > window else high - low
            for start in range(low, high, each_span):
                stop, oldest = min(start + each_span, high), max(begin, offset + start + 1 - window)
                queries = slice(chunk.start + start, chunk.start + stop)
                found.append((queries, slice(oldest, offset + stop), offset + start - oldest))
    return found


def _forward(start: int, stop: int, call: Call) -> None:
    (arrays, spans, group, _, causal, scale, window), heads = call, call.heads
    memory = np.empty(min(TILE, arrays[0].shape[2]) * call.keys, arrays[0].dtype)
    for number in range(start * group, stop * group):
        sequence, head = divmod(number, heads)
        for own, others, first in spans[sequence]:
            q, y, lse = (arrays[i][sequence, head, own] for i in (0, 3, 4))
            k, v = (arrays[i][sequence, head // group, others] for i in (1, 2))
            for low, high, seen in tiles(len(q), len(k), first, causal):
                scores = memory[: (high - low) * seen].reshape(high - low, seen)
                np.matmul(q[low:high], k[:seen].T, out=scores)
                _softmax(scores, lse[low:high], scale, first + low, window)
                np.matmul(scores, v[:seen], out=y[low:high])


def _backward(start: int, stop: int, call: Call) -> None:
    (arrays, spans, group, chunks, causal, scale, window), heads = call, call.heads
    memory, dmemory = np.empty((2, min(TILE, arrays[1].shape[2]) * call.keys), arrays[1].dtype)
    for number in range(start * group, stop * group):
        sequence, head = divmod(number, heads)
        if chunks and head % group == 0:  # keys may be seen by both chunks, or by none
            arrays[7][sequence, head // group] = 0
            arrays[8][sequence, head // group] = 0
        for own, others, first in spans[sequence]:
            dy, q, y, lse, dq = (arrays[i][sequence, head, own] for i in (0, 1, 4, 5, 6))
            k, v, dk, dv = (arrays[i][sequence, head // group, others] for i in (2, 3, 7, 8))
            # From the last tile, which sees all keys: there the first of a group writes their gradients.
            for low, high, seen in reversed(tiles(len(q), len(k), first, causal)):
                scores = memory[: (high - low) * seen].reshape(high - low, seen)
                dscores = dmemory[: (high - low) * seen].reshape(high - low, seen)
                np.matmul(q[low:high], k[:seen].T, out=scores)
                np.matmul(dy[low:high], v[:seen].T, out=dscores)
                # Dense: sums over strided rows have other bits, and those of a head alone are dense.
                outer = np.ascontiguousarray(dy[low:high]), np.ascontiguousarray(y[low:high])
                _softmax_backward(scores, dscores, *outer, lse[low:high], scale, first + low, window)
                add = chunks or high < len(q) or head % group > 0
                matmul(scores.T, dy[low:high], dv[:seen], accumulate=add)
                matmul(dscores.T, q[low:high], dk[:seen], accumulate=add)
                np.matmul(dscores, k[:seen], out=dq[low:high])


@reordered
def _softmax(scores, lse, scale, first, window):
    """Scores become probabilities in place. Query i sees keys up to first + i, the last `window` of them."""
    for i in range(scores.shape[0]):
        line = scores[i]
        seen = min(first + i + 1, line.size)
        oldest = max(0, first + i + 1 - window)
        near = line[oldest:seen]
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
            near[j] *= factor
        line[:oldest] = 0
        line[seen:] = 0
        lse[i] = highest + np.log(total)


@reordered
def _softmax_backward(scores, dscores, dy, y, lse, scale, first, window):
    """In place: scores become probabilities, dscores the gradient of the scores before scaling."""
    for i in range(scores.shape[0]):
        line, dline, upper, out = scores[i], dscores[i], dy[i], y[i]
        seen = min(first + i + 1, line.size)
        dot = scores.dtype.type(0)
        for j in range(out.size):
            dot += upper[j] * out[j]
        oldest = max(0, first + i + 1 - window)
        near, dnear = line[oldest:seen], dline[oldest:seen]
        shift = lse[i]
        for j in range(near.size):
            probability = exp(near[j] * scale - shift)
            near[j] = probability
            dnear[j] = probability * (dnear[j] - dot) * scale
        for rest in (line, dline):
            rest[:oldest] = 0
            rest[seen:] = 0


def _pairs(q: Array, k: Array, causal: bool, offsets: tuple[int, ...], window: int | None) -> int:
    """Pairs of a query and a key that it sees, of all heads; documents are taken to be one."""
    batch, heads, time, _ = q.shape
    keys = k.shape[2]
    if not causal:
        return batch * heads * time * keys
    most = keys if window is None else min(window, keys)  # that a query sees
    found, each = 0, time // len(offsets)
    for offset in offsets:
        part = min(each, max(0, most - offset))  # queries that see keys up to their own place; others `most`
        found += part * offset + part * (part + 1) // 2 + (each - part) * most
    return batch * heads * found
