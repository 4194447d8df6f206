"""Checks every call of a plan once, with known values, before anything is timed."""

from collections.abc import Callable
from functools import partial

import numpy as np

from shardrt.device import Array

from ..collectives.ops import NOBODY, NONE, OPS, Case
from ..harness.values import count_wrong, fill, poison, values
from .plan import SUMS, Item
from .run import Player, issue
from .trace import MESSAGES

_ROUND = 1


def wrong_elements(player: Player) -> dict[str, int]:
    """By call (Item.what), the elements that are wrong on this rank. Collective."""
    calls: dict = {key: {} for key in player.communicators}
    for _, item in player.plan.communication:
        if item.call != "barrier":
            calls[item.key].setdefault(item.what + str(item.sent), item)
    wrong: dict[str, int] = {}
    for key in calls:  # in one order on all ranks, as the player has them
        for item in calls[key].values():
            wrong[item.what] = wrong.get(item.what, 0) + _wrong(player, item)
    return wrong


def _wrong(player: Player, item: Item) -> int:
    communicator, device = player.communicators[item.key], player.device
    stream = device.current_stream
    source, target = player.buffers[item.key].of(item)
    for array in (source, target):
        poison(array)  # a shared one by every rank
    communicator.barrier(stream=stream)
    given, found, expected = _sides(item, communicator.rank, communicator.size, source, target)
    if given is not None:
        fill(device, *given)
    communicator.barrier(stream=stream)
    issue(item, communicator, player.buffers[item.key], stream)
    stream.synchronize()
    wrong = 0 if found is None else count_wrong(device, found, expected)
    communicator.barrier(stream=stream)
    return wrong


_Given = tuple[Array, Callable[[np.ndarray], np.ndarray]]
_Sides = tuple[_Given | None, Array | None, Callable[[int, int], np.ndarray] | None]


def _sides(item: Item, rank: int, size: int, source: Array, target: Array) -> _Sides:
    """What a rank puts in and where, where its result lies, and what that must be."""
    if item.call in MESSAGES:
        of_sender = partial(values, 0, round_=_ROUND, dtype=item.dtype)
        if item.call == "send":
            return (source, of_sender), None, None
        return None, source, lambda start, stop: of_sender(np.arange(start, stop, dtype=np.uint64))
    if item.sent:
        return _unequal(item, rank, size, source, target)
    sums, op = item.call in SUMS, OPS[item.call]
    if item.call == "reduce":
        op = OPS["all_reduce"]
    case = Case(
        op, item.dtype, "in", item.nbytes, size, "sum" if sums else NONE, item.root if op.rooted else NOBODY
    )
    count = case.count
    own = slice(rank * count, (rank + 1) * count)
    whole_given = item.call not in ("all_gather", "gather")
    given = source if whole_given else source[own]
    if item.call == "scatter":
        target = target[own]
    elif item.call == "reduce_scatter":
        target = target[: source.size // size]
    elif item.call == "all_to_all":
        target = target[: source.size]
    put = (given, lambda indices: case.given(rank, indices, _ROUND)) if case.gives(rank) else None
    if not case.gets(rank):
        return put, None, None
    return put, target, lambda start, stop: case.expected(rank, start, stop, _ROUND)


def _unequal(item: Item, rank: int, size: int, source: Array, target: Array) -> _Sides:
    """An all_to_all of unequal parts: each rank sends the same part of numbers to all, as far as it goes."""

    def parts(counts: tuple[int, ...], of: Callable[[int], int], start: int, stop: int) -> np.ndarray:
        rows = [
            values(of(peer), np.arange(count, dtype=np.uint64), _ROUND, item.dtype)
            for peer, count in enumerate(counts)
        ]
        return np.concatenate(rows)[start:stop]

    def put(indices: np.ndarray) -> np.ndarray:
        return parts(item.sent, lambda peer: rank * size + peer, int(indices[0]), int(indices[-1]) + 1)

    given = (source, put) if source.size else None
    return given, target, partial(parts, item.received, lambda peer: peer * size + rank)


