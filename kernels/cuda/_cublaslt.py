"""Matrix products by cublasLt, bound by ctypes: CuPy does not wrap it, and its own cuBLAS calls refuse a
stream that is being captured.

A product is described once per shape, layout and alignment; of the algorithms that cublasLt's heuristic
proposes, each is timed on scratch memory and the fastest is kept (as in Karpathy's llm.c, and PyTorch's
tuned GEMMs). cublasLt counts columns first, so out = a b is asked for as out^T = b^T a^T.
"""

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

from shardrt.kernels.cuda._launch import Array, address

WORKSPACE = 32 << 20  # bytes for each stream: NVIDIA's figure for Hopper
CANDIDATES = 8

# cublasLt.h and library_types.h
_ELEMENTS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
_LOW = (_ELEMENTS["float16"], _ELEMENTS["bfloat16"])
_COMPUTE_32F, _COMPUTE_64F = 68, 70
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS_POINTER, _BIAS_TYPE = 3, 4, 7, 8, 26
_INNER_POINTER, _INNER_LEADING = 11, 12  # "aux": where the sum before GELU goes
_EPILOGUE_BIAS, _EPILOGUE_GELU_AUX, _EPILOGUE_GELU_AUX_BIAS = 4, 160, 164
_INNER_MULTIPLE = 8  # of its leading dimension
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_MAX_WORKSPACE, _REDUCTION_SCHEMES, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # of A, B, C, D
_IN_COMPUTE_TYPE = 2
_TRANSPOSED = 1
_NOT_SUPPORTED = 15  # a status


