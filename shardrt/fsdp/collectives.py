"""Gathers the parameters of a group and reduces its gradients: what is moved, in which stream, after which
event. The schedule decides whether and when.

    transfer        [host -> device] -> own part of the buffer -> all-gather -> [16 bits -> computing type]
    reduce_scatter  [computing type -> 16 bits] -> reduce-scatter -> [copies: reduce-scatter, all-gather]
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
    """What gathers a group: chosen once, when it has its memory, and the same in every step.

    param: the type that it is gathered in. ranks: how many hold a shard each. gathered: one of its slots.

    It fills a slot with the whole parameters; `slot.ready` is recorded when they are there.
    """
    if shard_in_slot and ranks == 1:
        return _nothing
    if param in dtypes.LOW and gathered.itemsize == 2:
        return _native
    if "wire" in arenas:
        return _packed
    return _rounded if param in dtypes.LOW and ranks == 1 else _plain


def _nothing(group: ParameterGroup, slot: Slot, streams: Streams) -> None:
    """The slot is the parameters, and this rank's alone."""


def _plain(group: ParameterGroup, slot: Slot, streams: Streams) -> None:
    """The shard has the type of the slot: it goes to its place, and the others' beside it."""
    stream, full = streams.gather, slot.array[: group.layout.total]
    own = full[slice(*group.layout.shard_range(group.ranks.rank))]
    if group.placement.parameters:
        streams.upload.wait(slot.free)  # compute has finished with the unit that had the slot
        streams.upload.submit(_upload, streams.device, own, group.shard, label=f"upload {group.label}")
        streams.upload.record(group.uploaded)
        stream.wait(group.uploaded)  # this rank's part has come from the host
    else:
        stream.wait(slot.free)  # compute has finished with the unit that had the slot
        if not group.shard_in_slot:
            stream.submit(streams.device.copy, own, group.shard)
    if group.ranks.size > 1:
        group.ranks.gather.all_gather(as_sent(full), stream=stream, what=group.called)
    stream.record(slot.ready)


def as_sent(array: Array) -> Array:
    """The array as communicators take it: of a type that they do not know, its bytes."""
    return array if array.dtype in dtypes.CODES else array.view(np.uint8)


def _native(group: ParameterGroup, slot: Slot, streams: Streams) -> None:
    """The slot has 16 bits, as ops read them: the shard is rounded into its place, which then travels."""
    stream, new = streams.gather, _is_new(group, streams)
    if new and group.ranks.size == 1:
        return
    stream.wait(slot.free)  # compute has finished with the unit that had the slot
    if group.slot_shared:
        group.ranks.gather.barrier(stream=stream, what=group.called)  # on every rank: others read this part
    bits = slot.array[: group.layout.total].view(dtypes.storage(group.key.param))
    if not new:
        own = bits[slice(*group.layout.shard_range(group.ranks.rank))]
        _cast(streams.device.kernels.cast.pack, group, own, streams)
    if group.ranks.size > 1:
        group.ranks.gather.all_gather(bits, stream=stream, what=group.called)
    stream.record(slot.ready)


def _packed(group: ParameterGroup, slot: Slot, streams: Streams) -> None:
    """The shard is rounded to 16 bits, which travel, and are widened where the device computes in more.

    One buffer serves all groups: everything that touches it is in the gather stream, in order. So the bits
    travel while compute still reads the unit that had the slot before.
    """
    stream, cast, kind = streams.gather, streams.device.kernels.cast, group.key.param
    packed = group.arenas["wire"].slots[0].array[: group.layout.total]
    _cast(cast.pack, group, packed[slice(*group.layout.shard_range(group.ranks.rank))], streams)
    group.ranks.gather.all_gather(packed, stream=stream, what=group.called)
    stream.wait(slot.free)  # compute has finished with the unit that had the slot
    stream.submit(cast.unpack, packed, slot.array[: packed.size], kind)
    stream.record(slot.ready)


def _rounded(group: ParameterGroup, slot: Slot, streams: Streams) -> None:
    """As _packed where this rank holds everything: nothing travels."""
    if _is_new(group, streams):
        return
    streams.gather.wait(slot.free)  # compute has finished with the unit that had the slot
    _cast(streams.device.kernels.cast.round_to, group, slot.array[: group.layout.total], streams)
    streams.gather.record(slot.ready)


