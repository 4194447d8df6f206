"""What `make gpu` finds on a machine, and what is left out for want of it. Uses the standard library only."""

import ctypes
import importlib.metadata
import importlib.util
import platform
import subprocess
from dataclasses import dataclass

BENCHMARKS = ("numpy", "cupy", "ml_dtypes", "cuda.pathfinder")
TESTS = (*BENCHMARKS, "pytest", "numba", "threadpoolctl")
WITHOUT = {
    "torch": "no figures of PyTorch beside ours, and no test against its bfloat16",
    "cudnn": "attention and convolution run in kernels of our own, which are several times slower",
    "matplotlib": "no picture",
    "safetensors": "the test that saves weights is skipped",
    "mpi4py": "the tests of NCCL and CUDA IPC between processes are skipped",
    "pytest_timeout": "a test that hangs is ended with all the others",
}
_PACKAGES = (
    "numpy",
    "cupy-cuda13x",
    "ml_dtypes",
    "numba",
    "torch",
    "triton",
    "mpi4py",
    "nvidia-cublas",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "nvidia-nccl-cu13",
)
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
    """What is missing of which list, and whether there is a GPU."""

    missing: tuple[str, ...]
    gpu: bool

    @property
    def benchmarks(self) -> bool:
        """Whether they can run."""
        return self.gpu and not set(BENCHMARKS) & set(self.missing)

    @property
    def tests(self) -> bool:
        """Whether they can run."""
        return self.gpu and not set(TESTS) & set(self.missing)

    def lines(self) -> list[str]:
        """For a reader: what is missing, and what that costs."""
        told = [] if self.gpu else ["no GPU: the driver, libcuda.so.1, is missing or sees none"]
        for name in self.missing:
            if name in BENCHMARKS:
                told.append(f"{name} is missing: neither tests nor benchmarks can run")
            elif name in TESTS:
                told.append(f"{name} is missing: the tests can't run")
            else:
                told.append(f"{name} is missing: {WITHOUT[name]}")
        return told


def find() -> Found:
    """Look around; imports nothing of what it looks for."""
    missing = [name for name in (*TESTS, *WITHOUT) if not _there(name)]
    return Found(tuple(missing), _gpus() > 0)


def machine() -> dict[str, str]:
    """Versions, and what nvidia-smi says of the first GPU; what can't be had is left out."""
    told = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            told[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return told | _asked(_QUERY.split(","))


def health() -> str:
    """Whether the first GPU is fit to be measured, in words: heat, clock, errors, who else uses it."""
    told = _asked(list(_HEALTH))
    return ", ".join(f"{told[key]} {name}" for key, name in _HEALTH.items() if key in told) or "not known"


def _asked(names: list[str]) -> dict[str, str]:
    """What nvidia-smi answers of the first GPU; nothing where it can't."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.strip().split(", ")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # its parent package is missing
        return False


def _gpus() -> int:
    """How many the driver sees, without CuPy."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
