"""The code that this rank runs, and where: versions, a digest of our own sources, the machine."""

import os
import platform
import socket
import sys
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardrt.comm.mesh import DeviceMesh

__all__ = ["versions"]

_PACKAGES = ("numpy", "numba", "mpi4py")
_SOURCES = ("*.py", "*.cu", "*.cuh")


def versions() -> dict[str, str]:
    """By name, for ranks to compare: those that run other code would give other numbers, or wait forever."""
    found = {"shardrt": own_version(), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found | {"code": _own_code()}


@cache  # loaded code does not change in this process
def _own_code() -> str:
    return code_digest(Path(__file__).parents[1])


def surroundings(mesh: DeviceMesh) -> dict[str, str]:
    """Where rank 0 runs, by name, for the log: system, host, processor, cores, MPI, device, communicators."""
    found = {
        "system": platform.platform(),
        "host": socket.gethostname(),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "device": mesh.device.name,
        "communicator": type(mesh.communicator("gather")).__name__,
    }
    if mesh.world.kind == "mpi":
        from mpi4py import MPI

        vendor, number = MPI.get_vendor()
        found["MPI"] = f"{vendor} {'.'.join(map(str, number))}"
    return found


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def own_version() -> str:
    """The version of shardrt."""
    return sys.modules["shardrt"].__version__  # the package is above this module, which must not import it


def code_digest(package: Path) -> str:
    """Of every source file of a package, kernels and models included, and of their names."""
    digest = blake2b(digest_size=8)
    for folder in (package, package / "kernels", package / "models"):
        paths = sorted(path for pattern in _SOURCES for path in folder.rglob(pattern))
        for path in paths:
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
