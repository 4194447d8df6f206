"""16-bit floats as bits and as rounded float32, as on the CPU; nan stays nan, but not its bits."""

import ml_dtypes
import numpy as np

from shardrt.kernels.cuda._launch import Array, blocks_for, launch, vectors


def round_to(x: Array, out: Array, kind: str) -> None:
    """Round x to the values of `kind` ("bfloat16" or "float16") into out; float32, 1-D. `out` may be x."""
    _run("round_to", x, out, kind, 4)


def pack(x: Array, out: Array, kind: str) -> None:
    """Compute out (uint16) = the bits of x (float32) rounded to `kind` ("bfloat16" or "float16"); 1-D."""
    _run("pack", x, out, kind, 8)


def unpack(x: Array, out: Array, kind: str) -> None:
    """Compute out (float32) = the numbers whose bits in `kind` are x (uint16), exactly; 1-D."""
    _run("unpack", x, out, kind, 8)


def check_kind(kind: str) -> None:
    """Raise ValueError for a type that is not one of the two."""
    if kind not in ("bfloat16", "float16"):
        raise ValueError(f"cast: kind must be 'bfloat16' or 'float16', got {kind!r}")


def type_of(kind: str) -> np.dtype:
    """The element type that `kind` names. Raises ValueError as check_kind."""
    check_kind(kind)
    return np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else np.float16)


def _run(function: str, x: Array, out: Array, kind: str, per_thread: int) -> None:
    args = (x, out, x.size, vectors(x, out))
    launch("cast", function, type_of(kind), blocks_for(x.size, per_thread), args)
