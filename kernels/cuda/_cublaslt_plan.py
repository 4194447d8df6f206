"""The description of a kind of matmul for cublasLt, made once, and the proposed algorithms; by ctypes.

cublasLt counts columns first, so out = a b is asked for as out^T = b^T a^T: its A is our b, and its B our a.
"""

import ctypes
import threading
from ctypes import (
    addressof,
    byref,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from typing import Any

from shardrt.kernels.cuda._launch import Array, address

WORKSPACE = 64 << 20  # bytes for each stream
CANDIDATES = 32  # algorithms that the heuristic is asked for

# What a product does besides. BIAS: adds a vector. GELU: keeps the sums in a matrix, and gives GELU of them.
# SLOPE: multiplies by GELU's slope at a matrix. SUMS: sums its B, our a, over the inner dimension too.
PLAIN, BIAS, GELU, GELU_BIAS, SLOPE, SUMS = 1, 4, 160, 164, 192, 512

# cublasLt.h and library_types.h
ELEMENTS = {
    **{"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14},
    **{"float8_e4m3fn": 28, "float8_e5m2": 29},
}
_COMPUTE_32F, _COMPUTE_64F = 68, 70
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _VECTOR_POINTER, _VECTOR_TYPE = 3, 4, 7, 8, 26  # "bias"
_MATRIX_POINTER, _MATRIX_LEADING = 11, 12  # "aux"
_SCALE_POINTERS, _FAST_ACCUMULATION = (17, 18), 25  # of A and B; of float8 alone
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_MAX_WORKSPACE, _REDUCTION_SCHEMES, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # of A, B, C, D
_IN_COMPUTE_TYPE = 2  # else parts of a sum may be rounded to the type of the result
_TRANSPOSED = 1
_REFUSED = (7, 8, 15)  # statuses: invalid value, architecture mismatch, not supported


class NoSuchProduct(RuntimeError):
    """cublasLt does not compute what was asked for, and has done nothing."""


@dataclass(frozen=True)
class Matrix:
    """How the elements of an operand lie, counted as cublasLt counts: columns first."""

    element: int
    transposed: bool
    rows: int
    columns: int
    leading: int
    batch_stride: int
    alignment: int

    @staticmethod
    def of(x: Array, kind: str | None = None) -> "Matrix | None":
        """The transpose of the last two dimensions of x, which costs nothing; None if neither is dense.

        kind: the type whose bits x holds, if it is not that of x.
        """
        item, (rows, columns), (down, right) = x.dtype.itemsize, x.shape[-2:], x.strides[-2:]
        batch = x.strides[0] // item if x.ndim == 3 else 0
        # No algorithm needs more than loads of 16 bytes do; one plan serves all that have as much.
        element, aligned = ELEMENTS[kind or x.dtype.name], min(alignment(address(x)), 16)
        if columns == 1:
            right = item
        if rows == 1 and right == item:
            down = columns * item
        if right == item and down % item == 0 and down >= columns * item:
            return Matrix(element, False, columns, rows, down // item, batch, aligned)
        if rows == 1:
            down = item
        if down == item and right % item == 0 and right >= rows * item:
            return Matrix(element, True, rows, columns, right // item, batch, aligned)
        return None


@dataclass(frozen=True)
class What:
    """All of a product that its algorithm depends on. Its repr names it on disk."""

    kind: int
    first: Matrix
    second: Matrix
    result: Matrix
    batch: int
    accumulate: bool
    vector: tuple[int, int] | None  # type and alignment
    matrix: tuple[int, int] | None  # leading dimension and alignment
    fast: bool | None = None  # of float8, whose operands have scales: sums less exact, and faster


Algorithm = c_uint64 * 8  # cublasLtMatmulAlgo_t


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm and what it needs."""

    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class Library:
    """cublasLt, with the handle that every call begins with."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.handle = c_void_p()
        library.cublasLtGetStatusString.restype = ctypes.c_char_p
        library.cublasLtGetVersion.restype = c_size_t
        self.set_attribute, self.multiply = library.cublasLtMatmulDescSetAttribute, library.cublasLtMatmul
        self.set_attribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
        self.multiply.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
        self.call("cublasLtCreate", byref(self.handle))

    @property
    def version(self) -> int:
        """As cublasLtGetVersion gives it."""
        return self._library.cublasLtGetVersion()

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the library; errors as `check`."""
        self.check(name, getattr(self._library, name)(*args))

    def check(self, name: str, status: int) -> None:
        """Raise RuntimeError with the name of a status other than 0: NoSuchProduct where it is a refusal."""
        if status:
            message = self._library.cublasLtGetStatusString(c_int(status)).decode()
            raise (NoSuchProduct if status in _REFUSED else RuntimeError)(f"{name}: {message} ({status})")


class Plan:
    """The descriptors of one kind of matmul.

    candidates: the algorithms that the heuristic proposes, best first. choice: the one to take, or APART
    (_algorithms.py); None until somebody has chosen.
    """

    def __init__(self, library: Library, what: What, places: tuple[int, ...]) -> None:
        """places: addresses as for `run`; the heuristic looks at what divides them. Raises NoSuchProduct."""
        self.what = what
        self.choice: Any = None
        self._library = library
        self._lock = threading.Lock()
        double = what.result.element == ELEMENTS["float64"]
        number = ctypes.c_double if double else c_float
        # The product times the first, plus out times the second.
        self._numbers = number(1), number(1 if what.accumulate else 0)
        self._product, self._layouts = c_void_p(), []
        compute, scale = (_COMPUTE_64F, "float64") if double else (_COMPUTE_32F, "float32")
        created = byref(self._product), c_int(compute), c_int(ELEMENTS[scale])
        library.call("cublasLtMatmulDescCreate", *created)
        self._describe(_TRANSPOSE_A, c_int32(_TRANSPOSED * what.first.transposed))
        self._describe(_TRANSPOSE_B, c_int32(_TRANSPOSED * what.second.transposed))
        self._describe(_EPILOGUE, c_uint32(what.kind))
        self._pointers: list[tuple[int, c_uint64, int]] = []  # attribute, where its value stands, which place
        if what.matrix is not None:
            self._describe(_MATRIX_LEADING, c_int64(what.matrix[0]))
            self._pointers.append((_MATRIX_POINTER, c_uint64(), 4))
        if what.vector is not None:
            self._describe(_VECTOR_TYPE, c_int32(what.vector[0]))
            self._pointers.append((_VECTOR_POINTER, c_uint64(), 3))
        if what.fast is not None:
            self._describe(_FAST_ACCUMULATION, c_int8(what.fast))
            self._pointers += [(name, c_uint64(), 5 + k) for k, name in enumerate(_SCALE_POINTERS)]
        for matrix in (what.first, what.second, what.result):
            self._layouts.append(_layout(library, matrix, what.batch))
        self._point(places)
        self.candidates = self._propose()
        one, beta = map(addressof, self._numbers)
        first, second, result = self._layouts
        self._head, self._mid = (library.handle, self._product, one), (first, second, result, beta)

    def __del__(self) -> None:
        for layout in self._layouts:
            self._library.call("cublasLtMatrixLayoutDestroy", layout)
        if self._product:
            self._library.call("cublasLtMatmulDescDestroy", self._product)

    def run(self, stage: Any, algorithm: Algorithm, places: tuple[int, ...]) -> None:
        """Launch the matmul in the current stream. Raises NoSuchProduct if this algorithm can't.

        places: addresses of our b, our a, out, of the vector and the matrix where there is one, and of the
        scales of our b and our a where they are float8.
        """
        stream = stage.stream()
        if not self._pointers:
            self._launch(algorithm, places, stage.workspace(stream), stream)
            return
        # The addresses stand in the descriptor, which threads as ranks share; the launch reads them at once.
        with self._lock:
            self._point(places)
            self._launch(algorithm, places, stage.workspace(stream), stream)

    def _launch(self, algorithm: Algorithm, places: tuple[int, ...], workspace: int, stream: int) -> None:
        first, second, result, beta = self._mid
        at_b, at_a, at_out = places[:3]
        status = self._library.multiply(
            *self._head,
            *(at_b, first, at_a, second, beta),
            *(at_out, result, at_out, result),
            *(addressof(algorithm), workspace, WORKSPACE, stream),
        )
        if status:
            self._library.check("cublasLtMatmul", status)

    def run_chosen(self, stage: Any, places: tuple[int, ...]) -> bool:
        """`run` by the choice; by the first candidate that can, while there is none, or it can't."""
        if self.choice is not None:
            try:
                self.run(stage, self.choice, places)
                return True
            except NoSuchProduct:
                pass
        return self.run_first(stage, places)

    def run_first(self, stage: Any, places: tuple[int, ...]) -> bool:
        """`run` by the first candidate that can, the same one each time; False if none can."""
        for candidate in self.candidates:
            try:
                self.run(stage, candidate, places)
            except NoSuchProduct:
                continue
            return True
        return False

    def restored(self, text: str) -> Algorithm | None:
        """The algorithm of a text; None if it is none, or cublasLt says that it can't do this product."""
        try:
            algorithm, checked = Algorithm.from_buffer_copy(bytes.fromhex(text)), _Heuristic()
            first, second, result = self._layouts
            asked = (first, second, result, result, byref(algorithm), byref(checked))
            self._library.call("cublasLtMatmulAlgoCheck", self._library.handle, self._product, *asked)
        except (ValueError, NoSuchProduct):
            return None
        return algorithm if checked.workspace <= WORKSPACE else None

    def settle(self, choice: "Algorithm | str") -> None:
        """Choose, unless another thread has: all take what the first found."""
        with self._lock:
            if self.choice is None:
                self.choice = choice

    def _point(self, places: tuple[int, ...]) -> None:
        for attribute, value, which in self._pointers:
            value.value = places[which]
            status = self._library.set_attribute(self._product, attribute, addressof(value), 8)
            if status:
                self._library.check("cublasLtMatmulDescSetAttribute", status)

    def _describe(self, attribute: int, value: Any) -> None:
        status = self._library.set_attribute(self._product, attribute, addressof(value), ctypes.sizeof(value))
        self._library.check("cublasLtMatmulDescSetAttribute", status)

    def _propose(self) -> list[Algorithm]:
        """What the heuristic thinks best, first first. Raises NoSuchProduct if it knows none."""
        library, what, preference, found = self._library, self.what, c_void_p(), c_int()
        library.call("cublasLtMatmulPreferenceCreate", byref(preference))
        wanted = [m.alignment for m in (what.first, what.second, what.result, what.result)]
        limits = [
            (_MAX_WORKSPACE, c_uint64(WORKSPACE)),
            (_REDUCTION_SCHEMES, c_uint32(_IN_COMPUTE_TYPE)),
            *((name, c_uint32(bytes)) for name, bytes in zip(_ALIGNMENTS, wanted, strict=True)),
        ]
        results = (_Heuristic * CANDIDATES)()
        first, second, result = self._layouts
        asked = (first, second, result, result, preference, c_int(CANDIDATES), results, byref(found))
        try:
            for name, value in limits:
                size = c_size_t(ctypes.sizeof(value))
                library.call(
                    "cublasLtMatmulPreferenceSetAttribute", preference, c_int(name), byref(value), size
                )
            library.call("cublasLtMatmulAlgoGetHeuristic", library.handle, self._product, *asked)
        finally:
            library.call("cublasLtMatmulPreferenceDestroy", preference)
        usable = [each.algorithm for each in results[: found.value] if each.state == 0]
        if not usable:
            raise NoSuchProduct(f"cublasLt: no algorithm for {what}")
        return usable


def serialized(algorithm: Algorithm) -> str:
    """An algorithm as text, for Plan.restored under the same version of cublasLt."""
    return bytes(algorithm).hex()


def alignment(place: int) -> int:
    """The largest power of two, up to 256, that divides an address."""
    return min(place & -place, 256) if place else 256


def _layout(library: Library, matrix: Matrix, batch: int) -> c_void_p:
    layout = c_void_p()
    sizes = c_uint64(matrix.rows), c_uint64(matrix.columns), c_int64(matrix.leading)
    library.call("cublasLtMatrixLayoutCreate", byref(layout), c_int(matrix.element), *sizes)
    if batch > 1:
        for name, value in ((_BATCH_COUNT, c_int32(batch)), (_BATCH_STRIDE, c_int64(matrix.batch_stride))):
            size = c_size_t(ctypes.sizeof(value))
            library.call("cublasLtMatrixLayoutSetAttribute", layout, c_int(name), byref(value), size)
    return layout
