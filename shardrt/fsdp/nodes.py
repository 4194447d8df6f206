"""Unshard and Exit: the only nodes of FSDP on the tape.

Unshard is FSDP as one op: shards in, whole parameters out, all-gather forward, reduce-scatter backward.
It has one node per unit per tape, made when the unit is entered first. All nodes that use the unit's
parameters are newer, so the tape runs its backward last, exactly when the unit's gradients are complete,
however often the unit was called and whether or not its inputs need a gradient.

Exit is the identity on what a unit's forward returns. Its node is newer than everything in the unit, so its
backward comes first: the moment to gather again. It also leads to Unshard by an edge that only carries order,
so a unit in which nothing was used still takes part in its reduction on every rank. A unit that this rank
skipped, while others may use it, has an Exit without outputs, to which the outermost Exit leads.
"""

from typing import TYPE_CHECKING, Any

from shardrt import autograd
from shardrt.autograd import WRITTEN, Edge, Function, Variable

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
        unit.to_come.add(self)

    def backward(self) -> tuple:
        self.unit.to_come.discard(self)
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
        """The same tensors with an Exit node behind them, if anything in them was recorded.

        passed: Exits of skipped units, which must run as well.
        """
        if not recorded(outputs):
            return outputs
        node = cls(unit)
        node.needs = tuple(output.requires_grad for output in outputs)
        edges = [output.edge() if output.requires_grad else None for output in outputs]
        node.edges = (*edges, Edge(unit.unshard_node(), 0, None), *(Edge(exit, 0, None) for exit in passed))
        node.enter_tape()
        return list(node.wrap(tuple(output.data for output in outputs), True))

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


def recorded(outputs: list[Variable]) -> bool:
    """Whether backward can come to one of these tensors."""
    return autograd.is_grad_enabled() and any(output.requires_grad for output in outputs)
