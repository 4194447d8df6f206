"""Launches kernels of the .cu files next to this one: the module, the grid, the arguments.

A backend launches: CuPy's, which is the default and registers itself, or in the tests one that runs the same
sources on the CPU. Nothing else in this folder knows CuPy.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np

__all__ = ["backend"]

Array = Any
Apart = Callable[[Array], None]  # computes a product's result in several steps
Group = tuple[int, int, int]  # a group of rows: its number, its first row, and the one behind its last

# NumPy's name of an element type -> that of CUDA C++.
TYPES = {"float32": "float", "float64": "double", "float16": "__half", "bfloat16": "__nv_bfloat16"}
THREADS = 256
STATIC_SHARED = 512  # bytes: kernels with dynamic shared memory have no more beside it (test_compile.py)
_RANGE_TILE = 4096  # elements that a block takes at a time, as in ranges.cuh


class NotOnGPU(ValueError):
    """Kernels of the GPU can't compute what those of the CPU can."""


class Stage(Protocol):
    """Where calls of libraries run: what their bindings ask of a backend."""

    gpu: str  # what the speed of an algorithm depends on
    architecture: str  # "sm_90"

    def stream(self) -> int:
        """The current stream's handle."""

    def workspace(self, stream: int) -> int:
        """The address, a multiple of 256, of WORKSPACE bytes that belong to this stream, the current one."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Scratch memory, in the order of the current stream."""

    def upload(self, values: np.ndarray) -> Array:
        """A copy on the GPU, made when the current stream comes to it. Raises RuntimeError in a capture."""

    def seconds(self, work: Callable[[], None], rounds: int) -> float | None:
        """How long `work` keeps the GPU busy, at best; None while that can't be measured (in a capture)."""


class Backend(Protocol):
    """What runs a kernel."""

    multiprocessors: int
    shared: int  # bytes of shared memory, static and dynamic, that a block may have
    matmuls: Any  # computes matmuls of two factors (see _cublaslt.py)

    def launch(
        self,
        file: str,
        defines: tuple[tuple[str, str], ...],
        function: str,
        grid: tuple[int, int, int],
        threads: int,
        args: tuple,
        shared: int,
    ) -> None:
        """Run `function` of FILE.cu, compiled with `defines`, in the current stream. args: as launch's."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Scratch memory that lives until the kernels launched so far have used it."""

    def upload(self, values: np.ndarray) -> Array:
        """A copy of a small array of the host, made when the current stream comes to it. No wait."""

    def gemm_grouped(
        self, a: Array, b: Array, out: Array, groups: Sequence[Group], *, accumulate: bool
    ) -> bool:
        """A product of each of `groups`, in one call; False, with nothing done, if it can't.

        out (rows, n): out[start:stop] = a[start:stop] b[group]. out (groups, m, n), a (m, rows) and b (rows,
        n): out[group] = a[:, start:stop] b[start:stop] (+ out[group]). All begin at multiples of 16 bytes,
        and so do their rows; one of the last two axes of each is dense.
        """

    def attention(self) -> Any | None:
        """What is better at attention than the kernels here, if anything is (see _cudnn_attention.py)."""

    def convolution(self) -> Any | None:
        """The same for convolution (see _cudnn_conv2d.py)."""

    def forget_stream(self, stream: int) -> None:
        """Give back what is kept for a stream that is no more."""

    def prepare(self, wanted: list[tuple[str, tuple[tuple[str, str], ...]]]) -> None:
        """Have these files ready, each with its macros."""


class _Here(threading.local):
    backend: Backend | None = None


_here = _Here()
_chosen: Backend | None = None
_of_gpus: dict[int, Backend] = {}  # what a backend loads (modules, library handles) belongs to one GPU
_current_gpu: Callable[[], int] | None = None  # the library's, from the first launch on
_library: Callable[[], tuple[Callable[[], int], Callable[[], Backend]]] | None = None


def register(library: Callable[[], tuple[Callable[[], int], Callable[[], Backend]]]) -> None:
    """Set where backends come from. library() gives (the current GPU's number, a backend for that GPU)."""
    global _library
    _library = library


def backend() -> Backend:
    """The backend in use: that of this thread's GPU, unless another is chosen. Asked at each launch."""
    if _here.backend is not None:
        return _here.backend
    if _chosen is not None:
        return _chosen
    try:
        return _of_gpus[_current_gpu()]
    except (KeyError, TypeError):
        return _backend_of_current_gpu()


def _backend_of_current_gpu() -> Backend:
    """Made by the first launch on this GPU. If two threads make one at once, both use the first of them."""
    global _current_gpu
    assert _library is not None  # kernels/cuda/__init__.py registers it
    _current_gpu, make = _library()
    return _of_gpus.setdefault(_current_gpu(), make())


def use(chosen: Backend | None) -> Backend | None:
    """Use this backend on all GPUs, or with None each GPU's own; gives what was chosen before."""
    global _chosen
    before, _chosen = _chosen, chosen
    return before


@contextmanager
def used_here(chosen: Backend) -> Iterator[None]:
    """Use this backend inside a with block, in this thread alone."""
    before, _here.backend = _here.backend, chosen
    try:
        yield
    finally:
        _here.backend = before


def launch(
    file: str,
    function: str,
    element: Any,
    grid: int | tuple[int, ...],
    args: tuple,
    *,
    threads: int = THREADS,
    shared: int = 0,
    **defines: str,
) -> None:
    """Run `function` of FILE.cu for the element type `element`.

    grid: blocks, up to three axes. args: arrays, and NumPy scalars of the kernel's parameter types (a Python
    int stands for int64, a bool for int, None for a null pointer). shared: bytes of dynamic shared memory.
    defines: further macros.
    """
    blocks = (grid,) if isinstance(grid, int) else grid
    if min(blocks) < 1:
        return  # nothing to do: CUDA refuses an empty grid
    macros = _macros(element, tuple(defines.items()))
    backend().launch(file, macros, function, (*blocks, 1, 1)[:3], threads, args, shared)


@cache
def type_name(dtype: Any) -> str:
    """What CUDA C++ calls an element type. NumPy takes long to tell a type's name."""
    return TYPES[np.dtype(dtype).name]


@cache
def _macros(element: Any, defines: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return (("ELEMENT", type_name(element)), *sorted(defines))


def empty(shape: int | tuple[int, ...], dtype: Any) -> Array:
    """Scratch memory."""
    return backend().empty((shape,) if isinstance(shape, int) else shape, np.dtype(dtype))


def accumulator(dtype: Any) -> type:
    """What a kernel computes in, as a scalar type: float64 for float64, else float32."""
    return np.float64 if np.dtype(dtype) == np.float64 else np.float32


def address(array: Array) -> int:
    """Where an array begins."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return array.data.ptr


def vectors(*arrays: Array | None) -> bool:
    """Whether all arrays begin at a multiple of 16 bytes, so that kernels may load 16 bytes at once."""
    return not any([array is not None and address(array) % 16 for array in arrays])


def blocks_for(count: int, per_thread: int) -> int:
    """Enough blocks for `count` elements, `per_thread` a turn, and not more than keep the GPU busy."""
    return min(-(-count // (per_thread * THREADS)), 8 * backend().multiprocessors)


def tiles_for(count: int, ranges: int) -> int:
    """Blocks for ranges of `count` elements (each_in_ranges of ranges.cuh); none if there is no range."""
    return min(-(-count // _RANGE_TILE), 8 * backend().multiprocessors) if ranges else 0
