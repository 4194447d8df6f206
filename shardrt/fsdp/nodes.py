"""Unshard and Exit: the only nodes of FSDP on the tape.

Unshard is FSDP as one op: shards in, whole parameters out, all-gather forward, reduce-scatter backward.
It has one node per unit per tape, made when the unit is entered first. All nodes that use the unit's
parameters are newer, so the tape runs its backward last, exactly when the unit's gradients are complete,
however often the unit was called and whether or not its inputs need a gradient.

Exit is the identity on those outputs of a unit's forward to which backward can come. Its node is newer than
everything in the unit, so its backward comes first: the moment to gather again. It also leads to Unshard by
an edge that only carries order, so a unit in which nothing was used still takes part in its reduction on
every rank. A unit that this rank skipped, while others may use it, has an Exit without outputs, to which the
outermost Exit leads.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from shardrt import autograd
from shardrt.autograd import WRITTEN, Edge, Function, Variable
from shardrt.nn.parameter import Parameter

if TYPE_CHECKING:
    from shardrt.fsdp.unit import Unit

Array = Any


class Unshard(Function):
    """Gathered parameters of a unit; backward hands the full gradients to the reduction."""

    __slots__ = ("unit",)

    def __init__(self, unit: "Unit") -> None:
        self.unit = unit
        self.saved = self.edges = self.needs = ()
        self.outputs = 0
        self.enter_tape()

    def backward(self) -> tuple:
        self.unit.schedule.after_backward(self.unit)
        return ()


class Exit(Function):
    """The outputs of one call of a unit, unchanged; backward makes the parameters ready again."""

    __slots__ = ("unit",)
    strided = True

    def __init__(self, unit: "Unit") -> None:
        self.unit = unit
        self.saved = ()

    @classmethod
    def mark(cls, unit: "Unit", outputs: list[Variable], passed: "list[Exit]") -> list[Variable]:
        """The same tensors; behind those that were recorded there is an Exit node.

        passed: Exits of skipped units, which must run as well.
        """
        behind = recorded(unit, outputs)
        if not behind:
            return [_own(unit, output) for output in outputs]
        node = cls(unit)
        node.needs = (True,) * len(behind)
        edges = [output.edge() for output in behind]
        node.edges = (*edges, Edge(unit.unshard_node(), 0, None), *(Edge(exit, 0, None) for exit in passed))
        node.enter_tape()
        marked = node.wrap(tuple(_own(unit, output).data for output in behind), True)
        by_id = dict(zip(map(id, behind), marked, strict=True))
        return [by_id[id(output)] if id(output) in by_id else _own(unit, output) for output in outputs]

    @classmethod
    def passing(cls, unit: "Unit") -> "Exit":
        """For a unit that was not called: gathered and reduced in backward like on ranks that called it."""
        node = cls(unit)
        node.needs = ()
        node.outputs = 0
        node.edges = (Edge(unit.unshard_node(), 0, None),)
        node.enter_tape()
        return node

    def backward(self, *dy: Array) -> tuple:
        self.unit.schedule.before_backward(self.unit)
        return (*dy, *[WRITTEN] * (len(self.edges) - len(dy)))


def recorded(unit: "Unit", outputs: list[Variable]) -> list[Variable]:
    """The outputs of a forward of `unit` to which backward can come. Parameters of others are no outputs."""
    if not autograd.is_grad_enabled():
        return []
    return [output for output in outputs if output.requires_grad and not _of_others(unit, output)]


def _of_others(unit: "Unit", output: Variable) -> bool:
    """Whether it is a parameter that another unit has, or none."""
    return isinstance(output, Parameter) and output.storage not in unit.groups


def _own(unit: "Unit", output: Variable) -> Variable:
    """As own_array, of a tensor."""
    if _of_others(unit, output):
        return output
    data = output.data
    array = own_array(unit, data)
    return output if array is data else output.result_type(array)


def own_array(unit: "Unit", array: Array) -> Array:
    """`array` itself, or a copy where its memory is a slot of `unit`, which goes to others after forward."""
    slots = (group.slot.array for group in unit.groups if group.slot is not None)
    return array.copy() if any(np.may_share_memory(array, slot) for slot in slots) else array
