"""A stand-in for nvidia-cudnn-frontend: graphs of one attention node, computed on the CPU from addresses.

It has the names and keywords that versions 1.22 to 1.32 share, and is strict about them.
"""

import ctypes
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

from shardrt.kernels.cpu import attention as cpu

ELEMENTS = {"HALF": np.float16, "BFLOAT16": ml_dtypes.bfloat16, "FLOAT": np.float32}


class NotSupported(Exception):
    """cudnnGraphNotSupportedError."""


class Tensor:
    """cudnn.tensor."""

    def __init__(self, dim=None, stride=None, data_type=None, uid=-1):
        self.dim, self.stride, self.data_type, self.uid, self.output = dim, stride, data_type, uid, False

    def set_output(self, value):
        self.output = value
        return self

    def set_uid(self, uid):
        self.uid = uid
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self

    def at(self, address):
        """The memory as a NumPy array."""
        assert type(address) is int and address
        kind = np.dtype(ELEMENTS[self.data_type])
        assert len(self.dim) == len(self.stride) == 4
        last = sum((count - 1) * step for count, step in zip(self.dim, self.stride, strict=True))
        memory = (ctypes.c_ubyte * ((last + 1) * kind.itemsize)).from_address(address)
        strides = [step * kind.itemsize for step in self.stride]
        return np.ndarray(self.dim, kind, memory, 0, strides)


class Graph:
    """cudnn.pygraph."""

    def __init__(self, cudnn, *, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert io_data_type in ("HALF", "BFLOAT16")
        assert intermediate_data_type == compute_data_type == "FLOAT"
        assert handle in cudnn.handles
        self.cudnn, self.tensors, self.built, self.runs = cudnn, [], False, 0
        cudnn.graphs.append(self)

    def tensor(self, *, dim, stride, data_type, uid):
        self.tensors.append(Tensor(dim, stride, data_type, uid))
        return self.tensors[-1]

    def sdpa(self, *, q, k, v, generate_stats, attn_scale, **mask):
        assert generate_stats is True
        return self._node("forward", (q, k, v), 2, attn_scale, mask)

    def sdpa_backward(self, *, q, k, v, o, dO, stats, attn_scale, use_deterministic_algorithm, **mask):
        assert use_deterministic_algorithm is True
        return self._node("backward", (dO, q, k, v, o, stats), 3, attn_scale, mask)

    def _node(self, kind, inputs, outputs, scale, mask):
        assert mask in ({}, {"diagonal_alignment": "TOP_LEFT", "diagonal_band_right_bound": 0})
        self.kind, self.scale, self.causal = kind, scale, bool(mask)
        made = [Tensor() for _ in range(outputs)]
        self.tensors.extend(made)
        self.arguments = [*inputs, *made]
        return made

    def build(self, modes):
        assert modes == ["A", "FALLBACK"]
        if self.cudnn.refuses:
            raise NotSupported("no engine")
        assert [t.uid for t in self.tensors] == list(range(1, len(self.tensors) + 1))
        assert all(t.output for t in self.tensors[len(self.arguments) :])
        self.built = True

    def get_workspace_size(self):
        return self.cudnn.workspace

    def execute(self, places, workspace, handle):
        assert self.built and workspace and sorted(places) == sorted(t.uid for t in self.tensors)
        assert self.cudnn.handles[handle] == self.cudnn.stream, "a handle of another stream"
        self.runs += 1
        self.cudnn.workspaces.append(workspace)
        arrays = [t.at(places[t.uid]) for t in self.arguments]
        statistics = 4 if self.kind == "forward" else 5
        inputs = 3 if self.kind == "forward" else 6
        exact = [x.astype(np.float64) for x in arrays]
        exact[statistics] = exact[statistics][..., 0]
        self._compute(exact)
        exact[statistics] = exact[statistics][..., None]
        for array, value in zip(arrays[inputs:], exact[inputs:], strict=True):
            array[...] = value.astype(array.dtype)

    def _compute(self, arrays):
        """Grouped queries too: each head of k and v for several of q, their gradients summed over those."""
        first = 0 if self.kind == "forward" else 1  # of q, k, v; the gradients of k and v are last
        grouped = [first + 1, first + 2, *((-2, -1) if first else ())]
        group = arrays[first].shape[1] // arrays[first + 1].shape[1]
        assert group * arrays[first + 1].shape[1] == arrays[first].shape[1]
        whole = list(arrays)
        for place in grouped:
            whole[place] = np.repeat(arrays[place], group, axis=1)
        getattr(cpu, self.kind)(*whole, causal=self.causal, scale=self.scale)
        for place in grouped[2:]:
            batch, heads, time, width = arrays[place].shape
            arrays[place][...] = whole[place].reshape(batch, heads, group, time, width).sum(axis=2)


def module():
    """A module that passes for cudnn. `refuses`: whether it has no plan; `stream`: where work goes now."""
    cudnn = ModuleType("cudnn")
    cudnn.handles, cudnn.graphs, cudnn.workspaces = {}, [], []
    cudnn.refuses, cudnn.stream, cudnn.workspace = False, 7, 1000
    cudnn.data_type = SimpleNamespace(**{name: name for name in ELEMENTS})
    cudnn.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    cudnn.diagonal_alignment = SimpleNamespace(TOP_LEFT="TOP_LEFT")
    cudnn.cudnnGraphNotSupportedError = NotSupported
    cudnn.pygraph = lambda **how: Graph(cudnn, **how)

    def create_handle():
        cudnn.handles[len(cudnn.handles) + 100] = None
        return len(cudnn.handles) + 99

    def set_stream(handle, stream):
        assert handle in cudnn.handles
        cudnn.handles[handle] = stream

    cudnn.create_handle, cudnn.set_stream = create_handle, set_stream
    return cudnn
