"""PostBackward, PreBackward and Exit: the only nodes of FSDP on the tape.

PostBackward stands for the gathered parameters of a unit. A forward of the outermost unit makes one for each
unit, when the unit is first entered. All nodes that use the unit's parameters are newer. The tape runs newer
nodes first, so it runs PostBackward exactly when the unit's gradients are complete, and PostBackward starts
the reduction. This holds however often the unit was called, and whether or not its inputs need a gradient.

PreBackward is newer than every node of one call of a unit, so its backward runs first and gathers the unit
again. An edge without an array leads from it to PostBackward: each unit that backward gathers is reduced.

Exit returns the outputs of a call that require gradients, unchanged. It has an edge to PreBackward. The Exit
of the outermost unit has edges to every PreBackward of its forward: ranks whose losses use different units
then gather and reduce the same units. A unit that this rank skipped, but other ranks may use, has a
PreBackward and no Exit.
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
_ON_GPU = "__cuda_array_interface__"


class ForwardRecord:
    """The PostBackward nodes of one forward of the outermost unit, for its backward.

    Several forwards may precede a backward of all of them. Each has its own ForwardRecord. Backward gathers
    and reduces for each forward separately, so memory for that does not grow with the number of forwards.

    before: before(unit, record) is called when backward comes to a call of the unit.
    after: after(unit) is called when all nodes that use the unit's parameters have run.
    complete: complete(unit) is called when the unit's gradients are complete; a Deferral may delay the call.
    """

    def __init__(
        self,
        before: Callable[[Unit, "ForwardRecord"], None],
        after: Callable[[Unit], None],
        complete: Callable[[Unit], None],
    ) -> None:
        self.before = before
        self.after = after
        self.complete = complete
        self._nodes: WeakValueDictionary[Unit, PostBackward] = WeakValueDictionary()

    def post_backward(self, unit: Unit) -> "PostBackward":
        """The unit's PostBackward node, made at the first call."""
        node = self._nodes.get(unit)
        if node is None:
            node = self._nodes[unit] = PostBackward(unit, self)
        return node

    def forget(self, unit: Unit) -> None:
        """Drop the unit's node, whose backward has run."""
        self._nodes.pop(unit, None)


class PostBackward(Function):
    """The gathered parameters of a unit. Its backward hands the full gradients to the reduction.

    run: the backward that has come to the node, until the gradients are complete.
    """

    __slots__ = ("unit", "record", "run")

    def __init__(self, unit: Unit, record: ForwardRecord) -> None:
        self.unit = unit
        self.record = record
        self.run: autograd.Backward | None = None
        self.saved = self.edges = self.needs = ()
        self.outputs = 0
        self.enter_tape()
        unit.pending.add(self)

    def backward(self) -> tuple:
        self.run = autograd.running().outermost
        self.record.forget(self.unit)
        self.record.after(self.unit)
        return autograd.call_or_defer(self._complete)

    def _complete(self) -> tuple:
        self.unit.pending.discard(self)
        self.run = None
        self.record.complete(self.unit)
        return ()


class PreBackward(Function):
    """The end of one call of a unit. Its backward gathers the parameters again.

    skipped: the unit's place in the plan if this rank skipped the call, else None.
    """

    __slots__ = ("unit", "record", "skipped")

    def __init__(self, unit: Unit, record: ForwardRecord, skipped: int | None = None) -> None:
        self.unit = unit
        self.record = record
        self.skipped = skipped
        self.saved = self.needs = ()
        self.outputs = 0
        self.edges = (Edge(record.post_backward(unit), 0, None),)
        self.enter_tape()

    def backward(self) -> tuple:
        self.record.before(self.unit, self.record)
        return (WRITTEN,)


class Exit(Function):
    """The identity on the outputs of one call of a unit."""

    __slots__ = ()
    strided = True

    def backward(self, *dy: Array) -> tuple:
        return (*dy, *[WRITTEN] * (len(self.edges) - len(dy)))


def mark(unit: Unit, outputs: list[Variable], then: Iterable[Function]) -> list[Variable]:
    """The outputs, where those on the tape now come from an Exit node.

    then: nodes without outputs that backward must run as well.
    """
    behind = recorded(unit, outputs)
    if not behind:
        return [_outside_slots(unit, output) for output in outputs]
    # Exit is newer than `then`, whose nodes are newer than all ops inside: backward runs them in that order.
    node = Exit()
    node.saved = ()
    node.needs = (True,) * len(behind)
    node.edges = (*(output.edge() for output in behind), *(Edge(other, 0, None) for other in then))
    node.enter_tape()
    marked = node.wrap(tuple(_outside_slots(unit, output).data for output in behind), True)
    by_id = dict(zip(map(id, behind), marked, strict=True))
    return [by_id[id(output)] if id(output) in by_id else _outside_slots(unit, output) for output in outputs]


def recorded(unit: Unit, outputs: list[Variable]) -> list[Variable]:
    """The outputs of a forward of `unit` that backward can reach, without parameters of other units."""
    if not autograd.is_grad_enabled():
        return []
    return [output for output in outputs if output.requires_grad and not _of_others(unit, output)]


def _of_others(unit: Unit, output: Variable) -> bool:
    return isinstance(output, Parameter) and output.storage not in unit.groups


def _outside_slots(unit: Unit, output: Variable) -> Variable:
    """outside_slots for a tensor; parameters of other units stay as they are."""
    if _of_others(unit, output):
        return output
    data = output.data
    array = outside_slots(unit, data)
    return output if array is data else output.result_type(array)


def outside_slots(unit: Unit, array: Array) -> Array:
    """`array`, or a copy if it lies in a slot of `unit`: another unit may take the slot after forward."""
    slots = [group.slot.array for group in unit.groups if group.slot is not None]
    if any(hasattr(slot, _ON_GPU) != hasattr(array, _ON_GPU) for slot in slots):
        return array  # CuPy compares no array of the host
    return array.copy() if any(np.may_share_memory(array, slot) for slot in slots) else array
