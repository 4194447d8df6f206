"""Attention by cuDNN of one chunk of queries or two, each at its place among the keys: a call for each chunk.

A chunk at `offset` sees the keys before it and its own up to the diagonal: the causal mask of the keys up to
its end, aligned at the bottom right. (NVIDIA's Transformer Engine does so, AttnFuncWithCPAndKVAllGather.) So
a chunk's softmax is whole, and nothing is joined but the gradients of keys that both chunks see.
"""

from typing import Any

from shardrt.kernels.cuda._cudnn_attention import suits
from shardrt.kernels.cuda._launch import Array, empty, launch, vectors

_THREADS = 256


def forward(fused: Any, *arrays: Array, scale: float, offsets: tuple[int, ...]) -> bool:
    """As attention.forward of its arrays, causal, if cuDNN can and chunks end among the keys; else False."""
    q, k, v, y, lse = arrays
    chunks = _chunks(q, k, offsets) if suits(q, k, lse, v, y) else []
    for own, stop in chunks:
        rows = lse[:, :, own]
        dense = rows if _lies_dense(rows) else empty(rows.shape, rows.dtype)
        given = q[:, :, own], k[:, :, :stop], v[:, :, :stop], y[:, :, own], dense
        if not fused.forward(*given, causal=True, scale=scale, bottom_right=True):
            return False
        if dense is not rows:
            rows[...] = dense
    return bool(chunks)


def backward(fused: Any, *arrays: Array, scale: float, offsets: tuple[int, ...]) -> bool:
    """As attention.backward of its arrays, causal; else False, and the gradients are still to be written.

    The gradients of keys and values of the first call are written in place, those of the second are added.
    """
    dy, q, k, v, y, lse, dq, dk, dv = arrays
    chunks = _chunks(q, k, offsets) if suits(q, k, lse, dy, v, y, dq, dk, dv) else []
    more: tuple = (None, None)
    for number, (own, stop) in enumerate(chunks):
        rows, made = lse[:, :, own], (dk[:, :, :stop], dv[:, :, :stop])
        dense = rows if _lies_dense(rows) else rows.copy()
        if number:
            more = made = tuple(empty(x.shape, x.dtype) for x in made)
        given = q[:, :, own], k[:, :, :stop], v[:, :, :stop], y[:, :, own], dense, dq[:, :, own], *made
        if not fused.backward(dy[:, :, own], *given, causal=True, scale=scale, bottom_right=True):
            return False
    if chunks:
        _complete(dk, dv, *more, chunks[1][1] if len(chunks) > 1 else 0, chunks[0][1])
    return bool(chunks)


def _chunks(q: Array, k: Array, offsets: tuple[int, ...]) -> list[tuple[slice, int]]:
    """(its queries, where the keys that it sees end) of each chunk, the last first; none where keys lack."""
    each = q.shape[2] // len(offsets)
    if offsets[-1] + each > k.shape[2]:
        return []
    return [(slice(i * each, (i + 1) * each), offset + each) for i, offset in enumerate(offsets)][::-1]


def _lies_dense(lse: Array) -> bool:
    """Whether cuDNN can be given a chunk's where it lies: not if other rows lie between its heads."""
    return lse.flags.c_contiguous and vectors(lse)


def _complete(
    dk: Array, dv: Array, more_k: Array | None, more_v: Array | None, added: int, seen: int
) -> None:
    """The first `added` rows of a head += those of more; rows from `seen` on, which no query sees, are 0."""
    batch, heads, keys, width = dk.shape
    pieces = (added + keys - seen) * (width * dk.dtype.itemsize // 16)
    strides = [stride // x.dtype.itemsize for x in (dk, dv) for stride in x.strides[:3]]
    grid = -(-pieces // _THREADS), 2 * heads, batch
    args = (dk, dv, more_k, more_v, *strides, added, seen, keys, width)
    launch("attention_cudnn", "complete", dk.dtype, grid, args, threads=_THREADS)
