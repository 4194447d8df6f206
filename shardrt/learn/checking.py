"""What checks of answers share: hints, reading an answer's names, comparing arrays."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm import init_device_mesh, thread

__all__ = ["Hint", "compile_sums", "constant", "equal", "function", "number"]


class Hint(Exception):
    """The answer is not right yet; the message helps to find out why."""


def function(answer: ModuleType, name: str) -> Callable[..., Any]:
    """The function that an answer must define."""
    found = getattr(answer, name, None)
    if not callable(found):
        raise Hint(f"The file defines no function {name}. Keep the names of the starting file.")
    return found


def constant(answer: ModuleType, name: str) -> Any:
    """The value that an answer must assign."""
    if not hasattr(answer, name):
        raise Hint(f"The file assigns no {name}. Keep the names of the starting file.")
    return getattr(answer, name)


def number(value: Any, call: str) -> float:
    """The value of a call, which must be a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not np.isfinite(value):
        raise Hint(f"{call} must return a finite number. It returned {_short(value)}.")
    return float(value)


def equal(value: Any, expected: np.ndarray, call: str, tolerance: float = 1e-5) -> bool:
    """Whether an array has the expected values. Raises Hint for no array, and for another shape."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
        raise Hint(f"{call} must return a NumPy array of numbers. It returned {_short(value)}.")
    if value.shape != expected.shape:
        raise Hint(f"{call} must return shape {expected.shape}. It returned shape {value.shape}.")
    scale = max(float(np.abs(expected).max(initial=0)), 1e-30)
    return bool(np.all(np.abs(value - expected) <= tolerance * scale))  # False for nan


def compile_sums() -> None:
    """Compile the kernels of sums over ranks, where they are not on disk yet."""

    def on_rank() -> None:
        communicator, stream = (
            init_device_mesh("cpu").communicator("control"),
            device.current().current_stream,
        )
        for dtype in (np.float32, np.float64):
            communicator.all_reduce(np.zeros(4, dtype), stream=stream)
            communicator.reduce_scatter(np.zeros(2, dtype), np.zeros(4, dtype), stream=stream)

    thread.run(2, on_rank)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
