"""Attention without the matrix of weights in memory: what backward needs beside its inputs and output is one
number per query, the logarithm of its sum of exponentials (Dao et al., FlashAttention, 2022).
"""

from math import sqrt
from typing import TYPE_CHECKING, Any

from shardrt.autograd import Function
from shardrt.functional._arrays import check_floats, empty, empty_exact, empty_like, kernels, tensor

if TYPE_CHECKING:
    from shardrt.tensor import Tensor

Array = Any


class Attention(Function):
    __slots__ = ()
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


def scaled_dot_product_attention(
    q: "Tensor", k: "Tensor", v: "Tensor", is_causal: bool = False, scale: float | None = None
) -> "Tensor":
    """softmax(q k^T scale) v in every head (Vaswani et al., Attention Is All You Need, 2017, section 3.2.1).

    q: (batch, heads, time, head_dim). k, v: the same, but for another time where not is_causal. Views of any
    strides are read as they are. scale: 1 / sqrt(head_dim) unless given. is_causal: a query sees the keys up
    to its own time. Gives (batch, heads, time, head_dim). All float32 or all float64.

    Raises ValueError for sizes that don't fit, TypeError for other dtypes.
    """
    q, k, v = tensor(q), tensor(k), tensor(v)
    op = "scaled_dot_product_attention"
    if q.ndim != 4:
        raise ValueError(f"{op}: q must be (batch, heads, time, head_dim), got {q.shape}")
    batch, heads, time, head_dim = q.shape
    fits = k.ndim == 4 and k.shape == (batch, heads, time if is_causal else k.shape[2], head_dim)
    if not fits or v.shape != k.shape:
        raise ValueError(f"{op}: q {q.shape}, k {k.shape} and v {v.shape} do not fit (is_causal={is_causal})")
    check_floats(op, q=q, k=k, v=v)
    return Attention.apply(q, k, v, bool(is_causal), _scale(scale, head_dim))


class SelfAttention(Function):
    __slots__ = ()
    expensive = True

    def forward(self, qkv: Array, heads: int, causal: bool, scale: float) -> Array:
        batch, time, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        y = empty((batch, time, width), qkv.dtype)
        lse = empty_exact((batch, heads, time), qkv)
        (y_heads,) = _heads(y, 1, heads)
        kernels().attention.forward(*_heads(qkv, 3, heads), y_heads, lse, causal=causal, scale=scale)
        self.saved = (qkv, y, lse, heads, causal, scale)
        return y

    def keep(self, y: Array) -> tuple:
        return y, self.saved[2]  # and lse

    def resume(self, kept: tuple, qkv: Array, heads: int, causal: bool, scale: float) -> Array:
        y, lse = kept
        self.saved = (qkv, y, lse, heads, causal, scale)
        return y

    def backward(self, dy: Array) -> tuple:
        qkv, y, lse, heads, causal, scale = self.saved
        dqkv = empty_like(qkv)
        (dy_heads,), (y_heads,) = _heads(dy, 1, heads), _heads(y, 1, heads)
        q, k, v = _heads(qkv, 3, heads)
        gradients = _heads(dqkv, 3, heads)
        kernels().attention.backward(dy_heads, q, k, v, y_heads, lse, *gradients, causal=causal, scale=scale)
        return dqkv, None, None, None


def self_attention(qkv: "Tensor", heads: int, is_causal: bool = True, scale: float | None = None) -> "Tensor":
    """Attention of a sequence to itself, from queries, keys and values in one tensor, which is not copied.

    qkv: (batch, time, 3 * width), as one linear layer makes it: first all heads' queries, then keys, then
    values. Gives (batch, time, width), the heads side by side. float32 or float64.

    Raises ValueError if the last dimension is not 3 * heads * head_dim, TypeError for other dtypes.
    """
    qkv = tensor(qkv)
    if heads < 1:
        raise ValueError(f"self_attention: heads must be at least 1, got {heads}")
    if qkv.ndim != 3 or qkv.shape[2] % (3 * heads):
        raise ValueError(
            f"self_attention: qkv must be (batch, time, 3 * width), width a multiple of {heads} heads; "
            f"got {qkv.shape}"
        )
    check_floats("self_attention", qkv=qkv)
    return SelfAttention.apply(qkv, heads, bool(is_causal), _scale(scale, qkv.shape[2] // (3 * heads)))


def _heads(x: Array, parts: int, heads: int) -> list:
    """(batch, time, parts * width) as that many views (batch, heads, time, head_dim)."""
    batch, time, width = x.shape
    x = x.reshape(batch, time, parts, heads, width // (parts * heads))
    return [x[:, :, part].transpose(0, 2, 1, 3) for part in range(parts)]


def _inner_unit(x: Array) -> Array:
    """x itself if its last stride is that of an element, else a copy."""
    return x if x.strides[-1] == x.dtype.itemsize else x.copy()


def _scale(scale: float | None, head_dim: int) -> float:
    return 1 / sqrt(head_dim) if scale is None else float(scale)
