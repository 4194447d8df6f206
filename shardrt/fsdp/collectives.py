"""Moves data: gathers the parameters of a group and reduces its gradients.

Each function issues its copies, casts and collectives in the right streams, after the right events. The
schedule decides when to call it. Steps in brackets depend on the group:

    transfer        [host -> device] -> own part of the buffer -> all-gather -> [16 bits -> compute type]
    reduce_scatter  [compute type -> 16 bits] -> reduce-scatter -> [copies: reduce-scatter, all-gather]
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.device import Device, host
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.sharded_gradient import Streams

Array = Any


def transfer_of(
    param: str, ranks: int, gathered: Array, shard_in_slot: bool, arenas: dict[str, Arena]
) -> Callable[[ParameterGroup, Slot, Streams], None]:
    """Choose the function that gathers a group, once, when the group gets its memory.

    The function fills a slot with the whole parameters and records `slot.ready` behind that.

    param: the type that the group is gathered in.
    ranks: number of shards.
    gathered: the array of one slot of the group.
    """
    if shard_in_slot and ranks == 1:
        return _nothing
    if param in dtypes.LOW and gathered.itemsize == 2:
        return _native
    if "wire" in arenas:
        return _packed
    return _rounded if param in dtypes.LOW and ranks == 1 else _plain


def _nothing(group: ParameterGroup, slot: Slot, streams: Streams) -> None:
    """Do nothing: the slot is the shard, and no other rank has one."""


def _plain(group: ParameterGroup, slot: Slot, streams: Streams) -> None:
    """Copy the shard into its place in the slot, and all-gather. Shard and slot have the same type."""
    stream, full = streams.gather, slot.array[: group.layout.total]
    own = full[slice(*group.layout.shard_range(group.ranks.rank))]
    if group.placement.parameters:
        streams.upload.wait(slot.free)  # compute has finished with the unit that had the slot
        streams.upload.submit(_upload, streams.device, own, group.shard, label=f"upload {group.label}")
        streams.upload.record(group.uploaded)
        stream.wait(group.uploaded)  # this rank's shard has arrived from the host
    else:
        stream.wait(slot.free)  # compute has finished with the unit that had the slot
        if not group.shard_in_slot:
            stream.submit(streams.device.copy, own, group.shard)
    if group.ranks.size > 1:
        group.ranks.gather.all_gather(as_sent(full), stream=stream, tag=group.tag)
    stream.record(slot.ready)


def as_sent(array: Array) -> Array:
    """The array itself, or a view of its bytes if communicators don't know its dtype."""
    return array if array.dtype in dtypes.CODES else array.view(np.uint8)


def _native(group: ParameterGroup, slot: Slot, streams: Streams) -> None:
    """Round the shard into its place in a 16-bit slot, and all-gather. Ops read the slot as it is."""
    stream, new = streams.gather, _is_new(group, streams)
    if new and group.ranks.size == 1:
        return
    stream.wait(slot.free)  # compute has finished with the unit that had the slot
    if group.slot_shared:
        # All ranks must have finished with the slot's last unit: they read the part that this rank writes.
        group.ranks.gather.barrier(stream=stream, tag=group.tag)
    bits = slot.array[: group.layout.total].view(dtypes.storage(group.key.param))
    if not new:
        own = bits[slice(*group.layout.shard_range(group.ranks.rank))]
        _cast(streams.device.kernels.cast.pack, group, own, streams)
    if group.ranks.size > 1:
        group.ranks.gather.all_gather(bits, stream=stream, tag=group.tag)
    stream.record(slot.ready)


def _packed(group: ParameterGroup, slot: Slot, streams: Streams) -> None:
    """Round the shard to 16 bits, all-gather these, and widen them into a slot of the compute type.

    All groups share one 16-bit buffer. Only the gather stream uses it, in order, so it needs no events. The
    all-gather does not touch the slot, so it may run while compute still reads the slot's last unit.
    """
    stream, cast, kind = streams.gather, streams.device.kernels.cast, group.key.param
    packed = group.arenas["wire"].slots[0].array[: group.layout.total]
    _cast(cast.pack, group, packed[slice(*group.layout.shard_range(group.ranks.rank))], streams)
    group.ranks.gather.all_gather(packed, stream=stream, tag=group.tag)
    stream.wait(slot.free)  # compute has finished with the unit that had the slot
    stream.submit(cast.unpack, packed, slot.array[: packed.size], kind)
    stream.record(slot.ready)


def _rounded(group: ParameterGroup, slot: Slot, streams: Streams) -> None:
    """Round the shard to 16 bits into a slot of the compute type. This rank holds all: nothing is sent."""
    if _is_new(group, streams):
        return
    streams.gather.wait(slot.free)  # compute has finished with the unit that had the slot
    _cast(streams.device.kernels.cast.round_to, group, slot.array[: group.layout.total], streams)
    streams.gather.record(slot.ready)


