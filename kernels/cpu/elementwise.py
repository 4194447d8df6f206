"""The few elementwise passes that the runtime itself makes, on flat arrays."""

from typing import Any

import numpy as np

Array = Any


def add(first: Array, second: Array, out: Array) -> None:
    """out = first + second."""
    np.add(first, second, out=out)


def scale_(x: Array, factor: float) -> None:
    """x *= factor."""
    np.multiply(x, x.dtype.type(factor), out=x)


def bytes_moved(count: int, itemsize: int = 4) -> int:
    """Bytes of add."""
    return 3 * count * itemsize


def flops(count: int) -> int:
    """Operations of either."""
    return count