class Stage(Protocol):
    """Where products run."""

    def stream(self) -> int:
        """The current stream's handle."""

    def workspace(self) -> int:
        """The address of WORKSPACE bytes that belong to the current stream."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Scratch memory."""

    def seconds(self, work: Callable[[], None]) -> float | None:
        """How long `work` keeps the GPU busy; None where that can't be measured now (while capturing)."""


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
    def of(x: Array) -> "Matrix | None":
        """The transpose of the last two dimensions of x, which costs nothing; None if neither is dense."""
        item, (rows, columns), (down, right) = x.dtype.itemsize, x.shape[-2:], x.strides[-2:]
        batch = x.strides[0] // item if x.ndim == 3 else 0
        kind, aligned = _ELEMENTS[x.dtype.name], _alignment(address(x))
        if columns == 1:
            right = item
        if rows == 1 and right == item:
            down = columns * item
        if right == item and down % item == 0 and down >= columns * item:
            return Matrix(kind, False, columns, rows, down // item, batch, aligned)
        if rows == 1:
            down = item
        if down == item and right % item == 0 and right >= rows * item:
            return Matrix(kind, True, rows, columns, right // item, batch, aligned)
        return None


@dataclass(frozen=True)
class Epilogue:
    """What is done to a product besides. bias: added along the last axis. inner: out = GELU(inner) then."""

    bias: Array | None = None
    inner: Array | None = None

    @property
    def kind(self) -> tuple:
        """What of it a plan depends on."""
        bias, inner = self.bias, self.inner
        added = None if bias is None else (_ELEMENTS[bias.dtype.name], _alignment(address(bias)))
        return added, None if inner is None else (inner.shape[-1], _alignment(address(inner)))


class NoSuchProduct(RuntimeError):
    """cublasLt has no algorithm for what was asked for."""


class CublasLt:
    """The library, and a plan for every kind of product met so far; for all threads of the process."""

    def __init__(self, library: ctypes.CDLL, stage: Stage) -> None:
        self._library = library
        self._stage = stage
        self._plans: dict[tuple, Plan] = {}
        self._impossible: set[tuple] = set()
        self._handle = c_void_p()
        library.cublasLtGetStatusString.restype = ctypes.c_char_p
        self.call("cublasLtCreate", byref(self._handle))

    def gemm(self, a: Array, b: Array, out: Array, *, accumulate: bool, bias: Array | None = None) -> None:
        """out = a b (+ bias along the last axis) (+ out); 2-D, or 3-D as a batch.

        a and b may be transposed or strided, the last axis of out is dense. Sums are made in float32, or
        float64; out and bias may have a type of their own. Raises ValueError for strides it can't read.
        """
        self._multiply(_key(a, b, out, accumulate, Epilogue(bias)), a, b, out, Epilogue(bias))

    def gemm_gelu(self, a: Array, b: Array, bias: Array | None, inner: Array, out: Array) -> bool:
        """inner = a b (+ bias along the last axis) and out = GELU of it, the tanh form; 2-D and dense.

        False, with nothing done, where cublasLt has no such product.
        """
        end = Epilogue(bias, inner)
        key = _key(a, b, out, False, end)
        places = [inner, out] if bias is None else [inner, out, bias]
        if inner.shape[-1] % _INNER_MULTIPLE or any(address(array) % 16 for array in places):
            return False
        if key in self._impossible:
            return False
        try:
            self._multiply(key, a, b, out, end)
        except NoSuchProduct:
            self._impossible.add(key)
            return False
        return True

    def _multiply(self, key: tuple, a: Array, b: Array, out: Array, end: Epilogue) -> None:
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans.setdefault(key, Plan(self, *key))  # of two threads that make it, one's
        if plan.algorithm is None:
            plan.choose(self._stage, a, b, out, end)
        plan.run(self._stage, plan.algorithm or plan.candidates[0], a, b, out, end)

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the library. Raises RuntimeError with the name of the status it gives."""
        status = getattr(self._library, name)(*args)
        if status:
            told = self._library.cublasLtGetStatusString(c_int(status)).decode()
            error = NoSuchProduct if status == _NOT_SUPPORTED else RuntimeError
            raise error(f"{name}: {told} ({status})")

    @property
    def handle(self) -> c_void_p:
        """What every call begins with."""
        return self._handle


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm and what it needs."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class Plan:
    """The descriptors of one kind of product, and its algorithm. They live as long as the process."""

    def __init__(
        self,
        lt: CublasLt,
        first: Matrix,
        second: Matrix,
        result: Matrix,
        batch: int,
        accumulate: bool,
        end: tuple,
    ) -> None:
        """end: Epilogue.kind. Raises NoSuchProduct."""
        self._lt = lt
        double = result.element == _ELEMENTS["float64"]
        scale = _ELEMENTS["float64" if double else "float32"]
        number = ctypes.c_double if double else c_float
        self._one, self._beta = number(1), number(1 if accumulate else 0)
        self._product = c_void_p()
        compute = _COMPUTE_64F if double else _COMPUTE_32F
        lt.call("cublasLtMatmulDescCreate", byref(self._product), c_int(compute), c_int(scale))
        self._describe(_TRANSPOSE_A, c_int32(_TRANSPOSED * first.transposed))
        self._describe(_TRANSPOSE_B, c_int32(_TRANSPOSED * second.transposed))
        bias, inner = end
        epilogue = _EPILOGUE_BIAS if bias is not None else 0
        if inner is not None:
            epilogue = _EPILOGUE_GELU_AUX_BIAS if bias is not None else _EPILOGUE_GELU_AUX
            self._describe(_INNER_LEADING, c_int64(inner[0]))
            self._describe(_INNER_POINTER, c_void_p(inner[1]))  # the heuristic looks at alignments only
        if bias is not None:
            self._describe(_BIAS_TYPE, c_int32(bias[0]))
            self._describe(_BIAS_POINTER, c_void_p(bias[1]))
        if epilogue:
            self._describe(_EPILOGUE, c_uint32(epilogue))
        self._layouts = [_layout(lt, matrix, batch) for matrix in (first, second, result)]
        self._lock = threading.Lock()
        self.candidates = self._propose(first, second, result)
        self.algorithm: Heuristic | None = None if len(self.candidates) > 1 else self.candidates[0]

    def choose(self, stage: Stage, a: Array, b: Array, out: Array, end: Epilogue) -> None:
        """Keep the fastest candidate; none yet if it can't be measured now.

        They write `out` itself, which is written again afterwards, except where they would add to it.
        """
        scratch = stage.empty(out.shape, out.dtype) if self._beta.value else out
        twin, result = Matrix.of(scratch), Matrix.of(out)
        if twin.leading != result.leading or twin.alignment < result.alignment:
            self.algorithm = self.candidates[0]  # not to be measured on anything but a twin of out
            return
        times = []
        for candidate in self.candidates:
            seconds = stage.seconds(lambda c=candidate: self.run(stage, c, a, b, scratch, end))
            if seconds is None:
                return
            times.append(seconds)
        with self._lock:
            if self.algorithm is None:  # else another thread has measured too: all take what the first found
                self.algorithm = self.candidates[times.index(min(times))]

    def run(self, stage: Stage, chosen: Heuristic, a: Array, b: Array, out: Array, end: Epilogue) -> None:
        """Launch the product in the current stream."""
        # The addresses stand in the descriptor, which threads as ranks share; the launch reads them at once.
        with self._lock:
            if end.bias is not None:
                self._describe(_BIAS_POINTER, c_void_p(address(end.bias)))
            if end.inner is not None:
                self._describe(_INNER_POINTER, c_void_p(address(end.inner)))
            self._launch(stage, chosen, a, b, out)

    def _launch(self, stage: Stage, chosen: Heuristic, a: Array, b: Array, out: Array) -> None:
        first, second, result = self._layouts
        self._lt.call(
            "cublasLtMatmul",
            self._lt.handle,
            self._product,
            byref(self._one),
            c_void_p(address(b)),
            first,
            c_void_p(address(a)),
            second,
            byref(self._beta),
            c_void_p(address(out)),
            result,
            c_void_p(address(out)),
            result,
            byref(chosen.algorithm),
            c_void_p(stage.workspace()),
            c_size_t(WORKSPACE),
            c_void_p(stage.stream()),
        )

    def _describe(self, attribute: int, value: Any) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._lt.call("cublasLtMatmulDescSetAttribute", self._product, c_int(attribute), byref(value), size)

    def _propose(self, *matrices: Matrix) -> list[Heuristic]:
        """What the heuristic thinks best, first first. Raises NoSuchProduct if it knows none."""
        preference, found = c_void_p(), c_int()
        self._lt.call("cublasLtMatmulPreferenceCreate", byref(preference))
        limits = [(_MAX_WORKSPACE, c_uint64(WORKSPACE))]
        if matrices[-1].element in _LOW:  # partial sums else may be rounded to the type of the result
            limits.append((_REDUCTION_SCHEMES, c_uint32(_IN_COMPUTE_TYPE)))
        wanted = [matrix.alignment for matrix in (*matrices, matrices[-1])]
        limits += [(name, c_uint32(bytes)) for name, bytes in zip(_ALIGNMENTS, wanted, strict=True)]
        for name, value in limits:
            size = c_size_t(ctypes.sizeof(value))
            self._lt.call("cublasLtMatmulPreferenceSetAttribute", preference, c_int(name), byref(value), size)
        results = (Heuristic * CANDIDATES)()
        first, second, result = self._layouts
        asked = (first, second, result, result, preference, c_int(CANDIDATES), results, byref(found))
        try:
            self._lt.call("cublasLtMatmulAlgoGetHeuristic", self._lt.handle, self._product, *asked)
        except NoSuchProduct:
            found.value = 0
        self._lt.call("cublasLtMatmulPreferenceDestroy", preference)
        usable = [candidate for candidate in results[: found.value] if candidate.state == 0]
        if not usable:
            raise NoSuchProduct(f"cublasLt knows no algorithm for {matrices}")
        return usable


def _key(a: Array, b: Array, out: Array, accumulate: bool, end: Epilogue) -> tuple:
    """What of a product a plan depends on. Raises ValueError for strides that cublasLt can't read."""
    first, second, result = Matrix.of(b), Matrix.of(a), Matrix.of(out)
    if first is None or second is None or result is None or result.transposed:
        strides = (a.strides, b.strides, out.strides)
        raise ValueError(f"gemm: a and b need a dense axis, out a dense last one; strides {strides}")
    return first, second, result, out.shape[0] if out.ndim == 3 else 1, accumulate, end.kind


def _layout(lt: CublasLt, matrix: Matrix, batch: int) -> c_void_p:
    layout = c_void_p()
    lt.call(
        "cublasLtMatrixLayoutCreate",
        byref(layout),
        c_int(matrix.element),
        c_uint64(matrix.rows),
        c_uint64(matrix.columns),
        c_int64(matrix.leading),
    )
    if batch > 1:
        for name, value in ((_BATCH_COUNT, c_int32(batch)), (_BATCH_STRIDE, c_int64(matrix.batch_stride))):
            size = c_size_t(ctypes.sizeof(value))
            lt.call("cublasLtMatrixLayoutSetAttribute", layout, c_int(name), byref(value), size)
    return layout


def _alignment(place: int) -> int:
    """The largest power of two, up to 256, that divides an address."""
    return min(place & -place, 256) if place else 256
