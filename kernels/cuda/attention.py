"""Attention without the matrix of weights.

It is cuDNN's where that is at hand and fits, in 16 bits (_cudnn_attention.py, _cudnn_chunks.py,
_cudnn_documents.py); else reference kernels (attention.cu), for every type and width.
"""

from typing import Any

from shardrt.kernels.cuda import _cudnn_chunks, _cudnn_documents
from shardrt.kernels.cuda._launch import THREADS, Array, NotOnGPU, accumulator, backend, empty, launch

_WARPS, _TILE = 8, 32  # as in attention.cu
WIDEST = 256  # elements of a head
_ALL = 1 << 62  # a window without an end


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
    """Compute y = softmax(q k^T scale) v per head: shapes and what is seen as on the CPU."""
    fused, arrays, done = _fused(window, starts, offsets), (q, k, v, y, lse), None
    if fused is not None and starts is None:
        if offsets == (0,) and fused.forward(*arrays, causal=causal, scale=scale, window=window):
            return
        if offsets != (0,) and _cudnn_chunks.forward(fused, *arrays, scale=scale, offsets=offsets):
            return
    elif fused is not None and offsets == (0,):
        done = _cudnn_documents.forward(fused, *arrays, starts, scale=scale)
    last = (causal, *_chunk(q, offsets), _window(window), accumulator(q.dtype)(scale))
    args = (q, k, v, starts, done, y, lse, *_strides(q, k, v, y), *_sizes(q, k), *last)
    _run("forward", q, q, args, tiles=2, own=1)


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
    """dq, dk, dv from dy and forward, as on the CPU."""
    fused, arrays, done = _fused(window, starts, offsets), (dy, q, k, v, y, lse, dq, dk, dv), None
    if fused is not None and starts is None:
        if offsets == (0,) and fused.backward(*arrays, causal=causal, scale=scale, window=window):
            return
        if offsets != (0,) and _cudnn_chunks.backward(fused, *arrays, scale=scale, offsets=offsets):
            return
    elif fused is not None and offsets == (0,):
        done = _cudnn_documents.backward(fused, *arrays, starts, scale=scale)
    delta = empty(q.shape[:3], lse.dtype)
    batch, heads, time, width = q.shape
    grid = -(-time // _WARPS), heads, batch
    strides = _strides(dy, y)
    launch("attention", "dots", q.dtype, grid, (dy, y, done, delta, *strides, time, width), DIM=_dim(width))
    last = (*_sizes(q, k), causal, *_chunk(q, offsets), _window(window), accumulator(q.dtype)(scale))
    args = (dy, q, k, v, starts, done, lse, delta, dq, *_strides(dy, q, k, v, dq), *last)
    _run("backward_queries", q, q, args, tiles=2, own=2)
    args = (dy, q, k, v, starts, done, lse, delta, dk, dv, *_strides(dy, q, k, v, dk, dv), *last)
    _run("backward_keys", q, k, args, tiles=2, own=2)


def _fused(window: int | None, starts: Array | None, offsets: tuple[int, ...]) -> Any:
    """Give cuDNN's attention, if at hand; reference kernels have windows of documents and of chunks."""
    return backend().attention() if window is None or (starts is None and offsets == (0,)) else None


def _window(window: int | None) -> int:
    return _ALL if window is None else window


def _sizes(q: Array, k: Array) -> tuple[int, int, int, int]:
    """Queries, keys, width, and the heads of q that share one of k."""
    return q.shape[2], k.shape[2], q.shape[3], q.shape[1] // k.shape[1]


def _chunk(q: Array, offsets: tuple[int, ...]) -> tuple[int, int, int]:
    """Queries of the first chunk, and how far before its last key each query is: there, and behind it."""
    each = q.shape[2] // len(offsets)
    return each, offsets[0], offsets[-1] - each * (len(offsets) - 1)


def _run(function: str, q: Array, rows: Array, args: tuple, *, tiles: int, own: int) -> None:
    """A block for each `per_block` rows of a head of `rows`, which is q or k.

    In shared memory: so many tiles, so many times its own rows.
    """
    dim = int(_dim(q.shape[3]))
    per_block = _WARPS * (2 if dim > 128 else 4)
    shared = (tiles * _TILE * (dim + 1) + own * per_block * dim) * accumulator(q.dtype)().itemsize
    grid = -(-rows.shape[2] // per_block), rows.shape[1], rows.shape[0]
    launch("attention", function, q.dtype, grid, args, threads=THREADS, shared=shared, DIM=str(dim))


def _dim(width: int) -> str:
    """The width that the kernels are compiled for. Raises NotOnGPU for one that is too large."""
    if width > WIDEST:
        raise NotOnGPU(f"attention: head_dim must be at most {WIDEST} on CUDA, got {width}")
    return str(-(-width // 32) * 32)


def _strides(*arrays: Array) -> list[int]:
    """Of batch, head and time of each, in elements."""
    return [stride // array.dtype.itemsize for array in arrays for stride in array.strides[:3]]
