"""What checks of answers share: hints, reading an answer's names, comparing values."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm import CollectiveCounter, init_device_mesh, thread
from shardrt.fsdp import fully_shard
from shardrt.nn import Module

__all__ = [
    "Hint",
    "compile_sums",
    "counted_mesh",
    "equal",
    "function",
    "need",
    "number",
    "shard",
    "start",
    "started",
]


class Hint(Exception):
    """The answer is not right yet; the message helps to find out why."""


def start(name: str) -> str:
    """The file to start the exercise of a module from. Its docstring is the text of the exercise."""
    return (Path(__file__).parent / "start" / f"{name}.py").read_text(encoding="utf-8")


def started(name: str) -> dict[str, Any]:
    """What the file to start from defines."""
    names: dict[str, Any] = {"__name__": "exercise"}
    exec(compile(start(name), f"{name}.py", "exec"), names)
    return names


def need(condition: Any, hint: str) -> None:
    """Raise Hint unless the condition is true."""
    if not condition:
        raise Hint(hint)


def function(answer: ModuleType, name: str) -> Callable[..., Any]:
    """The function that an answer must define."""
    found = getattr(answer, name, None)
    need(callable(found), f"The file defines no function {name}. Keep the names of the starting file.")
    return found


def number(value: Any, call: str) -> float:
    """The value of a call, which must be a finite number."""
    fits = isinstance(value, int | float | np.number) and np.isfinite(value)
    need(fits, f"{call} must return a finite number. It returned {value!r:.60}.")
    return float(value)


def equal(value: Any, expected: np.ndarray, call: str, tolerance: float = 1e-5) -> bool:
    """Whether an array has the expected values. Raises Hint for no array, and for another shape."""
    fits = isinstance(value, np.ndarray) and value.dtype.kind in "fiu"
    need(fits, f"{call} must return a NumPy array of numbers. It returned {value!r:.60}.")
    same = value.shape == expected.shape
    need(same, f"{call} must return shape {expected.shape}. It returned shape {value.shape}.")
    scale = max(float(np.abs(expected).max(initial=0)), 1e-30)
    return bool(np.all(np.abs(value - expected) <= tolerance * scale))  # False for nan


def counted_mesh() -> tuple[Any, Callable[[str], int]]:
    """A mesh of all ranks, and a function: how many bytes this rank has received in calls of a name."""
    counters: list[CollectiveCounter] = []

    def wrap(communicator: Any) -> CollectiveCounter:
        counters.append(CollectiveCounter(communicator))
        return counters[-1]

    mesh = init_device_mesh("cpu", wrap=wrap)
    return mesh, lambda name: sum(counter.bytes[name] for counter in counters)


def shard(model: Module, layers: Any, mesh: Any, **settings: Any) -> Module:
    """Make each of the layers a unit, and the whole model."""
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, **settings)
    return model


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
