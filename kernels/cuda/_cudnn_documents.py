"""Attention by cuDNN of documents side by side: each is a sequence, which begins at a ragged offset.

A plan of cuDNN's is for a number of sequences; it reads their lengths and offsets in the GPU's memory. Only
the GPU knows how many documents there are, and the host does not wait for it. So a plan is for one document a
row and one more for every MEAN tokens. A kernel makes lengths and offsets of `starts`, with length 0 for
documents that are not there. If there are more than planned, that kernel gives cuDNN none, and the kernels of
attention.cu, which are launched in any case, compute all. (NVIDIA's Transformer Engine gives cuDNN the same
tensors.)
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from shardrt.kernels.cuda._cudnn_attention import CuDNNAttention, suits
from shardrt.kernels.cuda._launch import Array, empty, launch
from shardrt.kernels.determinism import are_deterministic_algorithms_enabled

MEAN = 128  # tokens of a document
_OLDEST = 90600  # cuDNN that takes groups of heads and a softmax by tokens here
_WIDTHS = 16  # heads of a multiple of this: for others cuDNN can't bound its scratch memory
_THREADS = 512


def forward(fused: CuDNNAttention, *arrays: Array, scale: float) -> Array | None:
    """As attention.forward of its arrays and `starts`, if cuDNN can.

    Gives int32 (1,), not 0 if it was done, or None.
    """
    q, k, v, y, lse, starts = arrays
    if not _fits(fused, starts, (q, k, v), (y,), lse):
        return None
    about, done = _reported(q, y, starts)
    stats = _by_tokens(q)
    how = {"attn_scale": float(scale), "generate_stats": True}

    def describe(graph: Any) -> None:
        documents = _Documents(fused, graph, 6, about)
        inputs = [documents.input(uid, x, 0) for uid, x in enumerate((q, k, v), 1)]
        outputs = graph.sdpa(**dict(zip("qkv", inputs, strict=True)), **how, **documents.mask)
        documents.output(outputs[0], 4, y, 1)
        documents.output(outputs[1], 5, stats, 2)

    if not _run(fused, "forward", (q, k, v, y, stats, *about), describe, scale):
        return None
    lse[...] = stats
    return done


def backward(fused: CuDNNAttention, *arrays: Array, scale: float) -> Array | None:
    """As attention.backward of its arrays and `starts`; gives what forward gives."""
    dy, q, k, v, y, lse, dq, dk, dv, starts = arrays
    if not _fits(fused, starts, (q, k, v, dq, dk, dv), (y, dy), lse) or fused.can_not_build():
        return None
    about, done = _reported(q, y, starts)
    stats = _by_tokens(q)
    stats[...] = lse
    most = {"max_total_seq_len_q": starts.size, "max_total_seq_len_kv": starts.size}
    how = {"attn_scale": float(scale), "use_deterministic_algorithm": False, **most}

    def describe(graph: Any) -> None:
        documents = _Documents(fused, graph, 10, about)
        given = zip((dy, q, k, v, y, stats), (1, 0, 0, 0, 1, 2), strict=True)
        inputs = [documents.input(uid, x, kind) for uid, (x, kind) in enumerate(given, 1)]
        names = "dO", "q", "k", "v", "o", "stats"
        made = graph.sdpa_backward(**dict(zip(names, inputs, strict=True)), **how, **documents.mask)
        for uid, (tensor, x) in enumerate(zip(made, (dq, dk, dv), strict=True), 7):
            documents.output(tensor, uid, x, 0)

    ran = _run(fused, "backward", (dy, q, k, v, y, stats, dq, dk, dv, *about), describe, scale)
    return done if ran else None


class _Documents:
    """The documents' lengths and places in a graph, and tensors that lie so."""

    def __init__(self, fused: CuDNNAttention, graph: Any, uid: int, about: tuple[Array, ...]) -> None:
        """uid: of the first of `about`."""
        self._cudnn, self._graph = fused.cudnn, graph
        self._count = about[0].shape[0]
        lengths, *self._places = [fused.cudnn.input(graph, uid + i, x) for i, x in enumerate(about)]
        alignment = fused.cudnn.module.diagonal_alignment.TOP_LEFT
        self.mask = {
            "diagonal_alignment": alignment,
            "diagonal_band_right_bound": 0,
            "use_padding_mask": True,
        }
        self.mask |= {"seq_len_q": lengths, "seq_len_kv": lengths}

    def input(self, uid: int, x: Array, kind: int) -> Any:
        """kind: 0 for what lies as q does, 1 as y, 2 as the softmax's sums."""
        return self._cudnn.input(self._graph, uid, x, self._count, self._places[kind])

    def output(self, tensor: Any, uid: int, x: Array, kind: int) -> None:
        self._cudnn.output(tensor, uid, x, self._count, self._places[kind])


def _fits(
    fused: CuDNNAttention, starts: Array, packed: tuple[Array, ...], dense: tuple[Array, ...], lse: Array
) -> bool:
    """Whether tokens follow one another evenly, over all rows, in arrays like q and in those like y.

    And on Hopper and the Blackwell of data centres; elsewhere the scratch memory has no bound. Not where
    algorithms must be deterministic: which kernels compute a row would depend on the documents of others, and
    cuDNN's backward in a fixed order takes memory for all pairs of tokens, for each document of a plan.
    """
    q, k, *others = packed
    fits = suits(q, k, lse, *others, *dense) and k.shape[2] == q.shape[2] and q.shape[3] % _WIDTHS == 0
    if not fits or are_deterministic_algorithms_enabled() or fused.cudnn.versions[1] < _OLDEST:
        return False
    if not fused.cudnn.architecture.startswith(("sm_90", "sm_10")):
        return False
    steps = [{x.strides[2] for x in packed}, {x.strides[2] for x in dense}]
    even = all(x.shape[0] == 1 or x.strides[0] == x.shape[2] * x.strides[2] for x in (*packed, *dense))
    return even and all(len(each) == 1 for each in steps)


def _reported(q: Array, y: Array, starts: Array) -> tuple[tuple[Array, ...], Array]:
    """((lengths, where they begin in q, y and sums), whether there are not too many), made on the GPU."""
    (batch, heads, time, _), item = q.shape, q.dtype.itemsize
    count = batch + batch * time // MEAN
    pitch = -(-(count + 1) // 2) * 2  # rows begin at 16 bytes
    lengths, places, done = empty(count, np.int32), empty((3, pitch), np.int64), empty(1, np.int32)
    steps = q.strides[2] // item, y.strides[2] // item, heads
    args = (starts, lengths, places, done, starts.size, time, count, pitch, *steps)
    launch("attention_cudnn", "documents", q.dtype, 1, args, threads=_THREADS)
    rows = [places[i, : count + 1].reshape(-1, 1, 1, 1) for i in range(3)]
    return (lengths.reshape(-1, 1, 1, 1), *rows), done


def _by_tokens(q: Array) -> Array:
    """(batch, heads, time), float32, in the order (batch, time, heads), in which cuDNN has it."""
    batch, heads, time, _ = q.shape
    return empty((batch, time, heads), np.float32).transpose(0, 2, 1)


def _run(
    fused: CuDNNAttention, which: str, arrays: tuple, describe: Callable[[Any], None], scale: float
) -> bool:
    q = arrays[0]
    message = f"attention: cuDNN refuses documents of {q.shape} of {q.dtype.name}"
    return fused.cudnn.run(("documents", which, scale), arrays, describe, message)
