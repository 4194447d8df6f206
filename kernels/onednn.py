"""oneDNN's matrix product through its C interface: bfloat16 operands as bits, or float32; the result float32.

Also what kernels/cpu/_conv2d_bits.py makes convolutions of.

The library comes with the extra `bf16` (onednn-cpu-gomp) and is found at run time. Knows neither Numba nor
what is faster: kernels/cpu/_choice.py chooses. (Names and numbers: oneDNN 3, dnnl.h and dnnl_types.h.)
"""

import ctypes
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

__all__ = ["computes_bf16", "library"]

Array = Any
T = TypeVar("T")

PACKAGE = "onednn-cpu-gomp"
BF16, F32 = 2, 3  # dnnl_data_type_t
SRC, DST, WEIGHTS, BIAS = 1, 17, 33, 41  # DNNL_ARG_*
DIFF_SRC, DIFF_DST, DIFF_WEIGHTS = 129, 145, 161
_ANY = 1  # dnnl_format_tag_any
_IMPLEMENTATION = 8  # dnnl_query_impl_info_str
_CPU, _IN_ORDER = 1, 1  # dnnl_engine_kind_t, dnnl_stream_flags_t
_ISA_BF16 = 0xE7  # dnnl_cpu_isa_avx512_core_bf16: bits that each later one has as well
_KEPT = 512  # matmuls of a thread that stay ready, the oldest go

_pointer, _int = ctypes.c_void_p, ctypes.c_int
_out = ctypes.POINTER(_pointer)
_SIGNATURES = {
    "dnnl_engine_create": (_out, _int, ctypes.c_size_t),
    "dnnl_stream_create": (_out, _pointer, ctypes.c_uint),
    "dnnl_memory_desc_create_with_strides": (_out, _int, _pointer, _int, _pointer),
    "dnnl_memory_desc_create_with_tag": (_out, _int, _pointer, _int, _int),
    "dnnl_memory_desc_clone": (_out, _pointer),
    "dnnl_memory_desc_destroy": (_pointer,),
    "dnnl_memory_create": (_out, _pointer, _pointer, _pointer),
    "dnnl_memory_set_data_handle": (_pointer, _pointer),
    "dnnl_memory_destroy": (_pointer,),
    "dnnl_post_ops_create": (_out,),
    "dnnl_post_ops_append_sum": (_pointer, ctypes.c_float, ctypes.c_int32, _int),
    "dnnl_post_ops_destroy": (_pointer,),
    "dnnl_primitive_attr_create": (_out,),
    "dnnl_primitive_attr_set_post_ops": (_pointer, _pointer),
    "dnnl_primitive_attr_destroy": (_pointer,),
    "dnnl_matmul_primitive_desc_create": (_out, *[_pointer] * 6),
    "dnnl_convolution_forward_primitive_desc_create": (_out, _pointer, _int, _int, *[_pointer] * 9),
    "dnnl_convolution_backward_data_primitive_desc_create": (_out, _pointer, _int, *[_pointer] * 9),
    "dnnl_convolution_backward_weights_primitive_desc_create": (_out, _pointer, _int, *[_pointer] * 10),
    "dnnl_reorder_primitive_desc_create": (_out, *[_pointer] * 5),
    "dnnl_primitive_desc_query": (_pointer, _int, _int, _pointer),
    "dnnl_primitive_desc_destroy": (_pointer,),
    "dnnl_primitive_create": (_out, _pointer),
    "dnnl_primitive_destroy": (_pointer,),
    "dnnl_primitive_execute": (_pointer, _pointer, _int, _pointer),
}


class OneDNNError(RuntimeError):
    """A call of oneDNN failed; the message has its function and the name of the status."""


class _Argument(ctypes.Structure):
    """dnnl_exec_arg_t."""

    _fields_ = (("arg", _int), ("memory", _pointer))


class Matrix(NamedTuple):
    """What of an operand decides which product computes it: elements of uint16 are bits of bfloat16."""

    rows: int
    columns: int
    down: int  # elements from a row to the next
    right: int
    kind: int

    @property
    def turned(self) -> "Matrix":
        """Its transpose, where it lies."""
        return Matrix(self.columns, self.rows, self.right, self.down, self.kind)


class _Version(ctypes.Structure):
    """dnnl_version_t, as far as it is read."""

    _fields_ = tuple((name, _int) for name in ("major", "minor", "patch"))


