"""Transfer: how the shards of a group become whole parameters in a slot, from the shard to the all-gather.

A group chooses its transfer once, when it gets its memory. The usual transfer copies the shard into its place
in the slot and all-gathers the slot. Options add others to `TRANSFERS` (options/low_precision.py for 16-bit
types, options/offload.py for shards on the host).
"""

from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.device.arena import Slot
from shardrt.fsdp.streams import Streams
from shardrt.nn.storage import LowPrecisionCopy

Array = Any


class Transfer:
    """The usual transfer. Shard and slot have the same type.

    group: the ParameterGroup (untyped: group.py imports this file).
    low_precision_copy: a 16-bit copy of the shard in the slot, if the slot keeps one between gathers.
    """

    low_precision_copy: LowPrecisionCopy | None = None

    def __init__(self, group: Any) -> None:
        self.group = group

    @classmethod
    def choose(cls, group: Any, own_slot: bool) -> "Transfer | None":
        """This transfer for `group` if it fits, else None. own_slot: no other group is gathered there."""
        return None

    @classmethod
    def needs_separate_shard(cls, group: Any) -> bool:
        """Whether the shard of `group` must lie outside of the slot: this transfer would change its bytes."""
        return False

    def issue(self, slot: Slot, streams: Streams) -> None:
        """Issue what fills the slot with the whole parameters, and record `slot.ready` behind that."""
        group = self.group
        full = slot.array[: group.layout.total]
        self.fill(slot, full[slice(*group.layout.shard_range(group.ranks.rank))], streams)
        if group.ranks.size > 1:
            group.ranks.gather.all_gather(as_sent(full), stream=streams.gather, tag=group.tag)
        streams.gather.record(slot.ready)

    def fill(self, slot: Slot, output: Array, streams: Streams) -> None:
        """Have the gather stream put the shard into `output`, its place in the slot."""
        streams.gather.wait(slot.free)  # compute has finished with the unit that had the slot
        if not self.group.memory.shard_in_slot:
            streams.gather.submit(streams.device.copy, output, self.group.shard)

    def shard_written(self, copy_too: bool) -> None:
        """The shard has new values. copy_too: `low_precision_copy` has them as well."""

    def slot_overwritten(self) -> None:
        """The slot has lost its values."""


class NoTransfer(Transfer):
    """For a slot that is the shard itself, of a unit that is not sharded: nothing is to be gathered."""

    def issue(self, slot: Slot, streams: Streams) -> None:
        """Issue nothing."""


def transfer_of(group: Any, own_slot: bool) -> Transfer:
    """The transfer of a group that has its memory. own_slot: as Transfer.choose."""
    if group.memory.shard_in_slot and group.ranks.size == 1:
        return NoTransfer(group)
    chosen = (kind.choose(group, own_slot) for kind in TRANSFERS)
    return next((transfer for transfer in chosen if transfer is not None), None) or Transfer(group)


def as_sent(array: Array) -> Array:
    """The array itself, or a view of its bytes if communicators don't know its dtype."""
    return array if array.dtype in dtypes.CODES else array.view(np.uint8)


TRANSFERS: list[type[Transfer]] = []  # of options; the first that accepts a group in `choose` takes it
