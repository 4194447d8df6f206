"""Parameters gathered, and gradients reduced, in 16 bits: the transfers, and the buffers that they need.

Where ops read 16-bit values as they are, the slot has 16 bits (NativeTransfer). Elsewhere the slot has the
type that ops compute in, and values travel packed (PackedTransfer). A rank that holds everything rounds the
shard in the slot and sends nothing (RoundedTransfer).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from shardrt import dtypes
from shardrt.device.arena import Slot
from shardrt.fsdp.buffers import PlanInputs, Specs, alike, gathered_dtype, share
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.options.offload import upload
from shardrt.fsdp.streams import Streams
from shardrt.fsdp.transfer import Transfer
from shardrt.fsdp.whole_gradient import path_of
from shardrt.nn.storage import LowPrecisionCopy

Array = Any


class LowPrecisionTransfer(Transfer):
    """Rounds the shard to 16 bits. A slot that no other group uses keeps the rounded shard between gathers.

    is_fresh: `low_precision_copy` has the present values of the shard. The optimizer or an earlier gather has
    written them.
    """

    def __init__(self, group: ParameterGroup, own_slot: bool) -> None:
        super().__init__(group)
        self.is_fresh = False
        if own_slot and not group.offloaded.parameters:
            part = group.arenas["gathered"].slots[0].array[slice(*group.layout.shard_range(group.ranks.rank))]
            self.low_precision_copy = LowPrecisionCopy(part, group.key.param)

    @classmethod
    def choose(cls, group: ParameterGroup, own_slot: bool) -> Transfer | None:
        if group.key.param not in dtypes.LOW:
            return None
        if group.arenas["gathered"].slots[0].array.itemsize == 2:
            return NativeTransfer(group, own_slot)
        if "wire" in group.arenas:
            return PackedTransfer(group, own_slot=False)
        return RoundedTransfer(group, own_slot)

    @classmethod
    def needs_separate_shard(cls, group: ParameterGroup) -> bool:
        return group.key.param in dtypes.LOW

    def shard_written(self, copy_too: bool) -> None:
        self.is_fresh = self.is_fresh and copy_too

    def slot_overwritten(self) -> None:
        self.is_fresh = False

    def needs_rounding(self, streams: Streams) -> bool:
        """Whether the caller must round the shard now, by `round`."""
        graph = streams.device.capturing
        if self.low_precision_copy is not None and graph is not None:
            if self.is_fresh:
                graph.before_replay(partial(self._round_again, streams))
            else:
                graph.after_capture(self.slot_overwritten)  # capture ran nothing
        return not self.is_fresh

    def round(self, kernel: Callable, target: Array, streams: Streams) -> None:
        """Round the shard into `target`. The copy, if there is one, is fresh once the cast is submitted."""
        _cast(kernel, self.group, target, streams)
        self.is_fresh = self.low_precision_copy is not None

    def _round_again(self, streams: Streams) -> None:
        """Round the shard before a replay that relies on the copy, if a load has changed the shard since.

        The graph was captured when the copy was fresh, so it has no cast. Only devices that keep the copy in
        16 bits capture graphs.
        """
        if not self.is_fresh:
            copy = self.low_precision_copy
            bits = copy.array.view(dtypes.storage(copy.kind))
            streams.compute.submit(streams.device.kernels.cast.pack, self.group.shard, bits, copy.kind)
            self.is_fresh = True


class NativeTransfer(LowPrecisionTransfer):
    """Rounds the shard into its place in a 16-bit slot, and all-gathers. Ops read the slot as it is."""

    def issue(self, slot: Slot, streams: Streams) -> None:
        group, stream, rounds = self.group, streams.gather, self.needs_rounding(streams)
        if not rounds and group.ranks.size == 1:
            return
        stream.wait(slot.free)  # compute has finished with the unit that had the slot
        if group.memory.slot_shared:
            # All ranks must have finished with the slot's last unit: they read what this rank writes now.
            group.ranks.gather.barrier(stream=stream, tag=group.tag)
        bits = slot.array[: group.layout.total].view(dtypes.storage(group.key.param))
        if rounds:
            shard = bits[slice(*group.layout.shard_range(group.ranks.rank))]
            self.round(streams.device.kernels.cast.pack, shard, streams)
        if group.ranks.size > 1:
            group.ranks.gather.all_gather(bits, stream=stream, tag=group.tag)
        stream.record(slot.ready)


class PackedTransfer(LowPrecisionTransfer):
    """Rounds the shard to 16 bits, all-gathers these, and widens them into a slot of the compute type.

    All groups share one 16-bit buffer. Only the gather stream uses it, in order, so it needs no events. The
    all-gather does not touch the slot, so it may run while compute still reads the slot's last unit.
    """

    def issue(self, slot: Slot, streams: Streams) -> None:
        group, stream, cast = self.group, streams.gather, streams.device.kernels.cast
        packed = group.arenas["wire"].slots[0].array[: group.layout.total]
        _cast(cast.pack, group, packed[slice(*group.layout.shard_range(group.ranks.rank))], streams)
        group.ranks.gather.all_gather(packed, stream=stream, tag=group.tag)
        stream.wait(slot.free)  # compute has finished with the unit that had the slot
        stream.submit(cast.unpack, packed, slot.array[: packed.size], group.key.param)
        stream.record(slot.ready)


class RoundedTransfer(LowPrecisionTransfer):
    """Rounds the shard to 16 bits into a slot of the compute type. This rank holds all: nothing is sent."""

    def issue(self, slot: Slot, streams: Streams) -> None:
        if not self.needs_rounding(streams):
            return
        group = self.group
        streams.gather.wait(slot.free)  # compute has finished with the unit that had the slot
        self.round(streams.device.kernels.cast.round_to, slot.array[: group.layout.total], streams)
        streams.gather.record(slot.ready)


def _cast(kernel: Callable, group: ParameterGroup, target: Array, streams: Streams) -> None:
    """Round the shard into `target`, in the gather stream. A shard on the host passes a staging slot."""
    if not group.offloaded.parameters:
        streams.gather.submit(kernel, group.shard, target, group.key.param)
        return
    staged = group.arenas["upload"].acquire()
    array = staged.array[: group.layout.shard_size]
    streams.upload.wait(staged.free)  # the gather that used the slot before has read it
    streams.upload.submit(upload, streams.device, array, group.shard, label=f"upload {group.label}")
    streams.upload.record(staged.ready)
    streams.gather.wait(staged.ready)  # the shard has arrived from the host
    streams.gather.submit(kernel, array, target, group.key.param)
    streams.gather.record(staged.free)
    staged.arena.release(staged)


def plan_wires(
    specs: Specs, layouts: dict[ParameterGroup, Layout], groups: list[ParameterGroup], inputs: PlanInputs
) -> None:
    """Add the 16-bit buffers that parameters and gradients travel in: one for all groups that are alike."""
    low = [g for g in groups if g.key.param in dtypes.LOW and layouts[g].shards > 1]
    for members in alike(g for g in low if gathered_dtype(g, inputs).itemsize > 2):
        count = max(layouts[g].total for g in members)
        share(specs, members, "wire", count, dtypes.storage(members[0].key.param), 1)
    for members in alike(g for g in groups if g.trainable and g.key.reduce in dtypes.LOW):
        # Its length depends on the gradient path, and so on the group's slot.
        count = max(path_of(g, layouts[g], specs[g]["gradients"].count).sent for g in members)
        share(specs, members, "reduce_wire", count, dtypes.storage(members[0].key.reduce), 1)
