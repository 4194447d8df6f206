"""Attention by cuDNN's fused kernels, through nvidia-cudnn-frontend: 16-bit, on tensor cores, any strides.

An operation is described once per shape, strides and type as a graph of one node, which cuDNN plans for some
tenths of a second; from then on it takes addresses. What it keeps for backward is our lse: the natural
logarithm of the sum of exponentials of the scaled products, float32, (batch, heads, time).

Keys and values, and their gradients, may have fewer heads than queries, which then go in groups: head h of q
looks at head h // (heads of q / heads of k). cuDNN sees that from the shapes; nothing is repeated in memory.

Never run on a GPU yet (docs/status.md); tests/cuda runs it against a stand-in for the module `cudnn`.
"""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from shardrt.kernels.cuda._launch import Array, address, vectors

WIDEST = 128  # elements of a head, forward and backward, on every GPU since Ampere
_ELEMENTS = {"float16": "HALF", "bfloat16": "BFLOAT16"}
_VECTOR = 8  # elements of 16 bytes, in which cuDNN reads
_FORWARD, _BACKWARD = ("q", "k", "v", "y", "lse"), ("dy", "q", "k", "v", "y", "lse", "dq", "dk", "dv")


class Stage(Protocol):
    """Where attention runs."""

    def stream(self) -> int:
        """The current stream's handle."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Scratch memory."""


class CuDNNAttention:
    """The library, and a plan for every kind of attention met so far; they live as long as the process."""

    def __init__(self, cudnn: ModuleType, stage: Stage) -> None:
        """Raises RuntimeError where the module finds no cuDNN."""
        self._cudnn = cudnn
        self._stage = stage
        self._handles: dict[int, Any] = {}  # by stream: threads must not share one
        self._workspaces: dict[int, Array] = {}  # by stream: attention in two streams may run at once
        self._graphs: dict[tuple, Any] = {}
        self._handle()

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
        if not _suits(dict(zip(names, arrays, strict=True))):
            return False
        key = (names, arrays[1].dtype.name, *((x.shape, x.strides) for x in arrays), causal, scale)
        if key not in self._graphs:
            self._graphs[key] = self._graph(dict(zip(names, arrays, strict=True)), causal, scale, describe)
        graph = self._graphs[key]
        if graph is None:
            return False
        places = {uid: address(x) for uid, x in enumerate(arrays, 1)}
        graph.execute(places, self._workspace(graph.get_workspace_size()), handle=self._handle())
        return True

    def _graph(self, arrays: dict[str, Array], causal: bool, scale: float, describe: Callable) -> Any:
        """What runs this kind of attention; None where cuDNN has nothing, which a warning says."""
        cudnn = self._cudnn
        graph = cudnn.pygraph(
            io_data_type=self._element(arrays["q"]),
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self._handle(),
        )
        mask = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "diagonal_band_right_bound": 0}
        try:
            describe(graph, arrays, attn_scale=float(scale), **(mask if causal else {}))
            graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            q, k = arrays["q"], arrays["k"]
            what = f"q {q.shape}, k {k.shape} of {q.dtype.name}"
            warnings.warn(f"attention: cuDNN refuses {what}; slower kernels do it ({error})", stacklevel=5)
            return None
        return graph

    def _describe_forward(self, graph: Any, arrays: dict[str, Array], **how: Any) -> None:
        inputs = {name: self._input(graph, uid, arrays[name]) for uid, name in enumerate(_FORWARD[:3], 1)}
        outputs = graph.sdpa(**inputs, generate_stats=True, **how)
        for uid, (name, output) in enumerate(zip(_FORWARD[3:], outputs, strict=True), 4):
            self._output(output, uid, arrays[name])

    def _describe_backward(self, graph: Any, arrays: dict[str, Array], **how: Any) -> None:
        dy, q, k, v, y, lse = (
            self._input(graph, uid, arrays[name]) for uid, name in enumerate(_BACKWARD[:6], 1)
        )
        outputs = graph.sdpa_backward(
            q=q, k=k, v=v, o=y, dO=dy, stats=lse, use_deterministic_algorithm=True, **how
        )
        for uid, (name, output) in enumerate(zip(_BACKWARD[6:], outputs, strict=True), 7):
            self._output(output, uid, arrays[name])

    def _input(self, graph: Any, uid: int, x: Array) -> Any:
        shape, strides = _layout(x)
        return graph.tensor(dim=shape, stride=strides, data_type=self._element(x), uid=uid)

    def _output(self, tensor: Any, uid: int, x: Array) -> None:
        shape, strides = _layout(x)
        tensor.set_output(True).set_uid(uid).set_dim(shape).set_stride(strides)
        tensor.set_data_type(self._element(x))

    def _element(self, x: Array) -> Any:
        return getattr(self._cudnn.data_type, _ELEMENTS.get(x.dtype.name, "FLOAT"))

    def _handle(self) -> Any:
        """The one of the current stream."""
        stream = self._stage.stream()
        if stream not in self._handles:
            handle = self._cudnn.create_handle()
            self._cudnn.set_stream(handle, stream)
            self._handles[stream] = handle
        return self._handles[stream]

    def _workspace(self, nbytes: int) -> int:
        """The address of that many bytes that only the current stream uses; it only grows."""
        stream = self._stage.stream()
        if stream not in self._workspaces or self._workspaces[stream].size < nbytes:
            self._workspaces[stream] = self._stage.empty((max(nbytes, 1),), np.uint8)
        return address(self._workspaces[stream])


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


def _layout(x: Array) -> tuple[list[int], list[int]]:
    """Shape and strides as cuDNN counts: in elements, four of each."""
    shape, strides = list(x.shape), [stride // x.dtype.itemsize for stride in x.strides]
    return (shape, strides) if x.ndim == 4 else ([*shape, 1], [*strides, 1])
