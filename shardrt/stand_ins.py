"""Stand-ins: tensors without arrays, at their places in the graph; and the check that a forward gave tensors.

Recomputation and activation offload keep stand-ins of tensors whose arrays may be freed or travel.
"""

from typing import Any

from shardrt.autograd import Variable
from shardrt.pytree import tensors

Array = Any


def returned(output: Any, call: str, module: str) -> list[Variable]:
    """The tensors in the value that forward of `module` returned.

    Raises:
        TypeError: which names `call`, if there are none.
    """
    found = tensors(output)
    if not found:
        raise TypeError(
            f"{call}: forward of {module} returned {type(output).__name__}, in which no tensor is found; "
            "return tensors, or tuples, lists, dicts or dataclasses of them"
        )
    return found


def hollow(tensor: Variable) -> Variable:
    """A stand-in at the same place in the graph, without the array, which may then be freed."""
    stand_in = Variable(None, tensor.requires_grad)
    stand_in.node, stand_in.index = tensor.node, tensor.index
    return stand_in


def filled(stand_in: Variable, array: Array) -> Variable:
    """A tensor of `array` at the stand-in's place in the graph. Inverse of `hollow`."""
    tensor = Variable.result_type(array, stand_in.requires_grad)
    tensor.node, tensor.index = stand_in.node, stand_in.index
    return tensor
