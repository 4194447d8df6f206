"""Launches kernels on a GPU through CuPy: the one file of this folder that needs one.

Never run on a GPU yet (docs/reference/limits.md); tests run it on the real CuPy over a GPU emulator.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import cupy
import numpy as np

from shardrt.kernels.cuda import _compile
from shardrt.kernels.cuda._cublas_grouped import CublasGrouped
from shardrt.kernels.cuda._cublaslt import CublasLt
from shardrt.kernels.cuda._cublaslt_plan import WORKSPACE
from shardrt.kernels.cuda._cudnn import CuDNN
from shardrt.kernels.cuda._cudnn_attention import CuDNNAttention
from shardrt.kernels.cuda._cudnn_conv2d import CuDNNConv2d
from shardrt.kernels.cuda._launch import STATIC_SHARED, Array, Group

_PLENTY = (48 << 10) - STATIC_SHARED  # bytes of dynamic shared memory above which a kernel must be allowed it


current_gpu = cupy.cuda.runtime.getDevice


class CuPyBackend:
    """The backend of _launch.py for one GPU. Compiled kernels are kept for the life of the process."""

    def __init__(self) -> None:
        gpu = cupy.cuda.Device()
        self.multiprocessors = gpu.attributes["MultiProcessorCount"]
        self.shared = gpu.attributes["MaxSharedMemoryPerBlockOptin"]
        self.architecture = f"sm_{gpu.compute_capability}"
        self._modules: dict[tuple, Any] = {}
        self._functions: dict[tuple, Any] = {}
        self._shared: dict[Any, int] = {}  # by function: bytes that it was allowed
        self._workspaces: dict[int, Array] = {}  # of a stream, by its handle
        self._cache_size = min(gpu.attributes["L2CacheSize"], WORKSPACE)

    def launch(
        self,
        file: str,
        defines: _compile.Defines,
        function: str,
        grid: tuple[int, int, int],
        threads: int,
        args: tuple,
        shared: int,
    ) -> None:
        """Run a kernel in CuPy's current stream."""
        if file == "philox" and cupy.cuda.get_current_stream().is_capturing():
            raise RuntimeError(
                "capture: random numbers drawn inside a graph would repeat in every replay; see "
                "docs/explanation/gpu.md"
            )
        key = file, defines, function
        kernel = self._functions.get(key)
        if kernel is None:
            kernel = self._functions[key] = self._module(file, defines).get_function(function)
        if shared > _PLENTY and shared > self._shared.get(kernel, 0):
            driver = cupy.cuda.driver
            attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.funcSetAttribute(kernel.ptr, attribute, shared)
            self._shared[kernel] = shared
        # CuPy hands over eight bytes for Python's numbers. CUDA reads as many of them as the parameter has.
        kernel(grid, (threads, 1, 1), [0 if arg is None else arg for arg in args], shared)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """From CuPy's pool, which gives memory out again in the order of the stream."""
        return cupy.ndarray(shape, dtype)

    def upload(self, values: np.ndarray) -> Array:
        """Through pinned memory that CuPy keeps until the copy is made."""
        return cupy.asarray(values)

    @cached_property
    def matmuls(self) -> CublasLt:
        """Load cublasLt."""
        return CublasLt(_library(), self)

    def gemm_grouped(
        self, a: Array, b: Array, out: Array, groups: Sequence[Group], *, accumulate: bool
    ) -> bool:
        """By cuBLAS, in 16 bits, from version 12.5 on."""
        return self._cublas_grouped.gemm(a, b, out, groups, accumulate)

    @cached_property
    def _cublas_grouped(self) -> CublasGrouped:
        return CublasGrouped(_library("cublas"), self)

    def attention(self) -> CuDNNAttention | None:
        """cuDNN's, where nvidia-cudnn-frontend is installed (the extra "cudnn") and finds the library."""
        return self._cudnn[0]

    def convolution(self) -> CuDNNConv2d | None:
        """cuDNN's, as attention."""
        return self._cudnn[1]

    @cached_property
    def _cudnn(self) -> tuple[CuDNNAttention, CuDNNConv2d] | tuple[None, None]:
        try:
            import cudnn
        except ImportError:
            message = "no nvidia-cudnn-frontend, so slower kernels do attention and convolution"
            warnings.warn(f"{message}: pip install 'shardrt[cudnn]'", stacklevel=2)
            return None, None
        try:
            library = CuDNN(cudnn, self)
        except RuntimeError as error:
            warnings.warn(
                f"cuDNN is not available, so slower kernels compute attention and convolution ({error})",
                stacklevel=2,
            )
            return None, None
        return CuDNNAttention(library), CuDNNConv2d(library)

    def prepare(self, wanted: Iterable[tuple[str, _compile.Defines]]) -> None:
        """Compile these (file, macros), or load them from the cache on disk; several at a time."""
        with ThreadPoolExecutor() as pool:  # NVRTC does not hold the interpreter's lock
            list(pool.map(lambda each: _compile.compile(*each, self.architecture), wanted))

    # -- for cublasLt, cuBLAS and cuDNN

    def stream(self) -> int:
        """The current stream's handle."""
        return cupy.cuda.get_current_stream().ptr

    def workspace(self, stream: int) -> int:
        """One for each stream, because matmuls in two streams may run at once."""
        memory = self._workspaces.get(stream)
        if memory is None:
            memory = self._workspaces[stream] = cupy.empty(WORKSPACE, np.uint8)
        return memory.data.ptr

    def forget_stream(self, stream: int) -> None:
        """Give back the workspace of a stream that is no more."""
        self._workspaces.pop(stream, None)

    def seconds(self, work: Callable[[], None], rounds: int) -> float | None:
        """The least of some rounds, after one that loads code; None while the stream is being captured.

        Before each round the stream's workspace is overwritten: so the L2 cache holds no operand, as in
        training, where other layers come in between, and the GPU is busy while `work` is issued.
        """
        stream = cupy.cuda.get_current_stream()
        if stream.is_capturing():
            return None
        work()
        place, events = self.workspace(stream.ptr), []
        for _ in range(rounds):
            cupy.cuda.runtime.memsetAsync(place, 0, self._cache_size, stream.ptr)
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            work()
            stop.record(stream)
            events.append((start, stop))
        stop.synchronize()
        return min(cupy.cuda.get_elapsed_time(*pair) for pair in events) / 1e3

    @cached_property
    def gpu(self) -> str:
        """What the speed of an algorithm depends on."""
        found = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        return f"{found['name'].decode()}, {self.multiprocessors} multiprocessors"

    def _module(self, file: str, defines: _compile.Defines) -> Any:
        if (file, defines) not in self._modules:
            module = cupy.cuda.function.Module()
            module.load(_compile.compile(file, defines, self.architecture))
            self._modules[file, defines] = module
        return self._modules[file, defines]


def _library(name: str = "cublasLt") -> ctypes.CDLL:
    """One of CUDA's libraries ("cublasLt", "cublas"), of NVIDIA's wheels or of a toolkit."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return ctypes.CDLL(load_nvidia_dynamic_lib(name).abs_path)
