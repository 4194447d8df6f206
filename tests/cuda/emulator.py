"""Runs kernels/cuda on the CPU: a backend that compiles the same .cu files with g++ and calls them by ctypes.

Arrays are NumPy's; bfloat16 is ml_dtypes'. Every launch is checked: as many arguments as the kernel has, of
the types that it has, a grid and shared memory within CUDA's limits.
"""

import ctypes
import re
import threading
from functools import cache
from pathlib import Path

import numpy as np

from shardrt.kernels.cuda._compile import HERE
from tests.cuda.libraries import ALONE, GXX, built, head, library_folder

_ONE_AT_A_TIME = threading.Lock()
ROOT = Path(__file__).parents[2]
LIBRARIES = ROOT / "build" / "shim"
SHIM = Path(__file__).with_name("shim.h")
_SCALARS = {
    "int": np.int32,
    "uint32": np.uint32,
    "unsigned": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
    "float": np.float32,
    "double": np.float64,
}
_WRAPPER = 'extern "C" __attribute__((no_sanitize("thread"))) void call_%s(void** arguments) { %s(%s); }'
_NAMES = {"float": "float32", "double": "float64", "__half": "float16", "__nv_bfloat16": "bfloat16"}


class Emulator:
    """A backend for kernels/cuda/_launch.py. `launches` counts what was run."""

    multiprocessors = 2
    shared = 227 << 10
    sources = HERE  # of kernels

    def __init__(self) -> None:
        self.launches: list[str] = []

    def launch(self, file, defines, function, grid, threads, args, shared):
        assert threads % 32 == 0 and 32 <= threads <= 1024, threads
        assert shared <= 227 << 10, shared
        assert min(grid) > 0 and grid[0] < 2**31 and max(grid[1:]) < 65536, grid
        library = self._library(file, defines)
        parameters = library.parameters(function)
        assert len(args) == len(parameters), f"{function} takes {parameters}, got {len(args)} arguments"
        given = map(_scalar, args)
        values = [_value(function, *pair) for pair in zip(parameters, given, strict=True)]
        self.launches.append(function)
        with _ONE_AT_A_TIME:  # the stand-in for CUDA's language has one set of threads
            self._run(library, function, args, values, grid, threads, shared)

    def _library(self, file, defines):
        return Library.of(self.sources / f"{file}.cu", defines)

    def _run(self, library, function, args, values, grid, threads, shared):
        message = ctypes.create_string_buffer(200)
        failed = runtime().shim_launch(
            library.call(function),
            (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values)),
            (ctypes.c_uint * 3)(*grid),
            threads,
            ctypes.c_size_t(shared),
            message,
        )
        assert not failed, f"{library.file}.cu: {function}: {message.value.decode()}"

    def empty(self, shape, dtype):
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)  # not a number: nobody may count on zeros
        return array

    def upload(self, values):
        return values.copy()

    def attention(self):
        """Only the kernels of the files here."""

    def convolution(self):
        """Only the kernels of the files here."""

    def prepare(self, wanted):
        """Each is compiled when it is first launched."""

    @property
    def matmuls(self):
        return self

    def gemm(self, a, b, out, *, accumulate, bias=None, varied=False):
        assert a.dtype == b.dtype and out.dtype in (a.dtype, np.float32)
        exact = np.float64 if a.dtype == np.float64 else np.float32
        result = np.matmul(a.astype(exact), b.astype(exact))
        if bias is not None:
            result += bias.astype(exact)
        if accumulate:
            result += out.astype(exact)
        out[...] = result

    def gemm_grouped(self, a, b, out, groups, *, accumulate):
        """As cuBLAS where it is older than 12.5."""
        return False

    def gemm_gelu(self, a, b, bias, inner, out, apart):
        """As cublasLt where it has no such product."""
        return False

    def gemm_gelu_backward(self, a, b, inner, out, apart):
        """Likewise."""
        return False

    def gemm_sums(self, a, b, out, sums, *, accumulate, apart):
        """Likewise."""
        return False


