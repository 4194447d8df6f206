"""Unshard, Regather and Exit: the only nodes of FSDP on the tape.

Unshard is FSDP as one op: shards in, whole parameters out, all-gather forward, reduce-scatter backward. A
forward of the outermost unit has one node for each unit, made when the unit is entered first. All nodes that
use the unit's parameters are newer, so the tape runs its backward last, exactly when the unit's gradients are
complete, however often the unit was called and whether or not its inputs need a gradient.

Regather is newer than everything in one call of a unit: in backward the moment to gather again. It leads to
Unshard by an edge that only carries order, so a unit that was gathered is reduced. Exit is the identity on
those outputs of the call to which backward can come, and leads to Regather. The Exit of the outermost unit
leads to every Regather of its forward: ranks whose losses use different units do the same for all of them. So
does a unit that this rank skipped while others may use it: it has a Regather alone.
"""

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from shardrt import autograd
from shardrt.autograd import WRITTEN, Edge, Function, Variable
from shardrt.fsdp.unit import Unit
from shardrt.nn.parameter import Parameter

Array = Any


class Tape:
    """One forward of the outermost unit, and its backward: the Unshard node of each unit in it.

    Several may be in flight: two forwards, and then the backward of both. Each gathers and reduces for
    itself, so that the memory for it does not grow with their number.

    before: called with a unit and the tape when backward comes to a call of it; after: with a unit, when all
    that uses its parameters has run; complete: with a unit, when its gradients are, which may be later.
    """

    def __init__(
        self,
        before: Callable[[Unit, "Tape"], None],
        after: Callable[[Unit], None],
        complete: Callable[[Unit], None],
    ) -> None:
        self.before = before
        self.after = after
        self.complete = complete
        self._nodes: WeakValueDictionary[Unit, Unshard] = WeakValueDictionary()

    def unshard(self, unit: Unit) -> "Unshard":
        """The unit's one node, made at the first call."""
        node = self._nodes.get(unit)
        if node is None:
            node = self._nodes[unit] = Unshard(unit, self)
        return node

    def forget(self, unit: Unit) -> None:
        """The backward of its node has run."""
        self._nodes.pop(unit, None)


class Unshard(Function):
    """Gathered parameters of a unit; backward hands the full gradients to the reduction.

    run: the backward that has come to it.
    """

    __slots__ = ("unit", "tape", "run")

    def __init__(self, unit: Unit, tape: Tape) -> None:
        self.unit = unit
        self.tape = tape
        self.run: autograd.Backward | None = None
        self.saved = self.edges = self.needs = ()
        self.outputs = 0
        self.enter_tape()
        unit.pending.add(self)

    def backward(self) -> tuple:
        self.run = autograd.running().outermost
        self.tape.forget(self.unit)
        self.tape.after(self.unit)
        return autograd.later(self._complete)

    def _complete(self) -> tuple:
        self.unit.pending.discard(self)
        self.run = None
        self.tape.complete(self.unit)
        return ()


class Regather(Function):
    """The end of one call of a unit; backward makes the parameters ready again.

    skipped: its place in the plan, if this rank has not called it.
    """

    __slots__ = ("unit", "tape", "skipped")

    def __init__(self, unit: Unit, tape: Tape, skipped: int | None = None) -> None:
        self.unit = unit
        self.tape = tape
        self.skipped = skipped
        self.saved = self.needs = ()
        self.outputs = 0
        self.edges = (Edge(tape.unshard(unit), 0, None),)
        self.enter_tape()

    def backward(self) -> tuple:
        self.tape.before(self.unit, self.tape)
        return (WRITTEN,)


class Exit(Function):
    """The outputs of one call of a unit, unchanged."""

    __slots__ = ()
    strided = True

    def backward(self, *dy: Array) -> tuple:
        return (*dy, *[WRITTEN] * (len(self.edges) - len(dy)))


def mark(unit: Unit, outputs: list[Variable], then: Iterable[Function]) -> list[Variable]:
    """The same tensors; behind those that were recorded there is an Exit node.

    then: nodes without outputs that backward must come to as well.
    """
    behind = recorded(unit, outputs)
    if not behind:
        return [_own(unit, output) for output in outputs]
    # The Exit is newer than `then`, and they than all ops inside: backward comes to it first, to them next.
    node = Exit()
    node.saved = ()
    node.needs = (True,) * len(behind)
    node.edges = (*(output.edge() for output in behind), *(Edge(other, 0, None) for other in then))
    node.enter_tape()
    marked = node.wrap(tuple(_own(unit, output).data for output in behind), True)
    by_id = dict(zip(map(id, behind), marked, strict=True))
    return [by_id[id(output)] if id(output) in by_id else _own(unit, output) for output in outputs]


def recorded(unit: Unit, outputs: list[Variable]) -> list[Variable]:
    """The outputs of a forward of `unit` to which backward can come. Parameters of others are no outputs."""
    if not autograd.is_grad_enabled():
        return []
    return [output for output in outputs if output.requires_grad and not _of_others(unit, output)]


def _of_others(unit: Unit, output: Variable) -> bool:
    """Whether it is a parameter that another unit has, or none."""
    return isinstance(output, Parameter) and output.storage not in unit.groups


def _own(unit: Unit, output: Variable) -> Variable:
    """As own_array, of a tensor."""
    if _of_others(unit, output):
        return output
    data = output.data
    array = own_array(unit, data)
    return output if array is data else output.result_type(array)


def own_array(unit: Unit, array: Array) -> Array:
    """`array` itself, or a copy where its memory is a slot of `unit`, which goes to others after forward."""
    slots = (group.slot.array for group in unit.groups if group.slot is not None)
    return array.copy() if any(np.may_share_memory(array, slot) for slot in slots) else array
