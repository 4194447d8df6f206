"""check_replicas: ranks that hold copies of a shard (NO_SHARD, the hybrids) must hold the same bits.

They compute the same update from the same reduced gradient, so any difference is a fault: of memory, of the
network, or of a program that wrote to one rank's parameters. Nothing else would ever show it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm import talk
from shardrt.comm.protocol import Communicator
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.process_groups import ProcessGroups
from shardrt.fsdp.schedule import Schedule
from shardrt.fsdp.setup import units_below
from shardrt.nn.module import Module
from shardrt.nn.parameter import along_pipeline
from shardrt.nn.storage import Storage

Array = Any
States = dict[Storage, dict[str, Array]]  # what an optimizer keeps for each storage, by name


class ReplicasDiffer(RuntimeError):
    """Ranks that must hold equal weights or optimizer state do not. The message names parameter and ranks."""


def check_replicas(model: Module, optimizer: Any = None) -> None:
    """Compare what ranks hold copies of: the weights of `model`, and `optimizer`'s state of them. Collective.

    Raises ReplicasDiffer on every rank. Where no shard has copies, and there is no pipeline, it does nothing
    and meets nobody. Else it reads all that this rank holds once, and ranks exchange a few bytes. Copies of
    what two stages of a pipeline use are compared as well.
    """
    others = along_pipeline(model.parameters())
    error = None
    try:
        _check_stage(model, optimizer)
    except ReplicasDiffer as differ:
        error = str(differ)
    for told in [error] if others is None else talk.from_all(others, error):
        if told is not None:
            raise ReplicasDiffer(told)


def _check_stage(model: Module, optimizer: Any) -> None:
    """The same of what this rank's stages hold; raises on all ranks that have them."""
    by_schedule: dict[Schedule, dict[ProcessGroups, list[ParameterGroup]]] = {}
    for unit in units_below(model):
        by_ranks = by_schedule.setdefault(unit.built(), {})
        for group in unit.groups:
            if group.ranks.sharers > 1:
                by_ranks.setdefault(group.ranks, []).append(group)
    states = {} if optimizer is None else {piece.storage: piece.state for piece in optimizer.slices}
    device.current().wait_here()
    odd = _unequal_copies(model, states)
    for schedule, by_ranks in by_schedule.items():
        if by_ranks:
            _check(schedule.control, by_ranks, states)
    if odd:
        raise ReplicasDiffer(odd)


def _unequal_copies(model: Module, states: States) -> str:
    """What is wrong with parameters that two stages use, as this rank and that of the other see it."""
    odd = ""
    for parameter in model.parameters():
        if parameter.place is not None and parameter.place.copies is not None:
            start, stop = parameter.storage.range_of(parameter)
            arrays = {"parameter": parameter.storage.shard, **states.get(parameter.storage, {})}
            hashes = {kind: _hash(array[start:stop]) for kind, array in arrays.items()}
            if talk.agree(parameter.place.copies.communicator("control"), hashes):
                first, last = parameter.place.stages[0], parameter.place.stages[-1]
                odd = odd or (
                    f"copies of parameter {parameter.name!r}, or of the optimizer's state of it, differ "
                    f"between stages {first} and {last}, which must be equal to the bit"
                )
    return odd


def _check(
    control: Communicator, by_ranks: dict[ProcessGroups, list[ParameterGroup]], states: States
) -> None:
    """Groups of one cut are cut alike, so one hash stands for all that a rank holds of them."""
    own = [
        [ranks.holders.rank, _hash("".join(_hash(a) for g in groups for _, a in _arrays(g, states)).encode())]
        for ranks, groups in by_ranks.items()
    ]
    everyone = talk.from_all(control, own)
    odd = {ranks for n, ranks in enumerate(by_ranks) if _unequal([told[n] for told in everyone])}
    if odd:
        groups = [group for ranks in by_ranks if ranks in odd for group in by_ranks[ranks]]
        rows = [row for group in groups for row in _rows(group, states)]
        raise ReplicasDiffer(_told([dict(map(_keyed, told)) for told in talk.from_all(control, rows)]))


def _arrays(group: ParameterGroup, states: States) -> Iterator[tuple[str, Array]]:
    """The used part of this rank's shard, and of each state that goes with it."""
    ranges = [group.range_of(parameter) for parameter in group.parameters]
    start, stop = min(start for start, _ in ranges), max(stop for _, stop in ranges)
    for kind, array in {"parameter": group.shard, **states.get(group, {})}.items():
        yield kind, array[start:stop]


def _hash(values: Array) -> str:
    """Of an array's bits, or of bytes: on the host XXH3-128, elsewhere their sum, which a flip changes."""
    from xxhash import xxh3_128_hexdigest

    if isinstance(values, bytes):
        return xxh3_128_hexdigest(values)
    if device.on_host(values):
        return xxh3_128_hexdigest(np.ascontiguousarray(values).view(np.uint8))
    return str(int(values.view(f"uint{8 * values.dtype.itemsize}").sum(dtype=np.uint64)))


def _unequal(told: list[list]) -> bool:
    """Whether two ranks that hold the same shard have other hashes."""
    return len({tuple(pair) for pair in told}) > len({rank for rank, _ in told})


def _rows(group: ParameterGroup, states: States) -> Iterator[list]:
    """[parameter, kind, this rank's place among those that share it, hash] of each piece."""
    for parameter in group.parameters:
        start, stop = group.range_of(parameter)
        for kind, array in {"parameter": group.shard, **states.get(group, {})}.items():
            yield [parameter.name, kind, group.ranks.holders.rank, _hash(array[start:stop])]


def _keyed(row: list) -> tuple[tuple, str]:
    return tuple(row[:3]), row[3]


def _told(everyone: list[dict[tuple, str]]) -> str:
    """What differs first, and between which ranks: the fewest, which are likely the wrong ones, first."""
    different = []
    for key in dict.fromkeys(key for told in everyone for key in told):
        ranks: dict[str, list[int]] = {}
        for rank, told in enumerate(everyone):
            if key in told:
                ranks.setdefault(told[key], []).append(rank)
        if len(ranks) > 1:
            different.append((key, sorted(ranks.values(), key=len)))
    if not different:
        return "ranks hold unequal copies of a shard, which changed while they were compared"
    (name, kind, _), parts = different[0]
    what = f"parameter {name!r}" if kind == "parameter" else f"the optimizer's {kind!r} of parameter {name!r}"
    sides = " and ".join(f"rank{'s' * (len(part) > 1)} {', '.join(map(str, part))}" for part in parts)
    more = f"; {len(different) - 1} more arrays differ" * (len(different) > 1)
    return f"copies of {what} differ between {sides}, which must be equal to the bit{more}"