def _scalar(arg):
    """What Python's numbers stand for."""
    return np.int32(arg) if isinstance(arg, bool) else np.int64(arg) if isinstance(arg, int) else arg


def _value(function, parameter, arg):
    """An argument as ctypes passes it, checked against the parameter's type."""
    kind, name = parameter
    if kind.endswith("*"):
        if arg is None:
            return ctypes.c_void_p(None)
        assert isinstance(arg, np.ndarray), f"{function}: {name} is no array"
        wanted = kind.rstrip("* ").removeprefix("const ").strip()
        wanted = _NAMES.get(wanted, wanted)
        sizes = {"int": 4, "uint32": 4, "int64": 8, "uint64": 8, "uint16": 2, "unsigned char": 1}
        if wanted in sizes:
            assert arg.dtype.itemsize == sizes[wanted], f"{function}: {name} is {arg.dtype}, not {wanted}"
        elif wanted != "void":
            assert arg.dtype.name == wanted, f"{function}: {name} is {arg.dtype}, not {wanted}"
        return ctypes.c_void_p(arg.ctypes.data)
    scalar = _SCALARS[kind]
    assert isinstance(arg, scalar), f"{function}: {name} is {type(arg).__name__}, not {scalar.__name__}"
    return np.ctypeslib.as_ctypes_type(scalar)(arg.item())


class Library:
    """A .cu file compiled by g++. options: further ones for it."""

    def __init__(self, path: Path, defines: tuple, options: tuple = ()) -> None:
        source = path.read_text()
        self.file, self._defines = path.stem, dict(defines)
        self._texts = {
            name: text.split(",")
            for name, text in re.findall(
                r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^)]*)\)', source
            )
        }
        assert self._texts, f"{path.name} has no kernel"
        wrappers = []
        for name, texts in self._texts.items():
            types = [re.sub(r"\w+$", "", " ".join(text.split())) for text in texts]
            values = [f"*({kind}*)arguments[{i}]" for i, kind in enumerate(types)]
            wrappers.append(_WRAPPER % (name, name, ", ".join(values)))
        code = "\n".join([f'#line 1 "{path.name}"', source, *wrappers])
        runtime()
        options = (*ALONE, *options, *(f"-D{macro}={value}" for macro, value in defines), f"-I{path.parent}")
        self.path = _compiled(path.stem, code, options, path.parent, '#include "shim.h"\n')
        self._library = ctypes.CDLL(str(self.path))

    @classmethod
    @cache
    def of(cls, *how):
        """The same one for the same arguments."""
        return cls(*how)

    def call(self, name):
        """A kernel as shim_launch wants it."""
        return getattr(self._library, f"call_{name}")

    def parameters(self, name):
        """[(type, name)] of a kernel, with T, A and other macros replaced."""
        element = self._defines["ELEMENT"]
        types = {"T": element, "A": "double" if element == "double" else "float", **self._defines}
        result = []
        for text in self._texts[name]:
            *kind, last = " ".join(text.split()).replace("*", "* ").replace("__restrict__", "").split()
            words = [types.get(word.rstrip("*"), word.rstrip("*")) + "*" * word.count("*") for word in kind]
            result.append((" ".join(words), last))
        return result


@cache
def runtime():
    """What kernels call to wait for one another, for all of their libraries."""
    code = SHIM.with_suffix(".cpp").read_text()
    return ctypes.CDLL(str(_compiled("shim", code, ["-O2"], SHIM.parent)), mode=ctypes.RTLD_GLOBAL)


def _compiled(name, code, options, folder, before=""):
    """The shared library of `code`, which includes files of `folder`, from a cache in the checkout.

    before: code that it begins with, the same for many.
    """
    ours, theirs = (
        "".join(path.read_text() for path in sorted(paths))
        for paths in (SHIM.parent.glob("*.h"), folder.glob("*.cuh"))
    )
    kept, command = library_folder(LIBRARIES), (*GXX, *options, f"-I{SHIM.parent}")
    command = [*command, *(head(kept, before, command, ours) if before else ())]
    return built(kept, name, code, ".cpp", command, ours + theirs)
