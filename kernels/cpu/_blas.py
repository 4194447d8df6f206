"""NumPy's OpenBLAS: its file, its symbols, its threads, and its gemm by ctypes."""

import ctypes
from functools import cache
from typing import Any

from threadpoolctl import threadpool_info


@cache
def described() -> str:
    """Name, version and kernels of the BLAS that computes here."""
    library, _, _ = _library()
    for found in threadpool_info():
        if library is not None and found["filepath"] == library._name:
            return f"{found['internal_api']} {found['version']} {found.get('architecture', '')}"
    return "NumPy's"


@cache
def _library() -> tuple[Any, str, str]:
    """(NumPy's OpenBLAS, prefix and suffix of its symbols), or (None, "", "")."""
    for found in threadpool_info():
        if found["internal_api"] != "openblas" or "numpy" not in found["filepath"]:
            continue
        library = ctypes.CDLL(found["filepath"])
        for prefix, suffix in (("scipy_", "64_"), ("", "64_")):  # with 64-bit integers
            if hasattr(library, f"{prefix}cblas_sgemm{suffix}"):
                return library, prefix, suffix
    return None, "", ""


@cache
def gemm_of(char: str) -> Any:
    """cblas_sgemm or cblas_dgemm for a NumPy type code; None where the library or the type is unknown."""
    library, prefix, suffix = _library()
    if library is None or char not in "fd":
        return None
    function = getattr(library, f"{prefix}cblas_{'s' if char == 'f' else 'd'}gemm{suffix}")
    real = ctypes.c_float if char == "f" else ctypes.c_double
    size, pointer, flag = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    function.argtypes = [flag] * 3 + [size] * 3 + [real, pointer, size, pointer, size, real, pointer, size]
    function.restype = None
    return function


def set_blas_threads(count: int) -> None:
    """Change the number of threads that BLAS uses, where the library is known."""
    library, prefix, suffix = _library()
    if library is not None:
        getattr(library, f"{prefix}openblas_set_num_threads{suffix}")(ctypes.c_int(count))
