"""Grouped matmuls in 16 bits by cuBLAS, bound by ctypes: cublasGemmGroupedBatchedEx, since version 12.5.

One call computes the matmuls of all experts. cuBLAS counts columns first, so out = a b is asked for as
out^T = b^T a^T: its A is our b, and its B our a. Sizes stand in arrays of the host, which cuBLAS reads before
the call returns, and addresses in arrays of the GPU, which it reads in the stream.
"""

import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_void_p

import numpy as np

from shardrt.kernels.cuda._cublaslt_plan import WORKSPACE
from shardrt.kernels.cuda._launch import Array, Group, Stage, address

# cublas_api.h and library_types.h
_TYPES = {"float16": 2, "bfloat16": 14}
_COMPUTE_32F = 68
_FULL_REDUCTIONS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: partial sums stay in float32
_REFUSED = (8, 15)  # statuses: architecture mismatch, not supported
_GEMM = "cublasGemmGroupedBatchedEx"


class CublasGrouped:
    """The library on one GPU, with a handle for all threads of the process."""

    def __init__(self, library: ctypes.CDLL, stage: Stage) -> None:
        self._library, self._stage = library, stage
        self._there = hasattr(library, _GEMM)  # else it is older than 12.5
        self._refused: set[str] = set()  # types that this GPU or this version has no such product for
        self._handle: c_void_p | None = None  # made by the first call
        self._lock = threading.Lock()  # the handle has one stream at a time

    def gemm(self, a: Array, b: Array, out: Array, groups: Sequence[Group], accumulate: bool) -> bool:
        """The products of `groups`, of one row or more, as Backend.gemm_grouped says.

        False, with nothing done, where cuBLAS has no such product. Raises RuntimeError for other failures.
        """
        name = a.dtype.name
        if not self._there or name not in _TYPES or not a.dtype == b.dtype == out.dtype:
            return False
        if name in self._refused:
            return False
        arrays = b, a, out
        places = np.array([_addresses(array, groups) for array in arrays], np.int64)
        table = self._stage.upload(places)  # first: in a capture it raises, before cuBLAS has done anything
        at = [address(table) + row * places.strides[0] for row in range(3)]
        rows = [stop - start for _, start, stop in groups]
        m, n, k = (out.shape[-1], rows, a.shape[1]) if out.ndim == 2 else (out.shape[2], out.shape[1], rows)
        (transpose_a, lda), (transpose_b, ldb), (_, ldc) = map(_layout, arrays)
        columns = transpose_a, transpose_b, m, n, k, lda, ldb, ldc, 1
        sizes = np.empty((len(columns), len(groups)), np.int32)
        for row, values in zip(sizes, columns, strict=True):
            row[:] = values
        scales = np.ones((2, len(groups)), np.float32)  # of the product, and of what is there
        scales[1] = accumulate
        ta, tb, ms, ns, ks, las, lbs, lcs, each = (row.ctypes.data for row in sizes)
        alpha, beta = (row.ctypes.data for row in scales)
        kind, count = _TYPES[name], len(groups)
        operands = at[0], kind, las, at[1], kind, lbs, beta, at[2], kind, lcs
        with self._lock:
            handle = self._in_current_stream()
            call = self._library.cublasGemmGroupedBatchedEx
            status = call(handle, ta, tb, ms, ns, ks, alpha, *operands, count, each, _COMPUTE_32F)
        if status in _REFUSED:
            self._refused.add(name)
            return False
        self._check(_GEMM, status)
        return True

    def _in_current_stream(self) -> c_void_p:
        """The handle, set to the current stream and its workspace."""
        if self._handle is None:
            self._handle = self._new_handle()
        stream = self._stage.stream()
        self._check("cublasSetStream", self._library.cublasSetStream_v2(self._handle, stream))
        # After the stream, which takes the library's own workspace again, the same for all streams.
        place = self._stage.workspace(stream)
        self._check("cublasSetWorkspace", self._library.cublasSetWorkspace_v2(self._handle, place, WORKSPACE))
        return self._handle

    def _new_handle(self) -> c_void_p:
        library, handle = self._library, c_void_p()
        library.cublasGetStatusString.restype = ctypes.c_char_p
        library.cublasSetStream_v2.argtypes = [c_void_p, c_void_p]
        library.cublasSetWorkspace_v2.argtypes = [c_void_p, c_void_p, c_size_t]
        library.cublasSetMathMode.argtypes = [c_void_p, c_int]
        operand = [c_void_p, c_int, c_void_p]
        head, tail = [c_void_p] * 7, [c_int, c_void_p, c_int]
        library.cublasGemmGroupedBatchedEx.argtypes = [*head, *operand * 2, c_void_p, *operand, *tail]
        self._check("cublasCreate", library.cublasCreate_v2(ctypes.byref(handle)))
        self._check("cublasSetMathMode", library.cublasSetMathMode(handle, _FULL_REDUCTIONS))
        return handle

    def _check(self, name: str, status: int) -> None:
        if status:
            message = self._library.cublasGetStatusString(status).decode()
            raise RuntimeError(f"{name}: {message} ({status})")


def _layout(array: Array) -> tuple[bool, int]:
    """(whether the last axis is not the dense one, elements from one line of the other to the next)."""
    down, right = array.strides[-2:]
    item = array.dtype.itemsize
    return (True, right // item) if down == item else (False, down // item)


def _addresses(array: Array, groups: Sequence[Group]) -> list[int]:
    """Where each group's operand begins: its rows, or, with three axes, its matrix."""
    start = address(array)
    if array.ndim == 3:
        step = array.strides[0]
        return [start + group * step for group, _, _ in groups]
    step = max(array.strides)
    return [start + first * step for _, first, _ in groups]
