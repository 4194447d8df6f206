"""Tensors in pytrees: what a forward takes and returns is a tensor, or containers of them, however deep.

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


def replaced(tree: Any, function: Callable[[Any], Any], kinds: type | tuple[type, ...] = Variable) -> Any:
    """The same tree with `function` applied to its tensors, in order; whatever else is in it stays.

    kinds: the types of what it is applied to. A container in which nothing changes
    is given back itself; else a copy of it, of its own type.
    """
    if isinstance(tree, kinds):
        return function(tree)
    if isinstance(tree, tuple):
        items = [replaced(item, function, kinds) for item in tree]
        if all(map(operator.is_, items, tree)):
            return tree
        return tree._make(items) if hasattr(tree, "_make") else type(tree)(items)  # _make: of named tuples
    pairs = [(put, key, old, replaced(old, function, kinds)) for put, key, old in _held(tree)]
    changed = [(put, key, new) for put, key, old, new in pairs if new is not old]
    if changed:
        tree = copy.copy(tree)  # calls no __init__
    for put, key, new in changed:
        put(tree, key, new)
    return tree


def _held(tree: Any) -> list[tuple[Callable, Any, Any]]:
    """(how to replace it, key, item) for what a container holds. A class may be a dict and a dataclass."""
    held: list[tuple[Callable, Any, Any]] = []
    if isinstance(tree, list):
        held += [(operator.setitem, index, item) for index, item in enumerate(tree)]
    elif isinstance(tree, dict | UserDict):
        held += [(operator.setitem, key, item) for key, item in tree.items()]
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in fields(tree) if hasattr(tree, field.name)]
        held += [(object.__setattr__, name, getattr(tree, name)) for name in names]  # frozen ones as well
    return held


def tensors(tree: Any) -> list[Variable]:
    """The tensors in a tree, each once, in order."""
    found: dict[int, Variable] = {}
    replaced(tree, lambda tensor: found.setdefault(id(tensor), tensor))
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


def exchanged(tree: Any, old: list[Variable], new: tuple) -> Any:
    """The same tree with each of the tensors `old` in it replaced by the one of `new` at its position."""
    pairs = dict(zip(map(id, old), new, strict=True))
    return replaced(tree, lambda tensor: pairs.get(id(tensor), tensor))


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
