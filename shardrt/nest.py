"""Tensors in nests: what a forward takes and returns is a tensor, or tuples, lists and dicts of them.

Knows the containers, not what the tensors mean. Beside autograd, for all that acts around a forward.
"""

from collections.abc import Callable
from typing import Any

from shardrt.autograd import Variable

Array = Any


def replaced(nest: Any, function: Callable[[Variable], Any]) -> Any:
    """The same nest with `function` applied to its tensors, in order; whatever else is in it stays."""
    if isinstance(nest, Variable):
        return function(nest)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(replaced(item, function) for item in nest))
    if isinstance(nest, tuple | list):
        return type(nest)(replaced(item, function) for item in nest)
    if isinstance(nest, dict):
        return {key: replaced(item, function) for key, item in nest.items()}
    return nest


def tensors(nest: Any) -> list[Variable]:
    """The tensors in a nest, each once, in order."""
    found: dict[int, Variable] = {}
    replaced(nest, lambda tensor: found.setdefault(id(tensor), tensor))
    return list(found.values())


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
