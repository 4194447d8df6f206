"""A stand-in for nvidia-cudnn-frontend: graphs of one node, computed on the CPU from addresses: attention
and convolution.

It has the names and keywords that versions 1.22 to 1.32 share, and is strict about them. What is known to
fail in some versions of the frontend and of cuDNN fails here too: see `module`. That the real one takes the
same graphs, test_cudnn_frontend.py says where that is installed.
"""

import ctypes
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np

from shardrt.kernels import cpu

ELEMENTS = {
    "HALF": np.float16,
    "BFLOAT16": ml_dtypes.bfloat16,
    "FLOAT": np.float32,
    "INT32": np.int32,
    "INT64": np.int64,
}
STEPS = [
    "validate",
    "build_operation_graph",
    "create_execution_plans",
    "deselect_numeric_notes",
    "check_support",
    "build_plans",
]
# The notes of the plans that a heuristic proposes, the fastest first.
PLANS = [
    ("WINOGRAD",),
    ("FFT",),
    ("TENSOR_CORE", "NONDETERMINISTIC"),
    ("TENSOR_CORE", "REDUCED_PRECISION_REDUCTION"),
    ("DOWN_CONVERT_INPUTS", "TENSOR_CORE"),
    ("TENSOR_CORE",),
    ("DOWN_CONVERT_INPUTS",),
    ("NONDETERMINISTIC",),
    (),
]
NOTES = sorted({note for plan in PLANS for note in plan})


class NotSupported(Exception):
    """cudnnGraphNotSupportedError."""


class Handle:
    """What 1.28 wraps the number of a handle in."""


def _setter(name):
    """A method that sets an attribute and gives the object."""

    def setter(self, value):
        setattr(self, name, value)
        return self

    return setter


class Tensor:
    """cudnn.tensor."""

    def __init__(self, dim=None, stride=None, data_type=None, uid=-1, ragged_offset=None):
        self.dim, self.stride, self.data_type, self.uid, self.output = dim, stride, data_type, uid, False
        self.ragged = ragged_offset

    set_output = _setter("output")
    set_uid = _setter("uid")
    set_dim = _setter("dim")
    set_stride = _setter("stride")
    set_data_type = _setter("data_type")
    set_ragged_offset = _setter("ragged")

    def at(self, address):
        """The memory as a NumPy array."""
        assert type(address) is int and address % 16 == 0
        return self._array(address, self.dim)

    def sequence(self, address, place, length):
        """That of one sequence, which begins `place` elements from the address."""
        assert length <= self.dim[2]
        start = address + place * np.dtype(ELEMENTS[self.data_type]).itemsize
        return self._array(start, [1, self.dim[1], length, self.dim[3]])

    def _array(self, address, dim):
        kind = np.dtype(ELEMENTS[self.data_type])
        assert len(self.dim) == len(self.stride) == 4
        last = sum((count - 1) * step for count, step in zip(dim, self.stride, strict=True))
        memory = (ctypes.c_ubyte * ((last + 1) * kind.itemsize)).from_address(address)
        strides = [step * kind.itemsize for step in self.stride]
        return np.ndarray(dim, kind, memory, 0, strides)


