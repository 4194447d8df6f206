"""cuDNN through nvidia-cudnn-frontend: operations as graphs of one node, on arrays where they lie.

A graph is described once per shape, strides and type, and cuDNN plans it for some tenths of a second; from
then on it takes addresses. What the operations are is in _cudnn_attention.py and _cudnn_conv2d.py.

Never run on a GPU yet (docs/reference/limits.md); tests/cuda runs it against a stand-in for the module
`cudnn`.
"""

import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from shardrt.kernels.cuda._launch import Array, Stage, address

_ELEMENTS = {
    "float16": "HALF",
    "bfloat16": "BFLOAT16",
    "float32": "FLOAT",
    "int32": "INT32",
    "int64": "INT64",
}


class CuDNN:
    """The library, and a plan for every kind of operation met so far; they live as long as the process."""

    def __init__(self, cudnn: ModuleType, stage: Stage) -> None:
        """Raises RuntimeError where the module finds no cuDNN."""
        self.module = cudnn
        self._stage = stage
        self._handles: dict[int, Any] = {}  # by stream: threads must not share one
        self._graphs: dict[tuple, Any] = {}
        self._lock = threading.Lock()
        self._handle()

    def run(
        self,
        kind: tuple,
        arrays: tuple[Array, ...],
        describe: Callable[[Any], None],
        refused: str = "",
        *,
        never: tuple[str, ...] = (),
    ) -> bool:
        """Run the operation that `describe` adds to a graph; if there is no plan for it, False, nothing done.

        kind: what a plan depends on besides types, shapes and strides. arrays: those with uid 1, 2, ...
        refused: what a warning then says that cuDNN refuses. never: numerical notes that no plan may have.
        """
        graph = self._plan(kind, arrays, describe, never, refused)
        if graph is None:
            return False
        # Not kept from call to call: a captured graph would go on using what a larger one had replaced.
        workspace = self._stage.empty((max(graph.get_workspace_size(), 1),), np.uint8)
        places = {uid: address(x) for uid, x in enumerate(arrays, 1)}
        handle = self._handle()
        with self._lock:  # of handles cuDNN says that threads must not share them, of graphs it says nothing
            graph.execute(places, address(workspace), handle=handle)
        return True

    def workspace(
        self, kind: tuple, arrays: tuple[Array, ...], describe: Callable[[Any], None], refused: str = ""
    ) -> int | None:
        """Bytes that `run` would take besides the arrays; None where there is no plan."""
        graph = self._plan(kind, arrays, describe, (), refused)
        return None if graph is None else graph.get_workspace_size()

    @property
    def versions(self) -> tuple[str, int]:
        """Of the frontend, as "1.28.0", and of cuDNN, as 91900."""
        return self.module.__version__, self.module.backend_version()

    @property
    def architecture(self) -> str:
        """Of the GPU, as "sm_90"."""
        return self._stage.architecture

    def input(self, graph: Any, uid: int, x: Array, count: int = 0, places: Any = None) -> Any:
        """A tensor like x, four-dimensional, to read. count, places: it is of sequences; see `output`."""
        shape, strides = _layout(x)
        how = {} if places is None else {"ragged_offset": places}
        shape[0] = count or shape[0]
        return graph.tensor(dim=shape, stride=strides, data_type=self._element(x), uid=uid, **how)

    def output(self, tensor: Any, uid: int, x: Array, count: int = 0, places: Any = None) -> None:
        """Have a node's result written like x.

        count, places: as `count` sequences of x, each up to as long as its third axis, and beginning where
        the tensor `places` says, in elements (cuDNN's ragged offsets).
        """
        shape, strides = _layout(x)
        shape[0] = count or shape[0]
        tensor.set_output(True).set_uid(uid).set_dim(shape).set_stride(strides)
        tensor.set_data_type(self._element(x))
        if places is not None:
            tensor.set_ragged_offset(places)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Scratch memory."""
        return self._stage.empty(shape, dtype)

    def _plan(
        self, kind: tuple, arrays: tuple[Array, ...], describe: Callable, never: tuple, refused: str
    ) -> Any:
        """The graph of an operation, made when it is first asked for; None where cuDNN has no plan."""
        key = (*kind, *[(x.dtype, x.shape, x.strides) for x in arrays])  # a dtype's name is slow
        if key not in self._graphs:
            self._graphs[key] = self._graph(arrays[0], describe, never, refused)
        return self._graphs[key]

    def _graph(self, first: Array, describe: Callable[[Any], None], never: tuple, refused: str) -> Any:
        """A graph with its plan; None where cuDNN has none."""
        cudnn = self.module
        graph = cudnn.pygraph(
            io_data_type=self._element(first),
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self._handle(),
        )
        try:
            describe(graph)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.deselect_numeric_notes([getattr(cudnn.numerical_note, note) for note in never])
            graph.check_support()
            graph.build_plans()
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            if refused:
                warnings.warn(f"{refused}; slower kernels replace it ({error})", stacklevel=7)
            return None
        return graph

    def _element(self, x: Array) -> Any:
        return getattr(self.module.data_type, _ELEMENTS[x.dtype.name])

    def _handle(self) -> Any:
        """The one of the current stream."""
        stream = self._stage.stream()
        if stream not in self._handles:
            handle = self.module.create_handle()
            self.module.set_stream(handle, stream)
            self._handles[stream] = handle
        return self._handles[stream]


def _layout(x: Array) -> tuple[list[int], list[int]]:
    """Shape and strides as cuDNN counts: in elements, four of each."""
    shape, strides = list(x.shape), [stride // x.dtype.itemsize for stride in x.strides]
    return (shape, strides) if x.ndim == 4 else ([*shape, 1], [*strides, 1])
