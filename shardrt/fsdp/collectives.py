"""Gathers the parameters of a group and reduces its gradients: what is moved, in which stream, after which
event. The schedule decides whether and when.

    transfer [host -> device] -> own part of the buffer -> all-gather -> [16 bits -> computing type]
    reduce   [computing type -> 16 bits] -> reduce-scatter -> [copies: reduce-scatter, all-gather]
             -> added to the sharded gradient -> [device -> host]
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.device import Device, Stream, host
from shardrt.device.arena import Slot
from shardrt.fsdp.group import ParameterGroup, Streams

Array = Any


def transfer_of(group: ParameterGroup) -> Callable[[ParameterGroup, Slot, Streams], None]:
    """What gathers the group: chosen once, when it has its memory, and the same in every step.

    It fills a slot with the whole parameters; `slot.ready` is recorded when they are there.
    """
    if group.shard_in_slot and group.ranks.size == 1:
        return _nothing
    if group.key.param in dtypes.LOW and group.arenas["gathered"].slots[0].array.itemsize == 2:
        return _native
    if "wire" in group.arenas:
        return _packed
    return _rounded if group.key.param in dtypes.LOW and group.ranks.size == 1 else _plain


def _nothing(group: ParameterGroup, slot: Slot, streams: Streams) -> None:
    """The slot is the parameters, and this rank's alone."""


def _plain(group: ParameterGroup, slot: Slot, streams: Streams) -> None:
    """The shard has the type of the slot: it goes to its place, and the others' beside it."""
    stream, full = streams.gather, slot.array[: group.layout.total]
    own = full[slice(*group.layout.shard_range(group.ranks.rank))]
    if group.placement.parameters:
        streams.upload.wait(slot.free)  # compute has finished with the unit that had the slot
        streams.upload.submit(_upload, streams.device, own, group._shard, label=f"upload {group.label}")
        streams.upload.record(group.uploaded)
        stream.wait(group.uploaded)  # this rank's part has come from the host
    else:
        stream.wait(slot.free)  # compute has finished with the unit that had the slot
        if not group.shard_in_slot:
            stream.submit(streams.device.copy, own, group._shard)
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
    if group.rounded is None:
        return False
    new, group.rounded_is_new = group.rounded_is_new, True
    graph = streams.device.capturing
    if graph is not None and new:
        graph.before_replay(partial(_renew, group, streams))
    elif graph is not None:
        graph.after_capture(partial(setattr, group, "rounded_is_new", False))  # nothing has run
    return new


def _renew(group: ParameterGroup, streams: Streams) -> None:
    """Before a replay that counts on the copy: a load may have been since. (Graphs have it in 16 bits.)"""
    if not group.rounded_is_new:
        group.rounded_is_new = True
        bits = group.rounded.array.view(dtypes.storage(group.rounded.kind))
        streams.compute.submit(streams.device.kernels.cast.pack, group._shard, bits, group.rounded.kind)


def _cast(kernel: Callable, group: ParameterGroup, target: Array, streams: Streams) -> None:
    """`target` becomes the shard in 16 bits; one on the host comes through a staging slot."""
    if not group.placement.parameters:
        streams.gather.submit(kernel, group._shard, target, group.key.param)
        return
    staged = group.arenas["upload"].acquire()
    array = staged.array[: group.layout.shard_size]
    streams.upload.wait(staged.free)  # the gather that used the slot before has read it
    streams.upload.submit(_upload, streams.device, array, group._shard, label=f"upload {group.label}")
    streams.upload.record(staged.ready)
    streams.gather.wait(staged.ready)  # the shard has come from the host
    streams.gather.submit(kernel, array, target, group.key.param)
    streams.gather.record(staged.free)
    staged.arena.release(staged)


def _upload(device: Device, target: Array, shard: Array) -> None:
    """Copy, and where the shard is a mapped file let its pages go: they are not needed before the update."""
    device.copy(target, shard)
    host.drop(shard)


def reduce(
    group: ParameterGroup,
    slot: Slot,
    streams: Streams,
    written: Collection[int],
    part: tuple[int, int] | None = None,
) -> None:
    """Sum the full gradients in `slot` over the ranks into the group's sharded gradient, or a part of it.

    written: positions of the parameters that this rank has used. part: (start, stop) of what the slot has of
    each shard; None for all.
    `slot.free` is recorded when the slot has been read, `group.gradient_ready` when the sum is in its place.
    """
    if slot is group.sum.slot and group.ranks.copies is None and group.choices.divide_factor == 1:
        streams.compute.record(group.gradient_ready)  # compute has written the sum itself
        return
    stream, goes, sums = streams.reduce, group.sum.place, group.sum.buffers
    streams.compute.record(slot.ready)
    stream.wait(slot.ready)  # compute has written the gradients
    if not group.placement.gradients:
        out = sums[goes.buffer] if part is None else sums[goes.buffer][slice(*part)]
        if goes.buffer == 0 and not goes.accumulate and (part is None or part[0] == 0):
            # Which zero_grad has lent. All: at the ends of a part are pages that another part has as well.
            streams.device.take_pages(sums[0])
        _sum(group, slot, written, out, goes.accumulate, stream, streams.device)
        stream.record(slot.free)
        # A carry of the tree: the newest partial sum goes into the one before, as often as `place` says.
        for low in range(goes.buffer, goes.buffer - goes.merges, -1):
            add = streams.device.kernels.reduce.sum_into
            stream.submit(add, sums[low - 1], [sums[low]], 1.0, True)
        stream.record(group.gradient_ready)
        return
    staged = group.arenas["download"].acquire()
    try:
        _reduce_to_host(group, slot, streams, written, staged)
    finally:
        staged.arena.release(staged)


