"""The facts of a machine for training: versions, cores, memory, limits, rights; and whether ranks connect."""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardrt._kernel_cache import wanted
from shardrt.device import cuda
from shardrt.tools.hosts import launcher

_PACKAGE = Path(__file__).parents[1]

_NEEDED = ("numpy", "numba", "llvmlite", "mpi4py", "safetensors", "xxhash", "threadpoolctl")
_FOR_GPUS = ("cupy-cuda13x", "cupy-cuda12x", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend")
_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "address space": resource.RLIMIT_AS,
    "file size": resource.RLIMIT_FSIZE,
}
_PATIENCE = 60  # seconds for a process to answer
_MPI = """
import json
from mpi4py import MPI
levels = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled"}
levels |= {MPI.THREAD_SERIALIZED: "serialized", MPI.THREAD_MULTIPLE: "multiple"}
vendor, number = MPI.get_vendor()
print(json.dumps({"vendor": f"{vendor} {'.'.join(map(str, number))}", "threads": levels[MPI.Query_thread()]}))
"""
_CUDA = """
import json, warnings
warnings.simplefilter("ignore")
from cupy.cuda import nccl, runtime
def version(number): return f"{number // 1000}.{number % 1000 // 10}" if number else "missing"
found = {"runtime": version(runtime.runtimeGetVersion()), "driver": version(runtime.driverGetVersion())}
number = nccl.get_version() if nccl.available else 0
found["NCCL"] = f"{number // 10000}.{number % 10000 // 100}.{number % 100}" if number else "missing"
try:
    import cudnn
    found["cuDNN"] = cudnn.backend_version_string()
except Exception:
    found["cuDNN"] = "missing"
print(json.dumps(found))
"""
_SELF_TEST = """
import numpy as np
from shardrt.comm import init_device_mesh
mesh = init_device_mesh("cpu")
for kind in ("gather", "control"):
    numbers = np.full(1 << 16, mesh.rank + 1.0)
    mesh.communicator(kind).all_reduce(numbers, stream=mesh.device.current_stream)
    assert (numbers == 3).all(), numbers
"""


def examine() -> dict[str, Any]:
    """All facts, in JSON types; `code` is the exit code of the command, `lacking` says why it is not 0."""
    packages = {name: _version(name) for name in _NEEDED}
    mpi = _asked([sys.executable, "-c", _MPI])
    for_gpus = {name: _version(name) for name in _FOR_GPUS if _version(name)}
    loaded = _asked([sys.executable, "-c", _CUDA]) if any("cupy" in name for name in for_gpus) else {}
    found: dict[str, Any] = {
        "shardrt": _version("shardrt"),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": packages,
        "for GPUs": for_gpus,
        "CUDA": loaded if isinstance(loaded, dict) else {"error": loaded},
        "gpus": cuda.count(),
        "mpi": mpi if isinstance(mpi, dict) else {"error": mpi},
        "cores": len(os.sched_getaffinity(0)),
        "memory": _memory(),
        "shared memory": _space("/dev/shm"),
        "limits": {name: _limit(which) for name, which in _LIMITS.items()},
        "kernel cache": kernel_cache(_PACKAGE / "kernels" / "cpu"),
        "two ranks": _self_test(),
    }
    lacking = [f"{name} is missing" for name, found_version in packages.items() if not found_version]
    if "error" in found["mpi"]:
        lacking.append(f"MPI: {found['mpi']['error']}")
    elif found["mpi"]["threads"] != "multiple":
        lacking.append(f"MPI gives threads {found['mpi']['threads']}, streams need multiple")
    if found["shared memory"].get("free", 0) < 1 << 26:
        lacking.append("/dev/shm has less than 64 MB free: ranks of a node can't share memory")
    lacking += found["kernel cache"]["lacking"]
    if found["two ranks"] != "well":
        lacking.append(f"two ranks: {found['two ranks']}")
    return found | {"lacking": lacking, "code": int(bool(lacking))}


def lines(found: dict[str, Any]) -> list[str]:
    """The same facts as lines of text."""
    memory, shm, mpi = found["memory"], found["shared memory"], found["mpi"]
    rows = [
        ("shardrt", f"{found['shardrt']}, Python {found['python']}, {found['system']}"),
        ("packages", _listed(found["packages"])),
        ("for GPUs", f"{found['gpus']} GPUs; {_listed(found['for GPUs']) or 'no packages'}"),
        ("CUDA", _listed(found["CUDA"]) or "no CuPy"),
        ("MPI", mpi.get("error") or f"{mpi['vendor']}, threads {mpi['threads']}"),
        ("cores", str(found["cores"])),
        ("memory", _sizes(memory)),
        ("/dev/shm", _sizes(shm)),
        ("limits", _listed({name: _size(value) for name, value in found["limits"].items()})),
        ("kernel cache", found["kernel cache"]["folder"]),
        ("two ranks", found["two ranks"]),
    ]
    width = max(len(name) for name, _ in rows)
    folded = [line for name, text in rows for line in _folded(f"{name:{width}}", text)]
    return folded + [line for what in found["lacking"] for line in _folded("lacking:", what)]


def _folded(name: str, text: str) -> list[str]:
    """`text` next to its name, in lines of at most 80 columns; a path is not broken."""
    lines = textwrap.wrap(text, 78 - len(name), break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{name if i == 0 else ' ' * len(name)}  {line}" for i, line in enumerate(lines)]


def kernel_cache(sources: Path) -> dict[str, Any]:
    """Where Numba keeps compiled kernels, and what is wrong with that folder."""
    folder, wrong = wanted(sources)
    there = folder if folder.exists() else folder.parent
    lacking = []
    if wrong:
        lacking.append(f"{wrong}, who could put code there: kernels are kept elsewhere")
    elif not os.access(there, os.W_OK):
        lacking.append(f"{there} can't be written: kernels are compiled again in every run")
    return {"folder": str(folder), "lacking": lacking}


def _self_test() -> str:
    """The word "well", or the error when two ranks summed some numbers."""
    mpirun = launcher()
    if not mpirun:
        return "no mpirun: pip install mpich"
    answer = _asked([*mpirun, "-n", "2", sys.executable, "-c", _SELF_TEST])
    return answer if isinstance(answer, str) and answer else "well"


def _asked(command: list[str]) -> Any:
    """The JSON that a process prints, None for no output; the last line of its errors if it fails."""
    # Open MPI refuses root, and more ranks than cores, unless these variables permit them.
    variables = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    variables["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:oversubscribe"
    paths = [str(_PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        complaint = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()
        return (complaint or [f"exit code {done.returncode}"])[-1]
    return json.loads(done.stdout) if done.stdout.strip() else None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _memory() -> dict[str, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        "free": os.sysconf("SC_AVPHYS_PAGES") * page,
        "all": os.sysconf("SC_PHYS_PAGES") * page,
    }


def _space(folder: str) -> dict[str, int]:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {}
    return {"free": usage.free, "all": usage.total}


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _listed(table: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value or 'missing'}" for name, value in table.items())


def _sizes(table: dict[str, int]) -> str:
    return f"{_size(table['free'])} free of {_size(table['all'])}" if table else "missing"


def _size(count: int | None) -> str:
    if count is None:
        return "without limit"
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count}"
