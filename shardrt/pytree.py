"""Pytrees: finds and replaces tensors in the arguments and results of forwards, in containers of any depth.

Containers are tuples, lists, dicts, their subclasses, and dataclasses.
"""

import copy
import operator
from collections import UserDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shardrt.autograd import Variable

Array = Any


@runtime_checkable
class _GPUArray(Protocol):
    """An array on a GPU, as CuPy's."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


ARRAYS: tuple[type, ...] = (np.ndarray, _GPUArray)  # for isinstance and `replaced`


def replaced(tree: Any, function: Callable[[Any], Any], kinds: type | tuple[type, ...] = Variable) -> Any:
    """The tree with function(tensor) in place of each tensor, in order. Other leaves stay.

    A container without changes is returned itself; otherwise a copy of its own type is returned.

    kinds: the types of leaves that `function` is applied to.
    """
    if isinstance(tree, kinds):
        return function(tree)
    if isinstance(tree, tuple):
        items = [replaced(item, function, kinds) for item in tree]
        if all(map(operator.is_, items, tree)):
            return tree
        return tree._make(items) if hasattr(tree, "_make") else type(tree)(items)  # named tuples have _make
    pairs = [(put, key, old, replaced(old, function, kinds)) for put, key, old in _held(tree)]
    changed = [(put, key, new) for put, key, old, new in pairs if new is not old]
    if changed:
        tree = copy.copy(tree)  # calls no __init__
    for put, key, new in changed:
        put(tree, key, new)
    return tree


def _held(tree: Any) -> list[tuple[Callable, Any, Any]]:
    """(setter, key, item) for each item of a container. A class may be both a dict and a dataclass."""
    held: list[tuple[Callable, Any, Any]] = []
    if isinstance(tree, list):
        held += [(operator.setitem, index, item) for index, item in enumerate(tree)]
    elif isinstance(tree, dict | UserDict):
        held += [(operator.setitem, key, item) for key, item in tree.items()]
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in fields(tree) if hasattr(tree, field.name)]
        held += [(object.__setattr__, name, getattr(tree, name)) for name in names]  # also if it is frozen
    return held


def tensors(tree: Any) -> list[Variable]:
    """The tensors in a tree, each once, in order."""
    found: dict[int, Variable] = {}
    replaced(tree, lambda tensor: found.setdefault(id(tensor), tensor))
    return list(found.values())


def exchanged(tree: Any, old: list[Variable], new: tuple) -> Any:
    """The tree with each tensor of `old` replaced by the tensor of `new` at the same index."""
    pairs = dict(zip(map(id, old), new, strict=True))
    return replaced(tree, lambda tensor: pairs.get(id(tensor), tensor))
