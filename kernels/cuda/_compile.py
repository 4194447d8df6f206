"""Compiles a .cu file of this folder to machine code with NVRTC, which needs neither a GPU nor a driver.

The result is kept on disk, in a file named after everything it depends on.
"""

import hashlib
import os
import re
import tempfile
from functools import cache
from pathlib import Path

from shardrt.kernels import kept

__all__ = ["files", "variants"]

HERE = Path(__file__).parent
Defines = tuple[tuple[str, str], ...]


def files() -> list[str]:
    """The names of the sources in this folder, without .cu."""
    return sorted(path.stem for path in HERE.glob("*.cu"))


def variants(file: str, elements: tuple[str, ...]) -> list[Defines]:
    """The macros that FILE.cu is usually compiled with: one of `elements` that it knows, and its defaults.

    A file says `// ELEMENT: float double` if it knows only these, and `// Macro: NAME=value` for others.
    """
    text = (HERE / f"{file}.cu").read_text()
    known = re.search(r"// ELEMENT: (.*)", text)
    others = tuple(re.findall(r"// Macro: (\w+)=(\S+)", text))
    return [(("ELEMENT", e), *others) for e in elements if known is None or e in known.group(1).split()]


def compile(file: str, defines: Defines, arch: str) -> bytes:
    """The machine code of FILE.cu for `arch` ("sm_90"), from the cache if it is there.

    Raises RuntimeError with NVRTC's messages if it does not compile.
    """
    known = cache_directory() / f"{file}-{_key(file, defines, arch)}.cubin"
    if known.exists():
        return known.read_bytes()
    code, _ = compile_with_log(file, defines, arch)
    _keep(known, code)
    return code


def compile_with_log(file: str, defines: Defines, arch: str) -> tuple[bytes, str]:
    """(machine code, ptxas's log), not from the cache."""
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram((HERE / f"{file}.cu").read_text(), f"{file}.cu", [], [])
    try:
        nvrtc.compileProgram(program, _options(defines, arch))
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        raise RuntimeError(f"{file}.cu does not compile:\n{nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)


def _options(defines: Defines, arch: str) -> tuple[str, ...]:
    return (
        f"-arch={arch}",
        "-std=c++17",
        "--fmad=true",
        "-default-device",
        "-lineinfo",
        "--ptxas-options=-v",
        f"-I{HERE}",
        *(f"-I{folder}" for folder in _headers()),
        *(f"-D{name}={value}" for name, value in defines),
    )


@cache
def _headers() -> tuple[str, ...]:
    """Where cuda_bf16.h is: in NVIDIA's wheel, or in a toolkit."""
    from cuda.pathfinder import find_nvidia_header_directory

    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        raise RuntimeError("CUDA's headers are missing: pip install nvidia-cuda-runtime nvidia-cuda-cccl")
    return (folder,)


def _key(file: str, defines: Defines, arch: str) -> str:
    from cupy_backends.cuda.libs import nvrtc

    text = [(HERE / f"{file}.cu").read_text(), *(header.read_text() for header in sorted(HERE.glob("*.cuh")))]
    everything = repr((text, defines, arch, _options(defines, arch)[1:6], nvrtc.getVersion()))
    return hashlib.sha256(everything.encode()).hexdigest()[:24]


def cache_directory() -> Path:
    """Where what is computed once is kept for later processes."""
    return kept.cache_directory() / "cuda"


def _keep(file: Path, code: bytes) -> None:
    """Write the file at once or not at all; a folder that can't be written is not worth an error."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
            temporary.write(code)
        os.replace(temporary.name, file)
    except OSError:
        pass
