"""What `make gpu` finds on a machine, and what is left out for want of it. Uses the standard library only."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BENCHMARKS = ("numpy", "cupy", "ml_dtypes", "cuda.pathfinder", "threadpoolctl")
TESTS = (*BENCHMARKS, "pytest", "numba")
STEP = (*BENCHMARKS, "numba")
# Bytes and operations of kernels are declared at the CPU's kernels, which import Numba.
SECTIONS = {"tests": TESTS} | dict.fromkeys(("step", "products", "kernels", "convolution", "experts"), STEP)
# What other sections need is BENCHMARKS.
WITHOUT = {
    "torch": "no figures of PyTorch next to ours, and no test against its bfloat16",
    "cudnn": "attention and convolution run in kernels of our own, which are several times slower",
    "matplotlib": "no picture",
    "safetensors": "the test that saves weights is skipped",
    "mpi4py": "nothing is run in several processes, over NCCL or CUDA IPC",
    "pytest_timeout": "a test that hangs keeps the tests after it from running",
}
# module -> what pip installs it from, where that has another name; {} is CUDA's major version
_WHEELS = {
    "cupy": "cupy-cuda{}x",
    "cuda.pathfinder": "cuda-pathfinder",
    "cudnn": "'nvidia-cudnn-frontend<1.29' nvidia-cudnn-cu{}",
    "pytest_timeout": "pytest-timeout",
    "mpi4py": "mpi4py mpich",
}
# Of NVIDIA's libraries: name -> what fails where it is not found, what is lost, its wheels for CUDA 12
_LIBRARIES = {
    "CUDA's headers": (
        "from shardrt.kernels.cuda import _compile; _compile._headers()",
        "no kernel can be compiled",
        "nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12",
    ),
    "NVRTC": (
        "from cupy_backends.cuda.libs import nvrtc; nvrtc.getVersion()",
        "no kernel can be compiled",
        "nvidia-cuda-nvrtc-cu12",
    ),
    "cublasLt": (
        "from shardrt.kernels.cuda import _cupy; _cupy._library()",
        "no matmul can be computed",
        "nvidia-cublas-cu12",
    ),
    "NCCL": (
        "from cupy.cuda import nccl; assert nccl.available",
        "ranks with a GPU each can't talk",
        "nvidia-nccl-cu12",
    ),
}
_COMPUTE_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ..._MINOR
_NO_SUFFIX = ("runtime", "cccl", "nvrtc", "cublas")  # of the name of the wheel, from CUDA 13 on
# How the names begin of packages whose versions belong to a figure.
_PACKAGES = ("numpy", "numba", "ml_dtypes", "mpi4py", "cupy", "cuda-", "torch", "triton", "nvidia-")
_HEALTH = {  # what nvidia-smi is asked -> its name for a reader
    "temperature.gpu": "C",
    "clocks.sm": "MHz",
    "ecc.errors.uncorrected.volatile.total": "uncorrected errors",
    "clocks_event_reasons.active": "reasons to throttle",
    "utilization.gpu": "% busy",
}
_QUERY = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,power.limit,memory.total"


@dataclass(frozen=True)
class Found:
    """missing: modules. gpus: how many the driver shows. troubles: lines on NVIDIA's libraries and driver.

    too_old: why the first GPU can run no section; "" where it can.
    """

    missing: tuple[str, ...]
    gpus: int
    troubles: tuple[str, ...] = ()
    too_old: str = ""

    def lacks(self, section: str) -> str:
        """Why a section of the benchmarks can't run, and what installs that; "" where it can."""
        if self.too_old:
            return f"not run: {self.too_old}"
        missing = [name for name in SECTIONS.get(section, BENCHMARKS) if name in self.missing]
        return not_run(*missing) if missing else ""

    def lines(self) -> list[str]:
        """For a reader: what is missing, what that costs, and what installs it."""
        found = [] if self.gpus else ["no GPU: the driver, libcuda.so.1, is missing or sees none"]
        found += [self.too_old] if self.too_old else []
        costs = dict.fromkeys(TESTS, "the tests can't run") | WITHOUT
        costs |= dict.fromkeys(
            STEP, "neither the tests, nor a step on the CPU, nor kernels one by one can run"
        )
        costs |= dict.fromkeys(BENCHMARKS, "nothing can run")
        found += [f"{name} is missing: {costs[name]} ({_pip(_wheel(name))})" for name in self.missing]
        if len(self.missing) > 1:
            found.append(f"all missing packages at once: {_pip(*map(_wheel, self.missing))}")
        return [*found, *self.troubles]


def not_run(*missing: str) -> str:
    """What a row says that these modules are missing for, and what installs them."""
    return f"not run: {', '.join(missing)} missing ({_pip(*map(_wheel, missing))})"


