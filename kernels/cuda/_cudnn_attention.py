"""Attention by cuDNN's fused kernels: 16-bit, on tensor cores, any strides.

What it keeps for backward is our lse: the natural logarithm of the sum of exponentials of the scaled
products, float32, (batch, heads, time).

Keys and values, and their gradients, may have fewer heads than queries, which then go in groups: head h of q
looks at head h // (heads of q / heads of k). cuDNN sees that from the shapes; nothing is repeated in memory.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardrt.kernels.cuda._cudnn import CuDNN
from shardrt.kernels.cuda._launch import Array, vectors
from shardrt.kernels.determinism import are_deterministic_algorithms_enabled

WIDEST = 128  # elements of a head, forward and backward, on every GPU since Ampere
_ELEMENTS = ("float16", "bfloat16")
_VECTOR = 8  # elements of 16 bytes, in which cuDNN reads
_WORKSPACE = 5 << 29  # bytes that a deterministic backward may take: a head of 32,768 tokens takes 4 << 29
_RESHAPING, _RESHAPES = ((1, 24), (1, 25), (1, 26)), 92200  # see builds_backward
_WINDOWS = 90200  # cuDNN that takes a window
_FORWARD, _BACKWARD = ("q", "k", "v", "y", "lse"), ("dy", "q", "k", "v", "y", "lse", "dq", "dk", "dv")


class Mask(NamedTuple):
    """Which keys a query sees: up to the diagonal, by cuDNN's name of its alignment, "" for all of them.

    window: of those the last so many, None for all of them.
    """

    alignment: str
    window: int | None = None


class CuDNNAttention:
    """Attention forward and backward."""

    def __init__(self, cudnn: CuDNN) -> None:
        self.cudnn = cudnn
        self._reported: set[str] = set()
        self._builds_backward = builds_backward(*cudnn.versions)

    def forward(
        self,
        *arrays: Array,
        causal: bool,
        scale: float,
        bottom_right: bool = False,
        window: int | None = None,
    ) -> bool:
        """As attention.forward of its arrays, if cuDNN can; else does nothing and gives False.

        bottom_right: causal so that the last query sees all keys, and each one before it one less.
        """
        q, k, v, y, lse = arrays
        mask = _mask(q, k, causal, bottom_right, window)
        fits = suits(q, k, lse, v, y) and self._takes(window)
        return fits and self.cudnn.run(*self._operation(_FORWARD, arrays, mask, scale))

    def backward(
        self,
        *arrays: Array,
        causal: bool,
        scale: float,
        bottom_right: bool = False,
        window: int | None = None,
    ) -> bool:
        """As attention.backward of its arrays, if cuDNN can; else False: gradients are still to be written.

        Where deterministic algorithms are asked for, the same bits every time. On Hopper that takes memory
        for the matrix of weights (all of cuDNN before 9.25), so it goes in parts of a bounded size.
        """
        dy, q, k, v, y, lse, dq, dk, dv = arrays
        fits = suits(q, k, lse, dy, v, y, dq, dk, dv) and self._takes(window)
        if not fits or self.can_not_build() or self._may_give_nan(q, k, causal):
            return False
        fixed, mask = are_deterministic_algorithms_enabled(), _mask(q, k, causal, bottom_right, window)
        parts = self._parts(arrays, mask, scale) if fixed else [arrays]
        operations = (self._operation(_BACKWARD, part, mask, scale, fixed) for part in parts)
        return bool(parts) and all(self.cudnn.run(*operation) for operation in operations)

    def _parts(self, arrays: tuple, mask: Mask, scale: float) -> list[tuple]:
        """The arrays by samples, or else by heads, so that none takes more than _WORKSPACE; or no parts."""
        size = self.cudnn.workspace(*self._operation(_BACKWARD, arrays, mask, scale, True))
        if size is None:
            return []
        if size <= _WORKSPACE:
            return [arrays]
        halves = _halves(arrays)
        if not halves:
            self._report(f"deterministic attention of {arrays[1].shape} would take {size} bytes")
        found = [self._parts(half, mask, scale) for half in halves]
        return [part for parts in found for part in parts] if all(found) else []

    def _takes(self, window: int | None) -> bool:
        return window is None or self.cudnn.versions[1] >= _WINDOWS

    def can_not_build(self) -> bool:
        """Whether these versions can't build a backward together: each shape would be tried and told of."""
        if self._builds_backward:
            return False
        frontend, backend = self.cudnn.versions
        what = f"attention: nvidia-cudnn-frontend {frontend} can't build its backward on cuDNN {backend}"
        self._report(f"{what}, as 1.24 to 1.26 can't before 9.22: pip install 'shardrt[cudnn]'")
        return True

    def _may_give_nan(self, q: Array, k: Array, causal: bool) -> bool:
        """Whether cuDNN's backward on Hopper may give nan for rows whose lse is below -88.

        It takes keys in pairs of 64 and does not mask a second half that is not there (PyTorch #196678,
        cudnn-frontend #628), nor what lies beyond a single query (#1072). The causal mask covers both. Seen
        in 9.19 to 9.26; no version is known to be without either.
        """
        covered = causal and q.shape[2] <= k.shape[2]
        if covered or not self.cudnn.architecture.startswith("sm_90"):
            return False
        if k.shape[2] % 128 != 64 and q.shape[2] > 1:
            return False
        self._report(f"attention: cuDNN may give nan for q {q.shape}, k {k.shape} without a causal mask")
        return True

    def _report(self, what: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            warnings.warn(f"{what}; slower kernels do its backward", stacklevel=5)

    def _operation(
        self, names: tuple, arrays: tuple, mask: Mask, scale: float, fixed: bool = False
    ) -> tuple[tuple, tuple, Callable[[Any], None], str]:
        """What CuDNN.run is told: the kind, the arrays, how the graph is described, what is refused."""
        cudnn, named = self.cudnn.module, dict(zip(names, arrays, strict=True))
        how: dict[str, Any] = {"attn_scale": float(scale)}
        if mask.alignment:
            how |= {"diagonal_alignment": getattr(cudnn.diagonal_alignment, mask.alignment)}
            how |= {"diagonal_band_right_bound": 0}
        if mask.window is not None:
            how |= {"diagonal_band_left_bound": mask.window}  # key + window > query
        q, k = named["q"], named["k"]
        refused = f"attention: cuDNN refuses q {q.shape}, k {k.shape} of {q.dtype.name}"

        def describe(graph: Any) -> None:
            if names is _FORWARD:
                self._describe_forward(graph, named, **how)
            else:
                self._describe_backward(graph, named, use_deterministic_algorithm=fixed, **how)

        return (names, mask, scale, fixed), arrays, describe, refused

    def _describe_forward(self, graph: Any, arrays: dict[str, Array], **how: Any) -> None:
        cudnn = self.cudnn
        inputs = {name: cudnn.input(graph, uid, arrays[name]) for uid, name in enumerate(_FORWARD[:3], 1)}
        outputs = graph.sdpa(**inputs, generate_stats=True, **how)
        for uid, (name, output) in enumerate(zip(_FORWARD[3:], outputs, strict=True), 4):
            cudnn.output(output, uid, arrays[name])

    def _describe_backward(self, graph: Any, arrays: dict[str, Array], **how: Any) -> None:
        cudnn = self.cudnn
        dy, q, k, v, y, lse = (
            cudnn.input(graph, uid, arrays[name]) for uid, name in enumerate(_BACKWARD[:6], 1)
        )
        outputs = graph.sdpa_backward(q=q, k=k, v=v, o=y, dO=dy, stats=lse, **how)
        for uid, (name, output) in enumerate(zip(_BACKWARD[6:], outputs, strict=True), 7):
            cudnn.output(output, uid, arrays[name])


def builds_backward(frontend: str, backend: int) -> bool:
    """Whether nvidia-cudnn-frontend of this version ("1.28.0") builds it on this cuDNN (91900 is 9.19).

    1.24 to 1.26 describe a mode of reshaping that cuDNN has from 9.22 on (cudnn-frontend #466).
    """
    number = tuple(int(part) for part in frontend.split(".")[:2])
    return backend >= _RESHAPES or number not in _RESHAPING


def _mask(q: Array, k: Array, causal: bool, bottom_right: bool, window: int | None) -> Mask:
    """Give the mask; both alignments are the same with one key a query."""
    if not causal:
        return Mask("")
    return Mask("BOTTOM_RIGHT" if bottom_right and q.shape[2] != k.shape[2] else "TOP_LEFT", window)


def suits(q: Array, k: Array, lse: Array, *others: Array) -> bool:
    """Whether cuDNN is made for these: 16-bit heads of up to WIDEST, read and written 16 bytes at a time.

    And whole groups of heads of q for each of k.
    """
    heads = (q, k, *others)
    if q.dtype.name not in _ELEMENTS or q.shape[3] % _VECTOR or q.shape[3] > WIDEST or not q.size:
        return False
    whole = lse.dtype == np.float32 and lse.flags.c_contiguous
    readable = whole and vectors(lse, *heads) and all(x.dtype == q.dtype and _in_vectors(x) for x in heads)
    return readable and q.shape[1] % k.shape[1] == 0


def _halves(arrays: tuple) -> list[tuple]:
    """Two halves of the samples, of a single one the heads; none of one head of k, or not at 16 bytes."""
    batch, heads = arrays[2].shape[:2]  # of k
    if batch > 1:
        halves = [tuple(x[part] for x in arrays) for part in (slice(batch // 2), slice(batch // 2, None))]
    else:
        middles = [x.shape[1] // heads * (heads // 2) for x in arrays]  # several heads of q go with one of k
        pairs = list(zip(arrays, middles, strict=True))
        halves = [tuple(x[:, :m] for x, m in pairs), tuple(x[:, m:] for x, m in pairs)]
    return halves if batch * heads > 1 and vectors(*halves[1]) else []


def _in_vectors(x: Array) -> bool:
    steps = [stride for stride, count in zip(x.strides[:3], x.shape[:3], strict=True) if count > 1]
    return x.size > 0 and all(step > 0 and step % (_VECTOR * x.dtype.itemsize) == 0 for step in steps)
