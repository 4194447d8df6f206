"""Reduces the gradients of a group. Each function issues casts and collectives in the reduce stream.

The schedule decides when to call it. Steps in brackets depend on the group:

    [float32 -> 16 bits] -> reduce-scatter -> [copies: reduce-scatter, all-gather]
"""

from typing import Any

from shardrt import dtypes
from shardrt.device.arena import Slot
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.streams import Streams

Array = Any


def reduce_scatter(
    group: ParameterGroup, slot: Slot, full: Array, out: Array, accumulate: bool, streams: Streams
) -> None:
    """Compute out = (out if `accumulate`) + scale * this rank's shard of the sum over all ranks.

    With copies, shards are first summed within a shard group, then over the ranks that hold copies (see
    `sum_over_ranks` for the bits). `scale` is applied once, in float32, to the sum over all ranks.

    full: the gradients, a part of `slot`. It may be overwritten.
    """
    wire, kind = full, ""
    if group.key.reduce in dtypes.LOW:
        wire, kind = wire_of(group)[: full.size], group.key.reduce
        streams.reduce.submit(streams.device.kernels.cast.pack, full, wire, kind)
    scale = 1.0 / group.choices.divide_factor
    if group.ranks.replicate is None:
        group.ranks.reduce.reduce_scatter(
            out, wire, stream=streams.reduce, scale=scale, accumulate=accumulate, kind=kind, tag=group.tag
        )
        return
    output = slot.array[slice(*group.layout.shard_range(group.ranks.rank))]
    in_place = slot is group.sharded_gradient.slot
    sum_over_ranks(group, output, wire, kind, streams, scale if in_place else 1.0)
    if not in_place:
        streams.reduce.submit(streams.device.kernels.reduce.sum_into, out, [output], scale, accumulate)


def wire_of(group: ParameterGroup) -> Array:
    """The 16-bit gradient buffer (options/low_precision.py). Only the reduce stream uses it, in order."""
    return group.arenas["reduce_wire"].slots[0].array


def sum_over_ranks(
    group: ParameterGroup, output: Array, wire: Array, kind: str, streams: Streams, scale: float = 1.0
) -> None:
    """Write this rank's shard of the sum of `wire` over all ranks to `output`.

    kind: the 16-bit type of `wire`; "" if it is not 16-bit.
    scale: factor for the sum over copies.

    Ranks that hold copies all-reduce `output`: a reduce-scatter and an all-gather on the same memory. Each
    reduction adds by a binary tree over its ranks. If the size of a shard group is a power of two, the two
    levels together are the tree over all ranks. The sum is then bitwise identical.
    """
    ranks, stream = group.ranks, streams.reduce
    if ranks.size > 1 or ranks.replicate is None:
        ranks.reduce.reduce_scatter(output, wire, stream=stream, kind=kind, tag=group.tag)
        wire, kind = output, ""
    if ranks.replicate is not None:
        count = output.size // ranks.replicate.size
        piece = output[ranks.replicate.rank * count : (ranks.replicate.rank + 1) * count]
        ranks.replicate.reduce_scatter(piece, wire, stream=stream, scale=scale, kind=kind, tag=group.tag)
        ranks.replicate.all_gather(output, stream=stream, tag=group.tag)