def _is_new(group: ParameterGroup, streams: Streams) -> bool:
    """Whether this rank's part of the slot already has the shard's values, rounded.

    The optimizer or an earlier gather may have written them. Marks the copy as fresh from now on, for groups
    that keep one: the caller rounds the shard if it was not.
    """
    if group.low_precision_copy is None:
        return False
    new, group.copy_is_fresh = group.copy_is_fresh, True
    graph = streams.device.capturing
    if graph is not None and new:
        graph.before_replay(partial(_renew, group, streams))
    elif graph is not None:
        graph.after_capture(partial(setattr, group, "copy_is_fresh", False))  # capture ran nothing
    return new


def _renew(group: ParameterGroup, streams: Streams) -> None:
    """Round the shard again before a replay that relies on the copy, if a load has changed the shard since.

    The graph was captured when the copy was fresh, so it has no cast. Only devices that keep the copy in 16
    bits capture graphs.
    """
    if not group.copy_is_fresh:
        group.copy_is_fresh = True
        copy = group.low_precision_copy
        bits = copy.array.view(dtypes.storage(copy.kind))
        streams.compute.submit(streams.device.kernels.cast.pack, group.shard, bits, copy.kind)


def _cast(kernel: Callable, group: ParameterGroup, target: Array, streams: Streams) -> None:
    """Round the shard into `target`, in the gather stream. A shard on the host passes a staging slot."""
    if not group.placement.parameters:
        streams.gather.submit(kernel, group.shard, target, group.key.param)
        return
    staged = group.arenas["upload"].acquire()
    array = staged.array[: group.layout.shard_size]
    streams.upload.wait(staged.free)  # the gather that used the slot before has read it
    streams.upload.submit(_upload, streams.device, array, group.shard, label=f"upload {group.label}")
    streams.upload.record(staged.ready)
    streams.gather.wait(staged.ready)  # the shard has arrived from the host
    streams.gather.submit(kernel, array, target, group.key.param)
    streams.gather.record(staged.free)
    staged.arena.release(staged)


def _upload(device: Device, target: Array, shard: Array) -> None:
    """Copy the shard. Free the pages of a memory-mapped one: they are not needed before the update."""
    device.copy(target, shard)
    host.drop(shard)


def reduce_scatter(
    group: ParameterGroup, slot: Slot, full: Array, out: Array, accumulate: bool, streams: Streams
) -> None:
    """out = (out if `accumulate`) + scale * this rank's shard of the sum over all ranks.

    The result is bitwise identical for every strategy. With copies, shards are first summed within a shard
    group, then over the ranks that hold copies. `scale` is applied once, in float32, to the sum over all
    ranks.

    full: the gradients, a part of `slot`. It may be overwritten.
    """
    wire, kind = full, ""
    if group.key.reduce in dtypes.LOW:
        wire, kind = wire_of(group)[: full.size], group.key.reduce
        streams.reduce.submit(streams.device.kernels.cast.pack, full, wire, kind)
    scale = 1.0 / group.choices.divide_factor
    if group.ranks.copies is None:
        group.ranks.reduce.reduce_scatter(
            out, wire, stream=streams.reduce, scale=scale, accumulate=accumulate, kind=kind, tag=group.tag
        )
        return
    own = slot.array[slice(*group.layout.shard_range(group.ranks.rank))]
    in_place = slot is group.sharded_gradient.slot
    sum_over_ranks(group, own, wire, kind, streams, scale if in_place else 1.0)
    if not in_place:
        streams.reduce.submit(streams.device.kernels.reduce.sum_into, out, [own], scale, accumulate)


def wire_of(group: ParameterGroup) -> Array:
    """The 16-bit gradient buffer. All groups share it: only the reduce stream uses it, in order."""
    return group.arenas["reduce_wire"].slots[0].array


def sum_over_ranks(
    group: ParameterGroup, own: Array, wire: Array, kind: str, streams: Streams, scale: float = 1.0
) -> None:
    """Write this rank's shard of the sum of `wire` over all ranks to `own`.

    kind: the 16-bit type of `wire`; "" if it is not 16-bit.
    scale: factor for the sum over copies.

    Ranks that hold copies all-reduce `own`: a reduce-scatter and an all-gather on the same memory. Each
    reduction adds by a binary tree over its ranks. If the size of a shard group is a power of two, the two
    levels together are the tree over all ranks. The sum is then bitwise identical.
    """
    ranks, stream = group.ranks, streams.reduce
    if ranks.size > 1 or ranks.copies is None:
        ranks.reduce.reduce_scatter(own, wire, stream=stream, kind=kind, tag=group.tag)
        wire, kind = own, ""
    if ranks.copies is not None:
        count = own.size // ranks.copies.size
        piece = own[ranks.copies.rank * count : (ranks.copies.rank + 1) * count]
        ranks.copies.reduce_scatter(piece, wire, stream=stream, scale=scale, kind=kind, tag=group.tag)
        ranks.copies.all_gather(own, stream=stream, tag=group.tag)
