"""What code this rank runs: versions of the libraries that compute, and a digest of our own sources."""

import platform
import sys
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
    return found | {"code": code_digest(Path(__file__).parents[1])}


def own_version() -> str:
    """shardrt's."""
    return sys.modules["shardrt"].__version__  # the package is above this module, which must not import it


def code_digest(package: Path) -> str:
    """Of every source file of a package, kernels and models included, and of their names."""
    digest = blake2b(digest_size=8)
    for folder in (package, package / "kernels", package / "models"):
        paths = sorted(path for pattern in _SOURCES for path in folder.rglob(pattern))
        for path in paths:
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
