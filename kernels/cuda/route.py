"""Tokens to experts and back: the choice, the order of rows, and the copies between tokens and rows."""

import numpy as np

from shardrt.kernels.cuda._launch import THREADS, Array, blocks_for, empty, launch, vectors
from shardrt.kernels.cuda.embedding import in_order

_WARPS = THREADS // 32


def top_k(scores: Array, experts: Array) -> None:
    """The k largest of each row, ties to the lowest, in ascending order."""
    (tokens, k), count = experts.shape, scores.shape[1]
    launch("route", "top_k", scores.dtype, -(-tokens // _WARPS), (scores, experts, tokens, count, k))


def take(scores: Array, experts: Array, y: Array) -> None:
    """y[t, j] = scores[t, experts[t, j]]; y (tokens, k)."""
    args = (scores, experts, y, experts.size, scores.shape[1], experts.shape[1])
    launch("route", "take", scores.dtype, blocks_for(experts.size, 1), args)


def put(dy: Array, experts: Array, dscores: Array) -> None:
    """Backward of take: dscores is 0 where nothing was taken."""
    args = (dy, experts, dscores, dscores.size, dscores.shape[1], experts.shape[1])
    launch("route", "put", dy.dtype, blocks_for(dscores.size, 1), args)


def order(
    experts: Array, priority: Array | None, capacity: int, places: Array, copies: Array, counts: Array
) -> None:
    """Where each copy lies among the rows, as on the CPU."""
    size, count = experts.size, counts.shape[1]
    element = np.float32 if priority is None else priority.dtype
    ids, found = in_order(experts.reshape(-1), 0, count)
    limit = size if priority is None else capacity
    launch("route", "count", element, -(-count // THREADS), (ids, counts, size, count, limit))
    if priority is not None:
        kept = empty((size,), np.int64)
        args = (ids, found, counts, priority, kept, size, count, capacity)
        launch("route", "drop", element, -(-size // _WARPS), args)
        ids, found = in_order(kept, 0, count)
    args = (ids, found, places, copies, size, count, copies.size)
    launch("route", "place", element, blocks_for(size, 1), args)


def spread(x: Array, weights: Array | None, copies: Array, k: int, y: Array) -> None:
    """y[r] = x[copies[r] // k], times that copy's weight: tokens to rows; 0 behind the last row."""
    args = (x, weights, copies, y, copies.size, x.shape[1], k, _wide(x, y))
    launch("route", "spread", x.dtype, -(-copies.size // _WARPS), args)


def collect(x: Array, weights: Array | None, places: Array, y: Array) -> None:
    """y[t] = the sum of x[places[t, j]] over j, each times weights[t, j]: rows to tokens."""
    tokens, k = places.shape
    args = (x, weights, places, y, tokens, x.shape[1], k, _wide(x, y))
    launch("route", "collect", x.dtype, -(-tokens // _WARPS), args)


def weights_backward(dy: Array, x: Array, places: Array, dweights: Array) -> None:
    """Of the weights in collect: dweights[t, j] = dy[t] . x[places[t, j]], 0 where the copy was dropped."""
    args = (dy, x, places, dweights, places.size, x.shape[1], places.shape[1], _wide(dy, x))
    launch("route", "weights_backward", x.dtype, -(-places.size // _WARPS), args)


def _wide(*arrays: Array) -> bool:
    """Whether their rows can be read 16 bytes at a time."""
    return vectors(*arrays) and arrays[0].shape[1] % (16 // arrays[0].dtype.itemsize) == 0
