"""Attention by cuDNN's fused kernels: 16-bit, on tensor cores, any strides.

What it keeps for backward is our lse: the natural logarithm of the sum of exponentials of the scaled
products, float32, (batch, heads, time).

Keys and values, and their gradients, may have fewer heads than queries, which then go in groups: head h of q
looks at head h // (heads of q / heads of k). cuDNN sees that from the shapes; nothing is repeated in memory.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from shardrt.kernels.cuda._cudnn import CuDNN
from shardrt.kernels.cuda._launch import Array, vectors

WIDEST = 128  # elements of a head, forward and backward, on every GPU since Ampere
_ELEMENTS = ("float16", "bfloat16")
_VECTOR = 8  # elements of 16 bytes, in which cuDNN reads
_FORWARD, _BACKWARD = ("q", "k", "v", "y", "lse"), ("dy", "q", "k", "v", "y", "lse", "dq", "dk", "dv")


class CuDNNAttention:
    """Attention forward and backward."""

    def __init__(self, cudnn: CuDNN) -> None:
        self._cudnn = cudnn

    def forward(
        self, q: Array, k: Array, v: Array, y: Array, lse: Array, *, causal: bool, scale: float
    ) -> bool:
        """As attention.forward, if cuDNN can; else does nothing and gives False."""
        return self._run(_FORWARD, (q, k, v, y, lse), causal, scale, self._describe_forward)

    def backward(
        self,
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
    ) -> bool:
        """As attention.backward, the same bits every time, if cuDNN can; else does nothing: False."""
        arrays = dy, q, k, v, y, lse, dq, dk, dv
        return self._run(_BACKWARD, arrays, causal, scale, self._describe_backward)

    def _run(
        self, names: tuple, arrays: tuple, causal: bool, scale: float, describe: Callable[..., None]
    ) -> bool:
        named = dict(zip(names, arrays, strict=True))
        if not _suits(named):
            return False
        q, k = named["q"], named["k"]
        cudnn = self._cudnn.module
        mask = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "diagonal_band_right_bound": 0}
        how = {"attn_scale": float(scale), **(mask if causal else {})}
        refused = f"attention: cuDNN refuses q {q.shape}, k {k.shape} of {q.dtype.name}"
        kind = names, causal, scale
        return self._cudnn.run(kind, arrays, lambda graph: describe(graph, named, **how), refused=refused)

    def _describe_forward(self, graph: Any, arrays: dict[str, Array], **how: Any) -> None:
        cudnn = self._cudnn
        inputs = {name: cudnn.input(graph, uid, arrays[name]) for uid, name in enumerate(_FORWARD[:3], 1)}
        outputs = graph.sdpa(**inputs, generate_stats=True, **how)
        for uid, (name, output) in enumerate(zip(_FORWARD[3:], outputs, strict=True), 4):
            cudnn.output(output, uid, arrays[name])

    def _describe_backward(self, graph: Any, arrays: dict[str, Array], **how: Any) -> None:
        cudnn = self._cudnn
        dy, q, k, v, y, lse = (
            cudnn.input(graph, uid, arrays[name]) for uid, name in enumerate(_BACKWARD[:6], 1)
        )
        outputs = graph.sdpa_backward(
            q=q, k=k, v=v, o=y, dO=dy, stats=lse, use_deterministic_algorithm=True, **how
        )
        for uid, (name, output) in enumerate(zip(_BACKWARD[6:], outputs, strict=True), 7):
            cudnn.output(output, uid, arrays[name])


def _suits(arrays: dict[str, Array]) -> bool:
    """Whether cuDNN is made for these: 16-bit heads of up to WIDEST, read and written 16 bytes at a time.

    And whole groups of heads of q for each of k.
    """
    q, lse = arrays["q"], arrays["lse"]
    heads = [x for name, x in arrays.items() if name != "lse"]
    if q.dtype.name not in _ELEMENTS or q.shape[3] % _VECTOR or q.shape[3] > WIDEST or not q.size:
        return False
    whole = lse.dtype == np.float32 and lse.flags.c_contiguous
    readable = whole and vectors(*heads) and all(x.dtype == q.dtype and _in_vectors(x) for x in heads)
    return readable and q.shape[1] % arrays["k"].shape[1] == 0


def _in_vectors(x: Array) -> bool:
    steps = [stride for stride, count in zip(x.strides[:3], x.shape[:3], strict=True) if count > 1]
    return x.size > 0 and all(step > 0 and step % (_VECTOR * x.dtype.itemsize) == 0 for step in steps)
