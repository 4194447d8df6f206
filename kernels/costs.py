"""What calls of kernels cost: ON_GPU.linear.forward(x, weight, bias, y) is the Cost of that call.

Nothing is computed. Shapes, types and strides alone are looked at: no element need exist, and neither CuPy
nor a GPU. What a kernel reads, writes and computes is declared at the CPU's (cost.py), or at the GPU's where
that does something else. Launches and scratch memory are those of the GPU's, whose host code runs for a
backend that counts (cuda/_counted.py). Constants, and answers about numbers alone, are the device's own.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

from shardrt.kernels import cpu, cuda, determinism
from shardrt.kernels.cost import NOTHING, Cost, Declaration
from shardrt.kernels.cuda._counted import Layout, count
from shardrt.kernels.cuda._launch import NotOnGPU

__all__ = ["ON_CPU", "ON_GPU"]


class Costs:
    """The kernels of a package, as modules of functions that give a Cost."""

    def __init__(self, package: ModuleType) -> None:
        self._package = package

    def __getattr__(self, name: str) -> "_Module":
        if name.startswith("_"):
            raise AttributeError(name)
        found = self.__dict__[name] = _Module(getattr(self._package, name), name)
        return found


class _Module:
    def __init__(self, module: ModuleType, name: str) -> None:
        self._module, self._twins = module, [getattr(package, name, module) for package in (cpu, cuda)]

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._module, name)
        if not callable(own):
            return own
        on_cpu, on_gpu = (getattr(twin, name, None) for twin in self._twins)
        declared = getattr(own, "cost", None) or getattr(on_cpu, "cost", None)
        found = (
            partial(_question, own) if declared is None else partial(_cost, declared, on_gpu, own is on_cpu)
        )
        self.__dict__[name] = found
        return found


ON_CPU, ON_GPU = Costs(cpu), Costs(cuda)


def _cost(declared: Declaration, twin: Callable, for_cpu: bool, *args: Any, **kwargs: Any) -> Cost:
    given = declared.arguments(args, kwargs)
    layouts = tuple([(name, _layout(value)) for name, value in given.items()])
    try:
        counted = _counted(twin, layouts, determinism.are_deterministic_algorithms_enabled())
    except NotOnGPU:
        if not for_cpu:
            raise
        counted = 1, 0, None
    launches, scratch, answer = counted
    if answer is False:  # there is no such kernel
        return NOTHING._replace(value=False)
    found = declared.cost(given, launches, scratch)
    return found if answer is not True or found.value is not None else found._replace(value=True)


def _question(function: Callable, *args: Any, **kwargs: Any) -> Any:
    if any(hasattr(value, "shape") for value in (*args, *kwargs.values())):
        raise TypeError(f"{function.__module__}.{function.__name__} declares no cost; see kernels/cost.py")
    return function(*args, **kwargs)


@lru_cache(1 << 12)
def _counted(twin: Callable, given: tuple, deterministic: bool) -> tuple[int, int, Any]:
    """What the CUDA twin does in a call with such arguments; models repeat theirs."""
    return count(twin, dict(given))


def _layout(value: Any) -> Any:
    """An argument without its elements."""
    if isinstance(value, list | tuple):
        return tuple([_layout(each) for each in value])
    return Layout(value.shape, value.strides, value.dtype) if hasattr(value, "strides") else value
