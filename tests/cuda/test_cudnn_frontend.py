"""Our graphs given to the real nvidia-cudnn-frontend, and to cuDNN, where both are installed.

That needs no GPU. Whether there is a plan for a graph, and what it computes, needs one.
"""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from shardrt.kernels.cuda import _cudnn_documents
from shardrt.kernels.cuda._cudnn import CuDNN
from shardrt.kernels.cuda._cudnn_attention import (
    _BACKWARD,
    _FORWARD,
    CuDNNAttention,
    Mask,
    builds_backward,
)
from shardrt.kernels.cuda._cudnn_conv2d import _NEVER_IN_FLOAT32, CuDNNConv2d
from tests.cuda import fake_cudnn
from tests.cuda.test_cudnn import played

real = pytest.importorskip("cudnn")
BF16 = np.dtype(ml_dtypes.bfloat16)


class Ended(Exception):
    """All was done that needs no GPU."""


class Until:
    """A graph of the real frontend, up to where a plan would be sought."""

    def __init__(self, **how):
        self._graph = real.pygraph(**how, sm_version=90)  # or it would ask the GPU

    def __getattr__(self, name):
        return getattr(self._graph, name)

    def create_execution_plans(self, modes):
        raise Ended


class Described(CuDNN):
    """Without a handle, which only a GPU gives."""

    architecture = "sm_90"

    def __init__(self):
        self.module, self._graphs = SimpleNamespace(**vars(real) | {"pygraph": Until}), {}

    def _handle(self):
        return None

    def run(self, kind, arrays, describe, refused="", *, never=()):
        """True if all was built; False if it was refused."""
        try:
            self._plan(kind, arrays, describe, never, refused)
        except Ended:
            return True
        return False


@pytest.fixture
def described():
    try:
        real.backend_version()
    except RuntimeError as error:
        pytest.skip(f"no cuDNN: {error}")
    return Described()


def array(*shape, dtype=BF16):
    memory = np.zeros(np.prod(shape) * dtype.itemsize + 16, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : len(memory) - 16 + start].view(dtype).reshape(shape)


def heads(count):
    """(batch, heads, time, width), as they lie in training: time before heads."""
    return array(2, 64, count, 64).transpose(0, 2, 1, 3)


@pytest.mark.parametrize(
    "mask", [Mask(""), Mask("TOP_LEFT"), Mask("BOTTOM_RIGHT"), Mask("TOP_LEFT", 16)], ids=str
)
@pytest.mark.parametrize("shared", [1, 2])
def test_attention_is_built_where_the_versions_are_said_to_fit(described, mask, shared):
    fused, fits = CuDNNAttention(described), builds_backward(*described.versions)
    q, y, dy, dq = (heads(4) for _ in range(4))
    k, v, dk, dv = (heads(4 // shared) for _ in range(4))
    if mask.alignment == "BOTTOM_RIGHT":  # of the last 16 queries, as of a chunk
        q, y, dy, dq = (x[:, :, 48:] for x in (q, y, dy, dq))
    lse = array(2, 4, q.shape[2], dtype=np.dtype(np.float32))
    assert described.run(*fused._operation(_FORWARD, (q, k, v, y, lse), mask, 0.1))
    for fixed in (False, True):
        operation = fused._operation(_BACKWARD, (dy, q, k, v, y, lse, dq, dk, dv), mask, 0.1, fixed)
        if fits:
            assert described.run(*operation)
        else:
            with pytest.warns(UserWarning, match="RESHAPE_MODE"):
                assert not described.run(*operation)


@pytest.mark.filterwarnings("ignore:attention. cuDNN refuses")
@pytest.mark.parametrize("keys, fits", [(64, True), (48, False)])
def test_the_stand_in_refuses_windows_as_the_real_one(described, emulated, keys, fits):
    """More queries than keys."""
    played(emulated, frontend=described.versions[0], backend=described.versions[1])
    q, dy, y, dq = (heads(4) for _ in range(4))
    k, v, dk, dv = (heads(4)[:, :, :keys] for _ in range(4))
    lse, mask = array(2, 4, 64, dtype=np.dtype(np.float32)), Mask("TOP_LEFT", 16)
    real, ours = (
        (
            fused.cudnn.run(*fused._operation(_FORWARD, (q, k, v, y, lse), mask, 0.1)),
            fused.cudnn.run(*fused._operation(_BACKWARD, (dy, q, k, v, y, lse, dq, dk, dv), mask, 0.1)),
        )
        for fused in (CuDNNAttention(described), emulated.attention())
    )
    assert real == ours
    assert all(real) == (fits and builds_backward(*described.versions))


@pytest.mark.parametrize("shared", [1, 2])
def test_attention_of_documents_is_built(described, emulated, shared):
    """The kernel that makes their lengths and places runs on the CPU."""
    fused, kv_heads = CuDNNAttention(described), 4 // shared

    def split():
        x = heads(4 + 2 * kv_heads)
        return x[:, :4], x[:, 4:-kv_heads], x[:, -kv_heads:]

    (q, k, v), (dq, dk, dv), y, dy = split(), split(), heads(4), heads(4)
    lse, starts = array(2, 4, 64, dtype=np.dtype(np.float32)), np.zeros((2, 64), np.int64)
    assert _cudnn_documents.forward(fused, q, k, v, y, lse, starts, scale=0.1) is not None
    if builds_backward(*described.versions):
        arrays = dy, q, k, v, y, lse, dq, dk, dv
        assert _cudnn_documents.backward(fused, *arrays, starts, scale=0.1) is not None


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_is_built(described, dtype, groups):
    fused, geometry = CuDNNConv2d(described), ((2, 1), (1, 0), (1, 1))
    x, weight, y = (
        array(2, 8, 9, 9, dtype=dtype),
        array(16, 8 // groups, 3, 3, dtype=dtype),
        array(2, 16, 5, 7, dtype=dtype),
    )
    assert fused.forward(x, weight, y, *geometry)
    assert fused.backward_input(y, weight, x, *geometry)
    assert fused.backward_weight(x, y, weight, False, *geometry)


def test_the_real_one_has_the_names_of_the_stand_in():
    played = fake_cudnn.module()
    for kind in ("data_type", "heur_mode", "numerical_note", "diagonal_alignment"):
        for name in vars(getattr(played, kind)):
            assert hasattr(getattr(real, kind), name), (kind, name)
    for name in (*_NEVER_IN_FLOAT32, "NONDETERMINISTIC"):
        assert hasattr(real.numerical_note, name)
    for name in (
        "__version__",
        "backend_version",
        "create_handle",
        "set_stream",
        "cudnnGraphNotSupportedError",
    ):
        assert hasattr(real, name) and hasattr(played, name), name
    for name in ("execute", "get_workspace_size", *fake_cudnn.STEPS):
        assert hasattr(real.pygraph, name) and hasattr(fake_cudnn.Graph, name), name
    assert not issubclass(real.cudnnGraphNotSupportedError, RuntimeError), "so both are expected"