class Graph:
    """cudnn.pygraph."""

    def __init__(self, cudnn, *, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert io_data_type in ELEMENTS
        assert intermediate_data_type == compute_data_type == "FLOAT"
        assert cudnn.owners[handle] == cudnn.device(), "a handle of another GPU"
        self.device = cudnn.device()
        self.cudnn, self.io, self.tensors, self.steps, self.runs = cudnn, io_data_type, [], [], 0
        self.bounded, self.unsupported = (), ""
        cudnn.graphs.append(self)

    def tensor(self, *, dim, stride, data_type, uid, ragged_offset=None):
        self.tensors.append(Tensor(dim, stride, data_type, uid, ragged_offset))
        return self.tensors[-1]

    # -- nodes

    def sdpa(self, *, q, k, v, generate_stats, attn_scale, **mask):
        assert generate_stats is True
        return self._attention("forward", (q, k, v), 2, attn_scale, mask)

    def sdpa_backward(self, *, q, k, v, o, dO, stats, attn_scale, use_deterministic_algorithm, **mask):
        assert type(use_deterministic_algorithm) is bool
        self.deterministic = use_deterministic_algorithm
        self.bounded = mask.pop("max_total_seq_len_q", None), mask.pop("max_total_seq_len_kv", None)
        return self._attention("backward", (dO, q, k, v, o, stats), 3, attn_scale, mask)

    def conv_fprop(self, *, image, weight, stride, padding, dilation):
        return self._convolution("forward", (image, weight), (0, 1, 2), stride, padding, dilation)

    def conv_dgrad(self, *, loss, filter, stride, padding, dilation):
        return self._convolution("backward_input", (loss, filter), (2, 1, 0), stride, padding, dilation)

    def conv_wgrad(self, *, image, loss, stride, padding, dilation):
        return self._convolution("backward_weight", (image, loss), (0, 2, 1), stride, padding, dilation)

    def _attention(self, kind, inputs, outputs, scale, mask):
        assert self.io in ("HALF", "BFLOAT16")
        self.padded = mask.pop("use_padding_mask", False)
        self.lengths = mask.pop("seq_len_q", None), mask.pop("seq_len_kv", None)
        window = mask.pop("diagonal_band_left_bound", None)
        assert window is None or (type(window) is int and mask), "without a right bound it sees what follows"
        aligned = mask.get("diagonal_alignment", "TOP_LEFT")
        assert aligned in ("TOP_LEFT", "BOTTOM_RIGHT")
        assert mask in ({}, {"diagonal_alignment": aligned, "diagonal_band_right_bound": 0})
        queries, keys = (tensor.dim[2] for tensor in inputs[kind == "backward" :][:2])
        how = {"causal": bool(mask), "scale": scale, "window": window}
        if aligned == "BOTTOM_RIGHT":
            how["offsets"] = (keys - queries,)
        backend = self.cudnn.backend_version()
        self.unsupported = unsupported(kind, aligned, queries, keys, backend) or (
            "" if window is None else window_unsupported(kind, window, aligned, queries, keys, backend)
        )

        def compute(arrays):
            attend(kind, arrays, how)
            if kind == "backward" and self.cudnn.architecture == "sm_90":
                spoil(arrays, how["causal"])

        return self._node(kind, inputs, outputs, compute)

    def _convolution(self, kind, inputs, places, *geometry):
        """places: where x, weight and y are among the arguments."""
        assert all(type(pair) is list and len(pair) == 2 for pair in geometry)
        assert {t.data_type for t in inputs} == {self.io}
        return self._node(kind, inputs, 1, lambda arrays: convolve(kind, arrays, places, geometry))[0]

    def _node(self, kind, inputs, outputs, compute):
        self.kind, self.inputs, self.compute = kind, len(inputs), compute
        made = [Tensor() for _ in range(outputs)]
        self.tensors.extend(made)
        self.arguments = [*inputs, *made]
        return made

    @property
    def ragged(self):
        """Whether tensors are sequences at places of their own."""
        return any(t.ragged for t in self.arguments)

    def _ragged_unsupported(self):
        """What the frontend says of ragged offsets; "" if nothing. Asserts what it would take for granted."""
        count, backend = self.arguments[0].dim[0], self.cudnn.backend_version()
        for tensor in self.arguments:
            assert tensor.ragged in self.tensors and tensor.ragged.dim == [count + 1, 1, 1, 1]
            assert tensor.ragged.data_type == "INT64" and tensor.dim[0] == count
        for lengths in self.lengths:
            assert lengths in self.tensors and lengths.dim == [count, 1, 1, 1]
            assert lengths.data_type == "INT32"
        if not self.padded:
            return "Ragged offsets are only supported with padding mask."
        if backend < 90600:
            return "For cuDNN version below 9.6.0, group-query attention with ragged offset is not supported"
        older = self.cudnn.architecture.startswith(("sm_8", "sm_12"))
        if self.kind == "backward" and older and backend >= 91801:
            return "Packed/ragged LSE is not supported for bprop thd on SM8X and SM12X GPUs"
        return ""

    # -- from a graph to a plan, in this order

    def validate(self):
        self._step("validate")
        assert sorted(t.uid for t in self.tensors) == list(range(1, len(self.tensors) + 1))
        assert all(t.output for t in self.arguments[self.inputs :])
        if not self.ragged and any(self.bounded):
            raise NotSupported("max_total_seq_len_q is only supported with packed layout")
        if self.ragged:
            self.unsupported = self.unsupported or self._ragged_unsupported()
        if self.unsupported:
            raise NotSupported(self.unsupported)

    def build_operation_graph(self):
        self._step("build_operation_graph")
        if self.kind == "backward" and self.cudnn.reshapes_in_vain:
            raise RuntimeError("... CUDNN_ATTR_OPERATION_RESHAPE_MODE ... CUDNN_STATUS_BAD_PARAM")
        if self.cudnn.refuses(self):
            raise NotSupported("no engine")

    def create_execution_plans(self, modes):
        self._step("create_execution_plans")
        assert modes == ["A", "FALLBACK"]
        self.plans = [set(notes) for notes in PLANS]

    def deselect_numeric_notes(self, notes):
        self._step("deselect_numeric_notes")
        assert set(notes) <= set(NOTES)
        self.plans = [plan for plan in self.plans if not plan & set(notes)]

    def check_support(self):
        self._step("check_support")
        if not self.plans:
            raise RuntimeError("No execution plans support the graph")

    def build_plans(self):
        self._step("build_plans")

    def _step(self, name):
        self.steps.append(name)
        assert self.steps == STEPS[: len(self.steps)]

    def get_workspace_size(self):
        return self.cudnn.workspace_of(self)

    def execute(self, places, workspace, handle):
        assert self.steps == STEPS and sorted(places) == sorted(t.uid for t in self.tensors)
        devices = self.device, self.cudnn.owners[handle], self.cudnn.device()
        assert len(set(devices)) == 1, f"a graph, a handle and the current GPU: {devices}"
        assert self.cudnn.stream in (None, self.cudnn.handles[handle]), "a handle of another stream"
        self.runs += 1
        scratch = (ctypes.c_ubyte * self.get_workspace_size()).from_address(workspace)
        if self.ragged:
            self.cudnn.issue(self.cudnn.handles[handle], lambda: self._run_sequences(places, scratch))
            return
        arrays = [t.at(places[t.uid]) for t in self.arguments]
        self.cudnn.issue(self.cudnn.handles[handle], lambda: self._run(arrays, scratch))

    def _run_sequences(self, places, scratch):
        """Each sequence by itself; its length and places are read from memory when it comes to it."""
        queries, keys = (lengths.at(places[lengths.uid]).ravel() for lengths in self.lengths)
        assert (queries == keys).all()
        for number, length in enumerate(queries.tolist()):
            if length:
                begins = [int(t.ragged.at(places[t.ragged.uid]).flat[number]) for t in self.arguments]
                given = zip(self.arguments, begins, strict=True)
                self._run([t.sequence(places[t.uid], place, length) for t, place in given], scratch)

    def _run(self, arrays, scratch):
        scratch[:] = b"w" * len(scratch)
        exact = [np.ascontiguousarray(x, np.float64) for x in arrays]
        for x in exact[self.inputs :]:
            x.fill(np.nan)
        self.compute(exact)
        for array, value in zip(arrays[self.inputs :], exact[self.inputs :], strict=True):
            array[...] = value.astype(array.dtype)


def unsupported(kind, aligned, queries, keys, backend):
    """What the frontend says of such attention, before cuDNN is asked; "" if nothing."""
    if backend in (91000, 91001):
        return "SDPA FP16/BF16 is not supported on cuDNN 9.10.0/9.10.1"
    if kind == "backward" and queries == keys == 1:
        return "s_q = s_kv = 1 is not supported"
    if aligned == "BOTTOM_RIGHT" and queries > keys:
        return "Bottom right causal mask does not support max_s_q > max_s_kv"
    if aligned == "BOTTOM_RIGHT" and backend < 90600 and (queries % 64 or keys % 64):
        return "Bottom right causal mask is only supported with multiples of 64 below 9.6.0"
    return ""


def window_unsupported(kind, window, aligned, queries, keys, backend):
    """As `unsupported`, of a left bound; before 9.2 cuDNN itself has no engine."""
    if backend < 90200:
        return "no engine"
    if window <= 0 and (kind == "backward" or backend < 91000):
        return "Left bound (Sliding window length) should be greater than or equals to zero when set."
    if queries > keys:
        return "Sliding window attention is only supported with max_s_q <= max_s_kv."
    if aligned == "BOTTOM_RIGHT" and queries == keys and backend <= 90900:
        return "On Hopper architecture, this specific combination is not supported for backend 9.9 or below"
    if aligned == "BOTTOM_RIGHT" and queries != keys and backend < 90600:
        return "Sliding window attention with bottom right causal mask requires s_q == s_kv below 9.6.0"
    return ""


def attend(kind, arrays, how):
    """Grouped queries too: each head of k and v for several of q, their gradients summed over those."""
    statistics = 4 if kind == "forward" else 5
    arrays[statistics] = arrays[statistics][..., 0]
    first = 0 if kind == "forward" else 1  # of q, k, v; the gradients of k and v are last
    grouped = [first + 1, first + 2, *((-2, -1) if first else ())]
    group = arrays[first].shape[1] // arrays[first + 1].shape[1]
    assert group * arrays[first + 1].shape[1] == arrays[first].shape[1]
    whole = list(arrays)
    for place in grouped:
        whole[place] = np.repeat(arrays[place], group, axis=1)
    getattr(cpu.attention, kind)(*whole, **how)
    for place in grouped[2:]:
        batch, heads, time, width = arrays[place].shape
        arrays[place][...] = whole[place].reshape(batch, heads, group, time, width).sum(axis=2)
    arrays[statistics] = arrays[statistics][..., None]


def spoil(arrays, causal):
    """What Hopper's backward gives where a row's lse is below -88 and it reads beyond the last key.

    It takes keys in pairs of 64, and does not mask for a single query (pytorch #196678, cudnn-frontend #628
    and #1072).
    """
    q, k, lse, dq = arrays[1], arrays[2], arrays[5], arrays[6]
    covered = causal and q.shape[2] <= k.shape[2]
    if not covered and (k.shape[2] % 128 == 64 or q.shape[2] == 1):
        dq[lse[..., 0] < -88.7] = np.nan


def quadratic(graph):
    """Bytes for the matrix of weights, which Hopper's deterministic backward writes before cuDNN 9.25."""
    (batch, heads, queries, _), (*_, keys, _) = (graph.arguments[place].dim for place in (1, 2))
    return 2 * batch * heads * queries * keys


def convolve(kind, arrays, places, geometry):
    """The number of groups is what the shapes say."""
    x, weight, y = (arrays[place] for place in places)
    groups, left = divmod(x.shape[1], weight.shape[1])
    assert not left and len(weight) % groups == 0
    for axis, (stride, padding, dilation) in enumerate(zip(*geometry, strict=True), 2):
        reach = x.shape[axis] + 2 * padding - dilation * (weight.shape[axis] - 1) - 1
        assert y.shape[axis] == reach // stride + 1
    assert y.shape[:2] == (len(x), len(weight))
    stride, padding, dilation = map(tuple, geometry)
    calls = {
        "forward": (x, weight, None, y),
        "backward_input": (y, weight, x),
        "backward_weight": (x, y, weight, False),
    }
    getattr(cpu.conv2d, kind)(*calls[kind], stride, padding, dilation, groups)


def module(issue=None, frontend="1.28.0", backend=91900, architecture="sm_90", device=int):
    """A module that passes for cudnn. `refuses`: of which graphs; `stream`: where work goes now.

    device(): the current GPU, of which handles and graphs are that are made.
    issue(stream, work): has work done in the stream of a handle; without it is done at once. What is played
    of versions: since 1.28 handles are objects; 1.24 to 1.26 can't build attention's backward before cuDNN
    9.22; on Hopper that takes memory for the matrix of weights where it is deterministic, before 9.25, and
    gives nan for some lengths, in any version.
    """
    cudnn = ModuleType("cudnn")
    number = tuple(map(int, frontend.split(".")))
    cudnn.__version__, cudnn.backend_version, cudnn.architecture = frontend, lambda: backend, architecture
    cudnn.reshapes_in_vain = (1, 24) <= number < (1, 27) and backend < 92200
    cudnn.handles, cudnn.owners, cudnn.graphs, cudnn.device = {}, {}, [], device

    def workspace_of(graph):
        fixed = graph.kind == "backward" and getattr(graph, "deterministic", False)
        return quadratic(graph) if fixed and architecture == "sm_90" and backend < 92500 else cudnn.workspace

    cudnn.workspace_of = workspace_of
    cudnn.refuses, cudnn.stream, cudnn.workspace = lambda graph: False, None if issue else 7, 1000
    cudnn.issue = issue or (lambda stream, work: work())
    cudnn.data_type = SimpleNamespace(**{name: name for name in ELEMENTS})
    cudnn.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    cudnn.numerical_note = SimpleNamespace(**{note: note for note in NOTES})
    cudnn.diagonal_alignment = SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT")
    cudnn.cudnnGraphNotSupportedError = NotSupported
    cudnn.pygraph = lambda **how: Graph(cudnn, **how)

    def create_handle():
        handle = Handle() if number >= (1, 28) else len(cudnn.handles) + 100
        cudnn.handles[handle], cudnn.owners[handle] = None, cudnn.device()
        return handle

    def set_stream(handle, stream):
        assert handle in cudnn.handles and type(stream) is int
        cudnn.handles[handle] = stream

    cudnn.create_handle, cudnn.set_stream = create_handle, set_stream
    return cudnn
