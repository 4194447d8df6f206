"""Element types by name: the types in which a parameter is stored, moved and computed.

NumPy has no bfloat16, so on a device without arithmetic in 16 bits these types are carried as the bits of a
uint16, and a name says which they are. Elsewhere bfloat16 is a dtype from another package (ml_dtypes), which
NumPy counts among neither floats nor numbers.
"""

from functools import cache
from typing import Any

import numpy as np

__all__ = [
    "CARRIED",
    "CODES",
    "LOW",
    "bfloat16",
    "casts",
    "exact",
    "float32",
    "float64",
    "floating",
    "low",
    "name_of",
    "named",
    "storage",
]

float32, float64, bfloat16, float16 = "float32", "float64", "bfloat16", "float16"
LOW = (bfloat16, float16)
CARRIED = ("float32", "float64", "int32", "int64", "uint8", "uint16")  # types that communicators carry
CODES = {np.dtype(name): code for code, name in enumerate(CARRIED)}


@cache
def name_of(dtype: np.dtype) -> str:
    """`dtype.name`, which NumPy makes again each time, in as long as an op takes to be launched."""
    return dtype.name


def storage(name: str) -> np.dtype:
    """The NumPy dtype that holds elements of type `name`: uint16 for the 16-bit types."""
    return np.dtype(np.uint16) if name in LOW else np.dtype(name)


@cache
def floating(dtype: np.dtype) -> bool:
    """Whether elements of `dtype` are floating-point numbers, bfloat16 included."""
    return dtype.kind == "f" or name_of(dtype) == bfloat16


@cache
def low(dtype: np.dtype) -> bool:
    """Whether it is one of the 16-bit types."""
    return name_of(dtype) in LOW


def casts(name: str) -> bool:
    """Whether mixed precision casts elements of this type: not float64, and no integers."""
    return name in (float32, *LOW)


@cache
def exact(dtype: np.dtype) -> np.dtype:
    """The type of sums and statistics of elements of `dtype`: float32 for the 16-bit types."""
    return np.dtype(np.float32) if low(dtype) else dtype


def named(argument: str, dtype: Any) -> str:
    """The name of a type, given by name or as a NumPy dtype-like (np.float16, ml_dtypes.bfloat16).

    Raises ValueError, naming the argument, for a type that is not known.
    """
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in (float32, float64, *LOW):
        raise ValueError(
            f"{argument}: unknown dtype {name!r}; known: 'float32', 'float64', 'bfloat16', 'float16'"
        )
    return name