def _is_new(group: ParameterGroup, streams: Streams) -> bool:
    """Whether this rank's part of the slot is the shard in 16 bits: as the optimizer has written it.

    Or an earlier gather. From now on it is, where the group keeps it.
    """
    if group.low_precision_copy is None:
        return False
    new, group.copy_is_fresh = group.copy_is_fresh, True
    graph = streams.device.capturing
    if graph is not None and new:
        graph.before_replay(partial(_renew, group, streams))
    elif graph is not None:
        graph.after_capture(partial(setattr, group, "copy_is_fresh", False))  # nothing has run
    return new


def _renew(group: ParameterGroup, streams: Streams) -> None:
    """Before a replay that counts on the copy: a load may have been since. (Graphs have it in 16 bits.)"""
    if not group.copy_is_fresh:
        group.copy_is_fresh = True
        copy = group.low_precision_copy
        bits = copy.array.view(dtypes.storage(copy.kind))
        streams.compute.submit(streams.device.kernels.cast.pack, group.shard, bits, copy.kind)


def _cast(kernel: Callable, group: ParameterGroup, target: Array, streams: Streams) -> None:
    """`target` becomes the shard in 16 bits; one on the host comes through a staging slot."""
    if not group.placement.parameters:
        streams.gather.submit(kernel, group.shard, target, group.key.param)
        return
    staged = group.arenas["upload"].acquire()
    array = staged.array[: group.layout.shard_size]
    streams.upload.wait(staged.free)  # the gather that used the slot before has read it
    streams.upload.submit(_upload, streams.device, array, group.shard, label=f"upload {group.label}")
    streams.upload.record(staged.ready)
    streams.gather.wait(staged.ready)  # the shard has come from the host
    streams.gather.submit(kernel, array, target, group.key.param)
    streams.gather.record(staged.free)
    staged.arena.release(staged)


def _upload(device: Device, target: Array, shard: Array) -> None:
    """Copy, and where the shard is a mapped file let its pages go: they are not needed before the update."""
    device.copy(target, shard)
    host.drop(shard)


def reduce_scatter(
    group: ParameterGroup, slot: Slot, full: Array, out: Array, accumulate: bool, streams: Streams
) -> None:
    """out = (out if `accumulate`) + scale * sum over the ranks. The same bits for every strategy.

    full: what is sent, in `slot`; it may be overwritten. With copies, the shards are first summed within a
    shard group, then over those that have copies. The factor is applied once, in float32, to the sum over all
    ranks.
    """
    wire, kind = full, ""
    if group.key.reduce in dtypes.LOW:
        wire, kind = wire_of(group)[: full.size], group.key.reduce
        streams.reduce.submit(streams.device.kernels.cast.pack, full, wire, kind)
    scale = 1.0 / group.choices.divide_factor
    if group.ranks.copies is None:
        group.ranks.reduce.reduce_scatter(
            out, wire, stream=streams.reduce, scale=scale, accumulate=accumulate, kind=kind, what=group.called
        )
        return
    own = slot.array[slice(*group.layout.shard_range(group.ranks.rank))]
    in_place = slot is group.sharded_gradient.slot
    sum_over_ranks(group, own, wire, kind, streams, scale if in_place else 1.0)
    if not in_place:
        streams.reduce.submit(streams.device.kernels.reduce.sum_into, out, [own], scale, accumulate)


def wire_of(group: ParameterGroup) -> Array:
    """The buffer of gradients in 16 bits. All groups share it: only the reduce stream uses it, in order."""
    return group.arenas["reduce_wire"].slots[0].array


def sum_over_ranks(
    group: ParameterGroup, own: Array, wire: Array, kind: str, streams: Streams, scale: float = 1.0
) -> None:
    """`own` becomes this rank's part of the sum of `wire` over all ranks; kind: of the wire's bits, if 16.

    With copies, a reduce-scatter and an all-gather over the same memory make the all-reduce between them;
    `scale` is applied there. Sums go by a binary tree over the ranks, so two levels add up like one as long
    as a shard group's size is a power of two.
    """
    ranks, stream = group.ranks, streams.reduce
    if ranks.size > 1 or ranks.copies is None:
        ranks.reduce.reduce_scatter(own, wire, stream=stream, kind=kind, what=group.called)
        wire, kind = own, ""
    if ranks.copies is not None:
        count = own.size // ranks.copies.size
        piece = own[ranks.copies.rank * count : (ranks.copies.rank + 1) * count]
        ranks.copies.reduce_scatter(piece, wire, stream=stream, scale=scale, kind=kind, what=group.called)
        ranks.copies.all_gather(own, stream=stream, what=group.called)
