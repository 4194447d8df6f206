"""Tensors in nests: what a forward takes and returns is a tensor, or containers of them, however deep.

Containers are tuples, lists, dicts, their subclasses, and dataclasses. What tensors mean it does not know.
Beside autograd, for all that acts around a forward.
"""

import copy
import operator
from collections import UserDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from shardrt.autograd import Variable

Array = Any


def replaced(nest: Any, function: Callable[[Any], Any], kinds: type | tuple[type, ...] = Variable) -> Any:
    """The same nest with `function` applied to its tensors, in order; whatever else is in it stays.

    kinds: the types of what it is applied to. A container in which nothing changes
    is given back itself; else a copy of it, of its own type.
    """
    if isinstance(nest, kinds):
        return function(nest)
    if isinstance(nest, tuple):
        items = [replaced(item, function, kinds) for item in nest]
        if all(map(operator.is_, items, nest)):
            return nest
        return nest._make(items) if hasattr(nest, "_make") else type(nest)(items)  # _make: of named tuples
    pairs = [(put, key, old, replaced(old, function, kinds)) for put, key, old in _held(nest)]
    changed = [(put, key, new) for put, key, old, new in pairs if new is not old]
    if changed:
        nest = copy.copy(nest)  # calls no __init__
    for put, key, new in changed:
        put(nest, key, new)
    return nest


def _held(nest: Any) -> list[tuple[Callable, Any, Any]]:
    """(how to replace it, key, item) for what a container holds. A class may be a dict and a dataclass."""
    held: list[tuple[Callable, Any, Any]] = []
    if isinstance(nest, list):
        held += [(operator.setitem, index, item) for index, item in enumerate(nest)]
    elif isinstance(nest, dict | UserDict):
        held += [(operator.setitem, key, item) for key, item in nest.items()]
    if is_dataclass(nest) and not isinstance(nest, type):
        names = [field.name for field in fields(nest) if hasattr(nest, field.name)]
        held += [(object.__setattr__, name, getattr(nest, name)) for name in names]  # frozen ones as well
    return held


def tensors(nest: Any) -> list[Variable]:
    """The tensors in a nest, each once, in order."""
    found: dict[int, Variable] = {}
    replaced(nest, lambda tensor: found.setdefault(id(tensor), tensor))
    return list(found.values())


def returned(output: Any, call: str, module: str) -> list[Variable]:
    """The tensors in what the forward of `module` returned. Raises TypeError, for `call`, without any."""
    found = tensors(output)
    if not found:
        raise TypeError(
            f"{call}: forward of {module} returned {type(output).__name__}, in which no tensor is found; "
            "return tensors, tuples, lists, dicts or dataclasses"
        )
    return found


def exchanged(nest: Any, old: list[Variable], new: tuple) -> Any:
    """The same nest with each of the tensors `old` in it replaced by the one of `new` at its position."""
    pairs = dict(zip(map(id, old), new, strict=True))
    return replaced(nest, lambda tensor: pairs.get(id(tensor), tensor))


def hollow(tensor: Variable) -> Variable:
    """A tensor at the same place in the graph, without its array, which may then be freed."""
    stand_in = Variable(None, tensor.requires_grad)
    stand_in.node, stand_in.index = tensor.node, tensor.index
    return stand_in


def filled(stand_in: Variable, array: Array) -> Variable:
    """The tensor for which `hollow` made the stand-in, around `array`."""
    tensor = Variable.result_type(array, stand_in.requires_grad)
    tensor.node, tensor.index = stand_in.node, stand_in.index
    return tensor