def find() -> Found:
    """Look around; this process imports nothing of what it looks for."""
    missing = [name for name in dict.fromkeys((*TESTS, *WITHOUT)) if not there(name)]
    count = gpus()
    ready = count and not set(BENCHMARKS) & set(missing)
    troubles = (*_old_driver(), *libraries()) if ready else ()
    return Found(tuple(missing), count, troubles, _without_bfloat16() if count else "")


def libraries() -> list[str]:
    """A line for each of NVIDIA's that the code that loads it does not find, tried in another process."""
    tries = {name: words for name, (words, *_) in _LIBRARIES.items()}
    program = (
        "import sys\n"
        f"for name, words in {tries!r}.items():\n"
        "    try: exec(words)\n"
        "    except Exception as error: print(error, file=sys.stderr); print('not found:', name)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=Path(__file__).parents[2],
        )
    except subprocess.TimeoutExpired:
        return []
    return [
        f"{name} not found: {cost} ({_pip(*_for_this_cuda(wheels))})"
        for name, (_, cost, wheels) in _LIBRARIES.items()
        if f"not found: {name}" in done.stdout.splitlines()
    ]


def gpus() -> int:
    """How many the driver shows to this process, without CuPy."""
    driver, count = _driver(), ctypes.c_int()
    return 0 if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def one_gpu() -> dict[str, str]:
    """The environment in which a process sees the first GPU alone of those that this one may use."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()}


def machine() -> dict[str, str]:
    """Versions, and what nvidia-smi says of the first GPU; what can't be had is left out."""
    found = {"python": platform.python_version()}
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    found |= {name: installed[name] for name in sorted(installed) if name.startswith(_PACKAGES)}
    return found | {"GPUs": str(gpus())} | _asked(_QUERY.split(","))


def health() -> str:
    """Whether the first GPU is fit to be measured, in words: heat, clock, errors, other users."""
    figures = _asked(list(_HEALTH))
    said = ", ".join(f"{figures[key]} {name}" for key, name in _HEALTH.items() if key in figures)
    return said or "nvidia-smi did not answer"


def _asked(names: list[str]) -> dict[str, str]:
    """What nvidia-smi answers of the first GPU; nothing where it can't."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    command.append(f"--id={_bus()}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.strip().split(", ")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def there(name: str) -> bool:
    """Whether a module can be imported, which is not done."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # its parent package is missing
        return False


def _wheel(name: str) -> str:
    return _WHEELS.get(name, name).format(_cuda())


def _pip(*wheels: str) -> str:
    return f"pip install {' '.join(wheels)}"


def _for_this_cuda(wheels: str) -> list[str]:
    if _cuda() < 13:
        return wheels.split()
    bare = [wheel.removesuffix("-cu12") for wheel in wheels.split()]
    return [name if name.endswith(_NO_SUFFIX) else f"{name}-cu{_cuda()}" for name in bare]


def _cuda() -> int:
    """The major version of CUDA: that of CuPy's wheel, else the driver's, else the latest."""
    installed = next((major for major in (12, 13) if _version(f"cupy-cuda{major}x")), 0)
    return installed or min(max(_driver_cuda() or 13, 12), 13)


def _driver_cuda() -> int:
    """The major version of CUDA that the driver is for; 0 where it is not known."""
    driver, version = _driver(), ctypes.c_int()
    return 0 if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)) else version.value // 1000


def _without_bfloat16() -> str:
    """What to say of a first GPU that can't compute in bfloat16, as every section does; else ""."""
    driver, found = _driver(), (ctypes.c_int(), ctypes.c_int())
    asked = zip(found, _COMPUTE_CAPABILITY, strict=True)
    if driver is None or any(
        driver.cuDeviceGetAttribute(ctypes.byref(value), key, 0) for value, key in asked
    ):
        return ""
    major, minor = (value.value for value in found)
    message = (
        f"the GPU has compute capability {major}.{minor}, and bfloat16 needs 8.0: all sections are skipped"
    )
    return message if major < 8 else ""


def _old_driver() -> list[str]:
    if not 0 < _driver_cuda() < _cuda():
        return []
    instead = _pip(f"cupy-cuda{_driver_cuda()}x")
    return [f"the driver is for CUDA {_driver_cuda()}, CuPy for CUDA {_cuda()}: nothing can run ({instead})"]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _bus() -> str:
    """Where the first GPU that this process may use is, as nvidia-smi wants it, whose numbers are its own."""
    driver, text = _driver(), ctypes.create_string_buffer(32)
    known = driver is not None and not driver.cuDeviceGetPCIBusId(text, len(text), 0)
    return text.value.decode() if known else "0"


@cache
def _driver() -> ctypes.CDLL | None:
    """The driver, ready; it heeds CUDA_VISIBLE_DEVICES as it was at the first call."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver
