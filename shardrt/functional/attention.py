"""Attention without the matrix of weights in memory.

Next to inputs and output, backward needs one number per query: the logarithm of its sum of exponentials (Dao
et al., FlashAttention, 2022).
"""

from collections.abc import Sequence
from itertools import accumulate
from math import sqrt

import numpy as np

from shardrt import autograd, device
from shardrt.autograd import Function
from shardrt.functional._again import Repeatable
from shardrt.functional._arrays import (
    asarray,
    check_floats,
    computed,
    empty,
    empty_exact,
    empty_like,
    for_product,
    kernels,
    packed,
    tensor,
    unpacked,
)
from shardrt.functional._types import Array, Tensor
from shardrt.functional.words import also, only

__all__ = ["split_heads", "starts_on_host"]


class Attention(Function):
    strided = True  # the kernel takes any strides but in the last dimension
    expensive = True

    def forward(self, q: Array, k: Array, v: Array, causal: bool, scale: float) -> Array:
        q, k, v = _inner_unit(q), _inner_unit(k), _inner_unit(v)
        y = empty_like(q)
        lse = empty_exact(q.shape[:-1], q)
        kernels().attention.forward(q, k, v, y, lse, causal=causal, scale=scale)
        self.saved = (q, k, v, y, lse, causal, scale)
        return y

    def keep(self, y: Array) -> tuple:
        return y, self.saved[4]  # and lse

    def resume(self, kept: tuple, q: Array, k: Array, v: Array, causal: bool, scale: float) -> Array:
        y, lse = kept
        self.saved = (_inner_unit(q), _inner_unit(k), _inner_unit(v), y, lse, causal, scale)
        return y

    def backward(self, dy: Array) -> tuple:
        q, k, v, y, lse, causal, scale = self.saved
        dq, dk, dv = empty_like(q), empty_like(k), empty_like(v)
        kernels().attention.backward(_inner_unit(dy), q, k, v, y, lse, dq, dk, dv, causal=causal, scale=scale)
        return dq, dk, dv, None, None


_MASKS = "is_causal, or softmax(q @ k.transpose(-2, -1) * scale + mask) @ v"


