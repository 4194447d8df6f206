"""check_replicas: compares the ranks that hold copies of a shard (NO_SHARD, the hybrids).

These ranks compute the same update from the same reduced gradient, so their copies must be bitwise identical.
A difference is a fault of memory, of the network, or of a program that wrote to one rank's parameters. No
other check would find it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm import objects
from shardrt.comm.protocol import Communicator
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.process_groups import ProcessGroups
from shardrt.fsdp.schedule import Schedule
from shardrt.fsdp.setup import units_below
from shardrt.nn.module import Module
from shardrt.nn.placement import along_pipeline
from shardrt.nn.storage import Storage

Array = Any
Slices = dict[Storage, Any]  # storage -> the optimizer's Slice of it


class ReplicasDiffer(RuntimeError):
    """Copies of weights or optimizer state differ between ranks. The message names parameter and ranks."""


def check_replicas(model: Module, optimizer: Any = None) -> None:
    """Compare ranks' copies of the weights of `model` and of their optimizer state. Collective.

    Each rank reads all that it holds once, and ranks exchange a few bytes. Copies of parameters that two
    pipeline stages share are compared as well. If there are neither copies nor a pipeline, the call does
    nothing and no rank waits.

    Args:
        model: a sharded model.
        optimizer: its optimizer; None compares weights only.

    Raises:
        ReplicasDiffer: on every rank, if copies differ.
    """
    others = along_pipeline(model.parameters())
    error = None
    try:
        _check_stage(model, optimizer)
    except ReplicasDiffer as differ:
        error = str(differ)
    for message in [error] if others is None else objects.all_gather_object(others, error):
        if message is not None:
            raise ReplicasDiffer(message)


def _check_stage(model: Module, optimizer: Any) -> None:
    """Compare the copies of this rank's stages. Raises ReplicasDiffer on all ranks of these stages."""
    by_schedule: dict[Schedule, dict[ProcessGroups, list[ParameterGroup]]] = {}
    for unit in units_below(model):
        by_ranks = by_schedule.setdefault(unit.built(), {})
        for group in unit.groups:
            if group.ranks.replicas > 1:
                by_ranks.setdefault(group.ranks, []).append(group)
    slices = {} if optimizer is None else {piece.storage: piece for piece in optimizer.slices}
    device.current().wait_here()
    odd = _unequal_copies(model, slices)
    for schedule, by_ranks in by_schedule.items():
        if by_ranks:
            _check(schedule.control, by_ranks, slices)
    if odd:
        raise ReplicasDiffer(odd)


def _unequal_copies(model: Module, slices: Slices) -> str:
    """A message if the copies of a parameter that two stages share differ, else "". Collective over both."""
    odd = ""
    for parameter in model.parameters():
        if parameter.pipeline is not None and parameter.pipeline.copies is not None:
            storage = parameter.storage
            arrays = _parts(storage, slices.get(storage), *storage.range_of(parameter))
            hashes = {kind: _hash(array) for kind, array in arrays}
            if objects.differing_ranks(parameter.pipeline.copies.communicator("control"), hashes):
                first, last = parameter.pipeline.stages[0], parameter.pipeline.stages[-1]
                odd = odd or (
                    f"check_replicas: parameter {parameter.name!r}, or its optimizer state, differs "
                    f"between stages {first} and {last}; both copies must be bitwise identical"
                )
    return odd


def _check(
    control: Communicator, by_ranks: dict[ProcessGroups, list[ParameterGroup]], slices: Slices
) -> None:
    """Raise ReplicasDiffer if copies differ: first by one hash for all groups that are cut alike."""
    mine = [
        [
            ranks.whole_communicator.rank,
            _hash("".join(_hash(a) for g in groups for _, a in _arrays(g, slices)).encode()),
        ]
        for ranks, groups in by_ranks.items()
    ]
    everyone = objects.all_gather_object(control, mine)
    odd = {ranks for n, ranks in enumerate(by_ranks) if _unequal([pairs[n] for pairs in everyone])}
    if odd:
        groups = [group for ranks in by_ranks if ranks in odd for group in by_ranks[ranks]]
        rows = [row for group in groups for row in _rows(group, slices)]
        hashes = [
            {(name, kind, holder): hash_ for name, kind, holder, hash_ in of_rank}
            for of_rank in objects.all_gather_object(control, rows)
        ]
        raise ReplicasDiffer(_message(hashes))


def _arrays(group: ParameterGroup, slices: Slices) -> Iterator[tuple[str, Array]]:
    """(kind, used part) of this rank's shard and of each array of its optimizer state."""
    ranges = [group.range_of(parameter) for parameter in group.parameters]
    start, stop = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    yield from _parts(group, slices.get(group), start, stop)


def _parts(storage: Storage, piece: Any, start: int, stop: int) -> Iterator[tuple[str, Array]]:
    """(kind, elements [start, stop)) of the shard and of each array of its optimizer state."""
    yield "parameter", storage.shard[start:stop]
    if piece is not None:
        for kind, array in piece.state.items():
            yield kind, array[slice(*piece.state_range(kind, start, stop))]


def _hash(values: Array) -> str:
    """A hash of an array or of bytes: XXH3-128 on the host; on a device the integer sum of the words.

    A flipped bit changes the sum.
    """
    from xxhash import xxh3_128_hexdigest

    if isinstance(values, bytes):
        return xxh3_128_hexdigest(values)
    if device.on_host(values):
        return xxh3_128_hexdigest(np.ascontiguousarray(values).view(np.uint8))
    return str(int(values.view(f"uint{8 * values.dtype.itemsize}").sum(dtype=np.uint64)))


def _unequal(pairs: list[list]) -> bool:
    """Whether ranks have different hashes of the same shard. pairs: [shard, hash] of each rank."""
    return len({tuple(pair) for pair in pairs}) > len({shard for shard, _ in pairs})


def _rows(group: ParameterGroup, slices: Slices) -> Iterator[list]:
    """[parameter, kind, index of this rank's shard, hash] of each parameter and each array of its state."""
    for parameter in group.parameters:
        start, stop = group.range_of(parameter)
        for kind, array in _parts(group, slices.get(group), start, stop):
            yield [parameter.name, kind, group.ranks.whole_communicator.rank, _hash(array)]


def _message(everyone: list[dict[tuple, str]]) -> str:
    """The error message: the first array that differs, and the ranks on each side.

    everyone: for each rank, (parameter, kind, shard) -> hash. The smaller side, likely the wrong one, comes
    first.
    """
    different = []
    for key in dict.fromkeys(key for hashes in everyone for key in hashes):
        ranks: dict[str, list[int]] = {}
        for rank, hashes in enumerate(everyone):
            if key in hashes:
                ranks.setdefault(hashes[key], []).append(rank)
        if len(ranks) > 1:
            different.append((key, sorted(ranks.values(), key=len)))
    if not different:
        return "copies of a shard differ between ranks, but changed while they were compared"
    (name, kind, _), parts = different[0]
    what = f"parameter {name!r}" if kind == "parameter" else f"the optimizer's {kind!r} of parameter {name!r}"
    sides = " and ".join(
        f"{'ranks' if len(part) > 1 else 'rank'} {', '.join(map(str, part))}" for part in parts
    )
    more = f"; {len(different) - 1} more arrays differ" if len(different) > 1 else ""
    return f"copies of {what} differ between {sides}, but must be bitwise identical{more}"
