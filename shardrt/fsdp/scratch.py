"""Scratch memory of communicators: what the collectives of a step need, asked for before the first of them.

Communicators that copy through the host, or that reduce in pieces, would allocate it in the middle of a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardrt import dtypes
from shardrt.comm.protocol import Communicator
from shardrt.fsdp.buffers import PlanInputs, gradient_dtype
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.process_groups import ProcessGroups
from shardrt.fsdp.whole_gradient import path_of


def reserve(
    layouts: dict[ParameterGroup, Layout], ranks_of: dict[ParameterGroup, ProcessGroups], inputs: PlanInputs
) -> None:
    """Have each communicator allocate the scratch memory that its calls need."""
    if inputs.device.dry_run:
        return
    for communicator, (on_device, on_host) in scratch(layouts, ranks_of, inputs).items():
        communicator.reserve(on_device, on_host)


@dataclass(frozen=True)
class Call:
    """A collective of a step.

    Attributes:
        by: the communicator.
        nbytes, output: bytes of the buffer and of the output.
        allocated: whether `by.allocate` made the buffer.
    """

    by: Communicator
    name: str
    nbytes: int
    output: int = 0
    allocated: bool = True


def calls_of(
    group: ParameterGroup, layout: Layout, ranks: ProcessGroups, inputs: PlanInputs
) -> Iterator[Call]:
    """The collectives of transfer.py and collectives.py for the group in a step."""
    if ranks.size > 1:
        yield Call(ranks.gather, "all_gather", layout.total * dtypes.storage(group.key.param).itemsize)
    if not group.trainable:
        return
    path, exact = path_of(group, layout), gradient_dtype(group, inputs).itemsize
    low = group.key.reduce in dtypes.LOW
    sent = path.sent * (dtypes.storage(group.key.reduce).itemsize if low else exact)
    kept = path.kept * exact
    if ranks.size > 1 or ranks.replicate is None:
        yield Call(ranks.reduce, "reduce_scatter", sent, kept)
        sent = kept
    if ranks.replicate is not None:
        here = ranks.reducer is ranks.replicate
        yield Call(ranks.replicate, "reduce_scatter", sent, kept // ranks.replicate.size, here)
        yield Call(ranks.replicate, "all_gather", kept, allocated=here)


def scratch(
    layouts: dict[ParameterGroup, Layout], ranks_of: dict[ParameterGroup, ProcessGroups], inputs: PlanInputs
) -> dict[Communicator, tuple[int, int]]:
    """Map communicator to bytes of scratch memory (on the device, on the host) that its calls need."""
    most: dict[Communicator, tuple[int, int]] = {}
    for group, layout in layouts.items():
        for call in calls_of(group, layout, ranks_of[group], inputs):
            needed = call.by.scratch(call.name, call.nbytes, call.output, allocated=call.allocated)
            most[call.by] = tuple(map(max, needed, most.get(call.by, (0, 0))))
    return most