class Library:
    """libdnnl with its engine. Raises OSError if it can't be loaded, OneDNNError if it does not start."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        for name, types in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, _int
        self._library.dnnl_status2str.argtypes = (_int,)
        self._library.dnnl_status2str.restype = ctypes.c_char_p
        self._library.dnnl_version.restype = ctypes.POINTER(_Version)
        self._library.dnnl_primitive_desc_query_md.argtypes = (_pointer, _int, _int)
        self._library.dnnl_primitive_desc_query_md.restype = _pointer
        self._library.dnnl_memory_desc_get_size.argtypes = (_pointer,)
        self._library.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
        found = self._library.dnnl_version().contents
        self.version = f"{found.major}.{found.minor}.{found.patch}"
        self.isa = int(self._library.dnnl_get_effective_cpu_isa())
        # The one that libdnnl has loaded, and PyTorch if it is here.
        self._openmp = ctypes.CDLL("libgomp.so.1")
        self._threads = self._openmp.omp_get_max_threads
        self.engine = self.made("dnnl_engine_create", _CPU, 0)

    @property
    def computes_bf16(self) -> bool:
        """Whether the processor has instructions for it: AVX512-BF16, or AMX."""
        return self.isa & _ISA_BF16 == _ISA_BF16

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises OneDNNError with the name of its status if that is not success."""
        self.check(name, self.function(name)(*arguments))

    def function(self, name: str) -> Any:
        """It gives a status."""
        return getattr(self._library, name)

    def check(self, name: str, status: int) -> None:
        """Raise OneDNNError, or MemoryError, unless the status that the function gave is success."""
        if status:
            message = self._library.dnnl_status2str(status).decode()
            kind = MemoryError if message == "out_of_memory" else OneDNNError
            raise kind(f"oneDNN {self.version}: {name} says {message!r}")

    def made(self, name: str, *arguments: Any) -> Any:
        """What a function makes, whose first argument is where to put it."""
        handle = _pointer()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def with_threads(self, count: int, function: Any, *arguments: Any) -> Any:
        """function(*arguments), with so many threads of OpenMP; then as many as the caller had."""
        before = self._threads()
        if before == count:
            return function(*arguments)
        self._openmp.omp_set_num_threads(count)
        try:
            return function(*arguments)
        finally:
            self._openmp.omp_set_num_threads(before)

    def chosen(self, what: Any, number: int) -> tuple[Any, int]:
        """(the descriptor, its bytes) of an operand whose strides a primitive has chosen, by dnnl_query_t."""
        clone = self.made(
            "dnnl_memory_desc_clone", self._library.dnnl_primitive_desc_query_md(what, number, 0)
        )
        return clone, int(self._library.dnnl_memory_desc_get_size(clone))

    def implementation(self, what: Any) -> str:
        """The name of what a primitive computes with: "ref.." is the slow one, for what others do not do."""
        name = ctypes.c_char_p()
        self.call("dnnl_primitive_desc_query", what, _IMPLEMENTATION, 0, ctypes.byref(name))
        return name.value.decode()

    @contextmanager
    def adding(self, accumulate: bool) -> Iterator[Any]:
        """Attributes of a primitive, while it is described: whether it adds to its result."""
        attributes = self.made("dnnl_primitive_attr_create")
        if accumulate:
            sums = self.made("dnnl_post_ops_create")
            self.call("dnnl_post_ops_append_sum", sums, 1.0, 0, 0)
            self.call("dnnl_primitive_attr_set_post_ops", attributes, sums)
            self.call("dnnl_post_ops_destroy", sums)
        try:
            yield attributes
        finally:
            self.call("dnnl_primitive_attr_destroy", attributes)

    def descriptor(self, matrix: Matrix) -> Any:
        return self.laid_out(matrix[:2], matrix[2:4], matrix.kind)

    def laid_out(self, sizes: Sequence[int], strides: Sequence[int] | None, kind: int) -> Any:
        """The descriptor of an array; its strides, in elements, are oneDNN's choice if they are None."""
        shape = (ctypes.c_int64 * len(sizes))(*sizes)
        if strides is None:
            return self.made("dnnl_memory_desc_create_with_tag", len(sizes), shape, kind, _ANY)
        along = (ctypes.c_int64 * len(sizes))(*strides)
        return self.made("dnnl_memory_desc_create_with_strides", len(sizes), shape, kind, along)


class Primitive:
    """What computes for operands of certain descriptors, which only their addresses distinguish.

    what: a primitive's descriptor; operands: those of memory by their numbers, DNNL_ARG_*. Takes all of them.
    """

    def __init__(self, library: Library, stream: Any, what: Any, operands: dict[int, Any]) -> None:
        self._library, self._stream = library, stream
        self._primitive = library.made("dnnl_primitive_create", what)
        self._memories = [
            library.made("dnnl_memory_create", each, library.engine, None) for each in operands.values()
        ]
        self._count = len(operands)
        self._arguments = (_Argument * len(operands))(*zip(operands, self._memories, strict=True))
        self._move = library.function("dnnl_memory_set_data_handle")
        self._run = library.function("dnnl_primitive_execute")
        library.call("dnnl_primitive_desc_destroy", what)
        for each in operands.values():
            library.call("dnnl_memory_desc_destroy", each)

    def __call__(self, *addresses: int) -> None:
        move = self._move
        for memory, address in zip(self._memories, addresses, strict=True):
            status = move(memory, address)
        status = status or self._run(self._primitive, self._stream, self._count, self._arguments)
        if status:
            self._library.check("dnnl_primitive_execute", status)

    def __del__(self) -> None:
        for memory in getattr(self, "_memories", ()):
            self._library.call("dnnl_memory_destroy", memory)
        if hasattr(self, "_primitive"):
            self._library.call("dnnl_primitive_destroy", self._primitive)