@also(query="q", key="k", value="v")
def scaled_dot_product_attention(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> "Tensor":
    """softmax(q k^T scale) v in every head (Vaswani et al., Attention Is All You Need, 2017, section 3.2.1).

    Views of any strides are read as they are. All arrays are float32, or all float64.

    Args:
        q: (batch, heads, time, head_dim).
        k, v: the same, but for another time where not is_causal, and fewer heads where several of q in a row
            share one (Ainslie et al., GQA, 2023).
        scale: 1 / sqrt(head_dim) unless given.
        is_causal: a query sees the keys up to its own time.
        attn_mask, dropout_p: only None and 0.
        enable_gqa: changes nothing: fewer heads of k and v are seen by their shapes.

    Returns:
        (batch, heads, time, head_dim).

    Raises:
        ValueError: for sizes that don't fit.
        TypeError: for other dtypes.

    Example:
        >>> import numpy as np
        >>> from shardrt import Tensor, functional as F
        >>> q = k = v = Tensor(np.zeros((2, 4, 5, 8), np.float32))
        >>> F.scaled_dot_product_attention(q, k, v, is_causal=True).shape
        (2, 4, 5, 8)
    """
    op = "scaled_dot_product_attention"
    only(op, f"for masks there is {_MASKS}", attn_mask=(attn_mask, None))
    only(op, "F.dropout of the result, or of the probabilities: softmax(...) @ v", dropout_p=(dropout_p, 0.0))
    q, k, v = tensor(q), tensor(k), tensor(v)
    if q.ndim != 4:
        raise ValueError(f"{op}: q must be (batch, heads, time, head_dim), got {q.shape}")
    batch, heads, time, head_dim = q.shape
    fits = k.ndim == 4 and k.shape[1] and k.shape[::3] == (batch, head_dim) and heads % k.shape[1] == 0
    if not fits or v.shape != k.shape or (is_causal and k.shape[2] != time):
        raise ValueError(
            f"{op}: shapes of q {q.shape}, k {k.shape} and v {v.shape} do not match (is_causal={is_causal})"
        )
    check_floats(op, q=q, k=k, v=v)
    return Attention.apply(q, k, v, bool(is_causal), _scale(scale, head_dim))


class SelfAttention(Repeatable):
    """Where it computes in bfloat16, bits of the result are kept, and the layer behind it takes them too."""

    expensive = True

    @property
    def again_low(self) -> tuple[int, ...]:
        _, y, *_ = self.saved
        return (0,) if y.dtype == np.uint16 else ()

    def again(self, index: int) -> Array:
        _, y, *_ = self.saved
        return y

    def forward(self, qkv: Array, heads: tuple, how: dict) -> Array:
        """how: what the kernels take by keyword."""
        batch, time, width = qkv.shape
        y = empty((batch, time, width // sum(heads) * heads[0]), qkv.dtype)
        lse = empty_exact((batch, heads[0], time), qkv)
        qkv = _as_computed(qkv)
        (y_heads,) = split_heads(y, heads[:1])
        kernels().attention.forward(*split_heads(qkv, heads), y_heads, lse, **how)
        self.saved = (qkv, for_product(y, qkv), lse, heads, how)
        return y

    def keep(self, y: Array) -> tuple:
        return y, self.saved[2]  # and lse

    def resume(self, kept: tuple, qkv: Array, heads: tuple, how: dict) -> Array:
        y, lse = kept
        qkv = _as_computed(qkv)
        self.saved = (qkv, for_product(y, qkv), lse, heads, how)
        return y

    def backward(self, dy: Array) -> tuple:
        qkv, y, lse, heads, how = self.saved
        y = unpacked(y) if y.dtype == np.uint16 else y
        dqkv = empty(qkv.shape, computed(qkv))
        (dy_heads,), (y_heads,) = split_heads(dy, heads[:1]), split_heads(y, heads[:1])
        q, k, v = split_heads(qkv, heads)
        gradients = split_heads(dqkv, heads)
        kernels().attention.backward(dy_heads, q, k, v, y_heads, lse, *gradients, **how)
        return dqkv, None, None


def _as_computed(qkv: Array) -> Array:
    """In bfloat16, as bits, where the layer that attends has its parameters so, and multiplies by them."""
    layers = autograd.modules()
    mine = next(layers[-1].parameters(), None) if layers else None
    return packed(qkv) if mine is not None and mine.gathered_as_bits and qkv.dtype == np.float32 else qkv


def self_attention(
    qkv: "Tensor",
    heads: int,
    is_causal: bool = True,
    scale: float | None = None,
    kv_heads: int | None = None,
    starts: Array | None = None,
    window: int | None = None,
) -> "Tensor":
    """Attention of a sequence to itself, from queries, keys and values in one tensor, which is not copied.

    Args:
        qkv: (batch, time, (heads + 2 * kv_heads) * head_dim), as one linear layer makes it: first all heads'
            queries, then keys, then values.
        kv_heads: heads of keys and of values, each for heads / kv_heads heads of queries in a row; as many as
            heads unless given.
        starts: from document_starts, where a sequence holds several documents that don't see one another;
            with is_causal only. float32 or float64.
        window: with is_causal only: a query at time t sees keys from t - window + 1 to t (Beltagy et al.,
            Longformer, 2020, section 3.1), as with `sliding_window` of transformers. The cost grows with
            time * window.

    Returns:
        (batch, time, heads * head_dim), the heads side by side.

    Raises:
        ValueError: if the last dimension, `starts`, `window` or kv_heads does not fit.
        TypeError: for other dtypes.

    Example:
        >>> import numpy as np
        >>> from shardrt import Tensor, functional as F
        >>> qkv = Tensor(np.zeros((2, 5, 3 * 8), np.float32))  # 2 sequences of 5 tokens, width 8
        >>> F.self_attention(qkv, heads=2).shape
        (2, 5, 8)
    """
    qkv = tensor(qkv)
    kv_heads = heads if kv_heads is None else kv_heads
    scale = check_packed("self_attention", qkv, heads, kv_heads, scale)
    starts = None if starts is None else asarray(starts)
    if starts is not None and (starts.shape != qkv.shape[:2] or not is_causal):
        raise ValueError(
            f"self_attention: starts must be {qkv.shape[:2]}, with is_causal, got {starts.shape} "
            f"(is_causal={is_causal})"
        )
    if window is not None and not is_causal:
        raise ValueError(f"self_attention: window needs is_causal, got window={window} without")
    how = {"causal": bool(is_causal), "scale": scale, "starts": starts}
    how["window"] = check_window("self_attention", window, qkv.shape[1])
    return SelfAttention.apply(qkv, (heads, kv_heads, kv_heads), how)


def check_window(op: str, window: int | None, time: int) -> int | None:
    """The window, or None where `time` keys have room in it. ValueError for one without a key."""
    if window is not None and window < 1:
        raise ValueError(f"{op}: window must be at least 1, got {window}")
    return None if window is None or window >= time else int(window)


def check_packed(op: str, qkv: "Tensor", heads: int, kv_heads: int, scale: float | None) -> float:
    """The scale, of queries, keys and values in one tensor. ValueError, TypeError as self_attention says."""
    if heads < 1:
        raise ValueError(f"{op}: heads must be at least 1, got {heads}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{op}: kv_heads must divide the {heads} heads, got {kv_heads}")
    parts = heads + 2 * kv_heads  # heads in all
    if qkv.ndim != 3 or qkv.shape[2] % parts:
        raise ValueError(
            f"{op}: qkv must be (batch, time, width), width a multiple of {heads} + 2 * {kv_heads} heads; "
            f"got {qkv.shape}"
        )
    check_floats(op, qkv=qkv)
    return _scale(scale, qkv.shape[2] // parts)


def document_starts(documents: Array) -> Array:
    """Where the document of each token begins, for self_attention.

    Args:
        documents: integers (batch, time) on the host, equal for neighbours that belong together.

    Returns:
        Int64 of that shape on the current device.

    Raises:
        ValueError: for another number of dimensions.

    Example:
        >>> import numpy as np
        >>> from shardrt import functional as F
        >>> F.document_starts(np.array([[7, 7, 7, 9, 9]]))
        array([[0, 0, 0, 3, 3]])
    """
    return device.current().asarray(starts_on_host(documents), np.int64)


def starts_on_host(documents: Array) -> np.ndarray:
    """As document_starts, on the host."""
    documents = np.asarray(documents)
    if documents.ndim != 2:
        raise ValueError(f"document_starts: documents must be (batch, time), got {documents.shape}")
    first = np.ones(documents.shape, bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = np.where(first, np.arange(documents.shape[1]), 0)
    return np.maximum.accumulate(places, axis=1)


def split_heads(x: Array, heads: Sequence[int]) -> list:
    """(batch, time, sum(heads) * head_dim) as a view (batch, count, time, head_dim) for each count."""
    batch, time, width = x.shape
    x = x.reshape(batch, time, sum(heads), width // sum(heads)).transpose(0, 2, 1, 3)
    stops = list(accumulate(heads))
    return [x[:, stop - count : stop] for stop, count in zip(stops, heads, strict=True)]


def _inner_unit(x: Array) -> Array:
    """Return x itself if its last stride is one element, else a copy."""
    return x if x.strides[-1] == x.dtype.itemsize else x.copy()


def _scale(scale: float | None, head_dim: int) -> float:
    return 1 / sqrt(head_dim) if scale is None else float(scale)
