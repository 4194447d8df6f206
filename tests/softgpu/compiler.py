"""NVRTC of the GPU emulator: CUDA C++ compiled for the processor, by g++ with tests/cuda/shim.h before it.

The functions have the names of cupy_backends.cuda.libs.nvrtc and take their places. What they give in the
place of a cubin names a library, which cuda.py loads.
"""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

from tests.cuda.libraries import ALONE, GXX, DoesNotCompile, built, head

HERE = Path(__file__).parent
SHIM = HERE.parent / "cuda" / "shim.h"
COMMAND = (*GXX, *ALONE, f"-I{HERE / 'include'}")
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(')
_CALL = """
extern "C" void call_{0}(void** arguments) {{ shim::call({0}, arguments); }}
extern "C" size_t sizes_{0}(size_t* sizes) {{ return shim::sizes({0}, sizes); }}
"""
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(\w+)\s+(\w+)\[\];")  # as CuPy's own kernels have it
_HEAD = f'#include "{SHIM}"\n#include "{HERE / "call.h"}"\n'
_CUPYS = re.compile(r"\s*(?:#include <cupy/\S+>\s*?\n)*")  # what CuPy's own kernels begin with


class NVRTC:
    """`folder`: where libraries are kept. destroy: what gives back a program of NVRTC's own."""

    def __init__(self, folder: Path, destroy: Callable[[int], None] = int) -> None:
        self._folder, self._destroy = folder, destroy
        self._numbers = itertools.count(1)
        self._sources: dict[int, str] = {}
        self._codes: dict[int, bytes] = {}
        self._logs: dict[int, str] = {}

    def getVersion(self):
        return 13, 0

    def createProgram(self, source, name, headers, include_names):
        program = next(self._numbers)
        self._sources[program], self._logs[program] = source, ""
        return program

    def destroyProgram(self, program):
        """The garbage collector gives back programs of the other kind too, whenever it comes by."""
        if program in self._sources:
            del self._sources[program]
            self._codes.pop(program, None)
        else:
            self._destroy(program)

    def compileProgram(self, program, options):
        from cupy_backends.cuda.libs import nvrtc

        text = [option.decode() if isinstance(option, bytes) else option for option in options]
        kept = [option for option in text if option.startswith("-D") or _ours(option)]
        source = _DYNAMIC.sub(r"DYNAMIC_SHARED(\1, \2);", self._sources[program])
        names = _KERNEL.findall(source)
        code = source + "".join(_CALL.format(name) for name in names)
        command = (*COMMAND, *kept)
        before = head(self._folder, _HEAD + _CUPYS.match(source)[0], command, headers())
        try:
            library = built(self._folder, "kernels", code, ".cpp", [*command, *before], headers())
        except DoesNotCompile as error:
            self._logs[program] = str(error)
            raise nvrtc.NVRTCError(6) from None
        self._codes[program] = b"\x7fELF" + json.dumps({"library": str(library), "names": names}).encode()

    def getCUBIN(self, program):
        return self._codes[program]

    getPTX = getCUBIN

    def getProgramLog(self, program):
        return self._logs[program]


def _ours(option: str) -> bool:
    """Whether this is a folder of CuPy's headers or of ours, not of CUDA's, whose place include/ takes."""
    return option.startswith("-I") and option.endswith(("cupy/_core/include", "kernels/cuda"))


def headers() -> str:
    """All that the sources of kernels include of ours."""
    ours = [SHIM, HERE / "call.h", *sorted((HERE / "include").rglob("*.*"))]
    from shardrt.kernels.cuda._compile import HERE as kernels

    return "".join(path.read_text() for path in [*ours, *sorted(kernels.glob("*.cuh"))])