def _product(library: Library, stream: Any, operands: tuple[Matrix, ...], accumulate: bool) -> Primitive:
    """The matmul of such operands: a, b, out and perhaps a bias."""
    descriptors = [library.descriptor(each) for each in operands]
    a, b, out, *bias = descriptors
    with library.adding(accumulate) as attributes:
        what = library.made(
            "dnnl_matmul_primitive_desc_create",
            library.engine,
            a,
            b,
            bias[0] if bias else None,
            out,
            attributes,
        )
    return Primitive(library, stream, what, dict(zip((SRC, WEIGHTS, DST, BIAS), descriptors, strict=False)))


class _Ready(threading.local):
    """Of this thread: a stream, and matmuls by their operands. Ranks may be threads of one process."""

    def __init__(self) -> None:
        self.stream: Any = None
        self.products: OrderedDict[tuple, Any] = OrderedDict()


_ready = _Ready()


@cache
def library() -> Library | None:
    """oneDNN, if its package is installed and loads; a warning says so where it does not load."""
    try:
        files = distribution(PACKAGE).files or ()
    except PackageNotFoundError:
        return None
    found = [file for file in files if file.name == "libdnnl.so.3"]
    try:
        return Library(str(Path(found[0].locate()).resolve())) if found else None
    except OSError as error:
        message = "it needs GNU's OpenMP (libgomp1), and memory; or uninstall it"
        warnings.warn(f"{PACKAGE} is installed and does not load: {error}; {message}", stacklevel=2)
        return None


def computes_bf16() -> bool:
    """Whether matmuls of bfloat16 are computed as such here: oneDNN is installed, and the processor can."""
    return (here := library()) is not None and here.computes_bf16


def product(
    a: Array, b: Array, out: Array, *, bias: Array | None = None, accumulate: bool = False, threads: int = 1
) -> None:
    """Set out = a @ b, plus bias in each row, or plus out if `accumulate`. Sums are made in float32.

    a (m, k), b (k, n): both uint16, the bits of bfloat16, or both float32; each with one stride that is that
    of an element. out (m, n), C-contiguous rows, and bias (n,), float32. None is empty.
    Raises OneDNNError if the library refuses.
    """
    here = library()
    if here is None:
        raise OneDNNError(f"{PACKAGE} is not installed, or does not load: pip install 'shardrt[bf16]'")
    # Shapes, strides and types in fewer steps than `matrix` takes: this is asked each time.
    what = (
        a.shape,
        a.strides,
        b.shape,
        b.strides,
        out.strides,
        a.dtype.char,
        bias is None,
        accumulate,
        threads,
    )
    arrays = (a, b, out) if bias is None else (a, b, out, bias)
    here.with_threads(threads, _compute, here, what, arrays)


def _compute(here: Library, what: tuple, arrays: tuple[Array, ...]) -> None:
    products = _ready.products
    found = products.get(what) or _made(here, what, tuple(map(matrix, arrays)), what[-2])
    found(*[array.__array_interface__["data"][0] for array in arrays])


def prepared(
    a: Matrix, b: Matrix, out: Matrix, *, accumulate: bool = False
) -> Callable[[int, int, int], None]:
    """What computes such products of this thread by one thread, given the addresses of a, b and out.

    To be made and called inside Library.with_threads(1, ..). Raises OneDNNError if the library refuses.
    """
    what = (a, b, out, accumulate)
    return _ready.products.get(what) or _made(library(), what, (a, b, out), accumulate)


def _made(here: Library, what: tuple, operands: tuple[Matrix, ...], accumulate: bool) -> Primitive:
    """Keep a matmul ready from now on."""
    return keep(what, _product(here, stream(), operands, accumulate))


def stream() -> Any:
    """This thread's."""
    if _ready.stream is None:
        here = library()
        _ready.stream = here.made("dnnl_stream_create", here.engine, _IN_ORDER)
    return _ready.stream


def kept(what: tuple) -> Any:
    """What this thread keeps ready by that name, or None."""
    return _ready.products.get(what)


def keep(what: tuple, made: T) -> T:
    """Have it ready from now on, until so many others are."""
    _ready.products[what] = made
    if len(_ready.products) > _KEPT:
        _ready.products.popitem(last=False)
    return made


def described(rows: int, columns: int, down: int, right: int, item: int) -> Matrix:
    """A matrix by its sizes, the elements between neighbours, and the bytes of one: 2, bfloat16, or 4."""
    # The stride of one row or column may be anything in NumPy.
    kind = BF16 if item == 2 else F32
    return Matrix(rows, columns, columns if rows == 1 else down, 1 if columns == 1 else right, kind)


def matrix(x: Array) -> Matrix:
    """What of an array the choice of a product depends on: all but its address."""
    size = x.itemsize
    if x.ndim == 1:
        return described(1, x.size, x.size, 1, size)
    return described(*x.shape, x.strides[0] // size, x.strides[1] // size, size)
