"""How often kernels of the GPU launch, and what scratch memory they take: their host code, run without a GPU.

It runs for a backend that computes nothing and whose libraries can do all that ours ask for: cublasLt has
epilogues for all types but float64, and they are faster than kernels of their own; cuBLAS has grouped
products; cuDNN computes attention and convolution where the sizes fit. Arrays begin at multiples of 16 bytes.
They have no elements: those that host code reads are 0.
"""

from collections.abc import Callable, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from shardrt.kernels.cuda import _launch
from shardrt.kernels.cuda._cublaslt import _takes
from shardrt.kernels.cuda._cudnn_attention import CuDNNAttention
from shardrt.kernels.cuda._cudnn_conv2d import CuDNNConv2d
from shardrt.kernels.cuda._launch import Array


class Layout(NamedTuple):
    """All of an array but its elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype


def count(kernel: Callable, arguments: dict[str, Any]) -> tuple[int, int, Any]:
    """(launches and calls of libraries, bytes of scratch memory, what it gives) of one call.

    arguments: by name; a Layout, or a tuple of them, for arrays. Other threads may launch meanwhile.
    """
    backend = _Counting()
    with _launch.used_here(backend):
        given = kernel(**{name: _placed(value) for name, value in arguments.items()})
    return backend.launches, backend.scratch, given


class _Counted(np.ndarray):
    """An array all of whose elements are the same few bytes; its copies and fills are launches."""

    def fill(self, value: Any) -> None:
        _launch.backend().launches += self.size > 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.fill(value)

    def copy(self, order: str = "C") -> Array:
        _launch.backend().launches += 1
        return _launch.empty(self.shape, self.dtype)

    def reshape(self, *shape: Any, **options: Any) -> Array:
        return super().reshape(*shape, copy=False)


class _Counting:
    """In place of _cupy.CuPyBackend."""

    multiprocessors, shared = 132, 227 << 10

    def __init__(self) -> None:
        self.launches, self.scratch = 0, 0
        cudnn = SimpleNamespace(
            module=SimpleNamespace(diagonal_alignment=SimpleNamespace(TOP_LEFT=0, BOTTOM_RIGHT=1)),
            versions=("1.28.0", 92600),
            architecture="sm_100",
            empty=self.empty,
            run=self._library,
            workspace=lambda *operation: 0,
        )
        self._attention, self._convolution = CuDNNAttention(cudnn), CuDNNConv2d(cudnn)

    def launch(self, *how: Any) -> None:
        self.launches += 1

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self.scratch += prod(shape) * np.dtype(dtype).itemsize
        return _array(shape, np.dtype(dtype))

    def upload(self, values: np.ndarray) -> Array:
        self.launches += 1
        return _array(values.shape, values.dtype)

    @property
    def matmuls(self) -> "_Counting":
        return self

    def gemm(self, *arrays: Array, **how: Any) -> None:
        self.launches += 1

    gemm_float8 = gemm

    def gemm_gelu(
        self, a: Array, b: Array, bias: Array | None, inner: Array, out: Array, apart: Callable
    ) -> bool:
        return a.dtype != np.float64 and _takes(inner, inner, out, bias) and self._library()

    def gemm_gelu_backward(self, a: Array, b: Array, inner: Array, out: Array, apart: Callable) -> bool:
        return a.dtype != np.float64 and _takes(inner, inner, out) and self._library()

    def gemm_sums(
        self, a: Array, b: Array, out: Array, sums: Array, *, accumulate: bool, apart: Callable
    ) -> bool:
        return a.dtype != np.float64 and _takes(None, sums) and self._library()

    def gemm_grouped(
        self, a: Array, b: Array, out: Array, groups: Sequence[tuple], *, accumulate: bool
    ) -> bool:
        self.upload(np.empty((3, len(groups)), np.int64))
        return self._library()

    def attention(self) -> CuDNNAttention:
        return self._attention

    def convolution(self) -> CuDNNConv2d:
        return self._convolution

    def _library(self, *operation: Any, **how: Any) -> bool:
        self.launches += 1
        return True


_ZEROS = np.zeros(64, np.uint8)
_BEGIN = -(-_ZEROS.ctypes.data // 16) * 16


class _Memory:
    """As much as anyone asks for, at one address; the first 48 bytes are there, and 0."""

    __array_interface__ = {"data": (_BEGIN, False), "shape": (1 << 60,), "typestr": "|u1", "version": 3}


_EVERYWHERE = np.asarray(_Memory())
_BITS = np.dtype(np.uint16), np.dtype(ml_dtypes.bfloat16)  # the CPU's arrays of bits are bfloat16 on a GPU


def _placed(value: Any) -> Any:
    if isinstance(value, Layout):
        return _array(*value[::2], value.strides)
    return tuple([_placed(each) for each in value]) if isinstance(value, tuple) else value


def _array(shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None = None) -> Array:
    dtype = _BITS[1] if dtype == _BITS[0] else dtype
    return np.ndarray.__new__(_Counted, shape, dtype, _EVERYWHERE, 0, strides)
