"""What checkpoints have of error feedback (Quantisation.error_feedback): errors by parameter and host."""

from dataclasses import dataclass
from typing import Any

from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.options.quantised import config_of, hosts_of
from shardrt.nn.extents import Extents

__all__ = ["Errors", "errors_of"]

Array = Any


@dataclass(frozen=True, eq=False)
class Errors:
    """The errors that a rank has of one parameter's gradient.

    label: names the sums that lost them, as "4.1": those of host 1 of 4.
    flat: the array that has them at [start, stop).
    extents: their elements, counted in this rank's shape of the parameter.
    owner: whether this rank saves them; ranks that hold the same ones do not.
    """

    label: str
    flat: Array
    start: int
    stop: int
    extents: Extents
    owner: bool


def errors_of(parameter: Any) -> Errors | None:
    """The errors of a parameter's gradient on this rank; None without any."""
    group = parameter.storage
    arena = group.arenas.get("quantisation_error") if isinstance(group, ParameterGroup) else None
    if arena is None:
        return None
    label, shards, owner = _sent(group)
    layout, start, stop, extents = group.layout, None, 0, ()
    entry = layout.entries[group.position[id(parameter)]]
    for row, shard in enumerate(shards):
        first, last, part = layout.in_shard(entry, shard)
        if part:  # neighbours in the array: a parameter fills all rows but its first and its last
            start = row * layout.shard_size + first if start is None else start
            stop, extents = row * layout.shard_size + last, extents + part
    return None if start is None else Errors(label, arena.slots[0].array, start, stop, extents, owner)


def _sent(group: ParameterGroup) -> tuple[str, range, bool]:
    """(label, the shards whose sums over its host this rank sends, whether this rank saves the errors)."""
    how, rank, shards = config_of(group), group.ranks.rank, group.layout.shards
    if how is None:  # copies: this rank's shard
        copies = group.ranks.replicate
        return f"{copies.size}.{copies.rank}", range(rank, rank + 1), True
    hosts, size = hosts_of(group, how)
    return f"{hosts}.{rank // size}", range(rank % size, shards, size), group.ranks.owner