def _reduce_to_host(
    group: ParameterGroup, slot: Slot, streams: Streams, written: Collection[int], staged: Slot
) -> None:
    """The sum goes to the host through `staged`."""
    stream, goes, sums = streams.reduce, group.sum.place, group.sum.buffers
    array = staged.array[: group.layout.shard_size]
    if goes.accumulate:  # what was accumulated so far comes back, so that the sum is the same to the bit
        streams.upload.wait(staged.free)  # the gradient that used the slot before is on the host
        streams.upload.wait(group.gradient_ready)  # so is this group's last one
        streams.upload.submit(streams.device.copy, array, sums[0], label=f"upload gradient {group.label}")
        streams.upload.record(staged.ready)
        stream.wait(staged.ready)  # the sum so far has come from the host
    else:
        stream.wait(staged.free)  # the gradient that used the slot before is on the host
    _sum(group, slot, written, array, goes.accumulate, stream, streams.device)
    stream.record(slot.free)
    stream.record(staged.ready)
    streams.download.wait(staged.ready)  # the sum is complete
    streams.download.submit(streams.device.copy, sums[0], array, label=f"download {group.label}")
    streams.download.record(staged.free)
    streams.download.record(group.gradient_ready)


def _sum(
    group: ParameterGroup,
    slot: Slot,
    written: Collection[int],
    out: Array,
    accumulate: bool,
    stream: Stream,
    device: Device,
) -> None:
    """out = (out if `accumulate`) + scale * sum over the ranks. The same bits for every strategy.

    With copies, the shards are first summed within a shard group, then over those that have copies, where a
    reduce-scatter and an all-gather over the same memory make an all-reduce. Sums go by a binary tree over
    the ranks, so two levels add up like one as long as a shard group's size is a power of two.
    """
    ranks, rows, in_place = group.ranks, group.rows, slot is group.sum.slot
    # The factor is applied once, in float32, to the sum over all ranks: with copies that is the second one.
    scale = 1.0 / group.choices.divide_factor
    wire, kind = _wire(group, slot, out.size * group.layout.shards, written, stream, device)
    if ranks.copies is None and rows is None:
        ranks.reduce.reduce_scatter(
            out, wire, stream=stream, scale=scale, accumulate=accumulate, kind=kind, what=group.called
        )
        return
    own = (
        slot.array[slice(*group.layout.shard_range(ranks.rank))] if rows is None else slot.array[: rows.size]
    )
    if ranks.size > 1 or ranks.copies is None:
        ranks.reduce.reduce_scatter(own, wire, stream=stream, kind=kind, what=group.called)
        wire, kind = own, ""
    if ranks.copies is not None:
        count = own.size // ranks.copies.size
        piece = own[ranks.copies.rank * count : (ranks.copies.rank + 1) * count]
        factor = scale if in_place else 1.0
        ranks.copies.reduce_scatter(piece, wire, stream=stream, scale=factor, kind=kind, what=group.called)
        ranks.copies.all_gather(own, stream=stream, what=group.called)
    if in_place:
        return
    if rows is None:
        stream.submit(device.kernels.reduce.sum_into, out, [own], scale, accumulate)
    else:
        stream.submit(_unpack, group, own, out, scale, accumulate, group.sum.reductions > 0, device)


def _wire(
    group: ParameterGroup, slot: Slot, count: int, written: Collection[int], stream: Stream, device: Device
) -> tuple[Array, str]:
    """The gradients as they are sent, and the kind of their bits if they are sent in 16.

    count: elements in the slot, where there are no rows.
    One buffer serves all groups: everything that touches it is in the reduce stream, in order.
    """
    rows, kind = group.rows, ""
    full = slot.array[: count if rows is None else rows.full]
    if group.key.reduce in dtypes.LOW:
        wire, kind = group.arenas["reduce_wire"].slots[0].array, group.key.reduce
    elif rows is not None:
        wire = group.arenas["packed"].slots[0].array
    else:
        return full, kind
    if rows is None:
        wire = wire[: full.size]
        stream.submit(device.kernels.cast.pack, full, wire, kind)
    else:
        wire = wire[: rows.total]
        uses = np.array([position in written for position in range(rows.uses)], full.dtype)
        stream.submit(_pack, group, full, wire, kind, uses, device)
    return wire, kind


def _pack(
    group: ParameterGroup, full: Array, wire: Array, kind: str, uses: np.ndarray, device: Device
) -> None:
    """Fill the rows: which parameters were used, then the trained elements of each shard."""
    rows = group.rows

    def put(start: int, source: Array) -> None:
        target = wire[start : start + source.size]
        if kind:
            device.kernels.cast.pack(source, target, kind)
        else:
            device.copy(target, source)

    # What lies between moves stays as it was: nobody reads it.
    told = device.upload(uses) if rows.uses else None
    for shard, moves in enumerate(rows.moves):
        begin = shard * rows.size
        if told is not None:
            put(begin, told)
        for move in moves:
            put(begin + move.place, full[move.source : move.source + move.count])


def _unpack(
    group: ParameterGroup,
    row: Array,
    out: Array,
    scale: float,
    accumulate: bool,
    uses_before: bool,
    device: Device,
) -> None:
    """out = (out if `accumulate`) + scale * what the row has of it; other elements are 0, or as they were."""
    add, rows = device.kernels.reduce.sum_into, group.rows
    if not accumulate:
        out.fill(0)
    for move in rows.moves[group.ranks.rank]:
        target, received = out[move.start :], row[move.place :]
        add(target[: move.count], [received[: move.count]], scale, accumulate)
    if rows.uses:
        add(group.sum.uses, [row[: rows.uses]], 1.0, uses_before)
