"""Checks every call of a plan once, with known values, before anything is timed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shardrt.dtypes import LOW

from ..harness.values import count_wrong, fill, poison, values
from .plan import SLICED, Item
from .run import Player, issue
from .trace import MESSAGES

Array = Any
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
    count = source.size // size if item.call in SLICED else source.size
    own = slice(rank * count, (rank + 1) * count)
    put: _Given | None = (source, partial(values, rank, round_=_ROUND, dtype=item.dtype))
    if item.call in ("all_gather", "gather"):
        put = source[own], put[1]
    if item.call in ("broadcast", "scatter") and rank != item.root:
        put = None
    if item.call == "gather" and rank != item.root:
        return put, None, None
    found = target[: source.size] if item.call == "all_to_all" else target
    if item.call in ("scatter", "reduce_scatter"):
        found = target[own] if item.call == "scatter" else target[:count]
    expected = _EXPECTED[item.call]

    def right(start: int, stop: int) -> np.ndarray:
        indices = np.arange(start, stop, dtype=np.uint64)
        return expected(item, rank, size, indices, np.uint64(count))

    return put, found, right


def _gathered(item: Item, rank: int, size: int, indices: np.ndarray, count: np.uint64) -> np.ndarray:
    return values(indices // count, indices % count, _ROUND, item.dtype)


def _summed(item: Item, rank: int, size: int, indices: np.ndarray, count: np.uint64) -> np.ndarray:
    dtype = "float32" if item.dtype in LOW else item.dtype
    return np.sum([values(peer, indices, _ROUND, dtype) for peer in range(size)], axis=0, dtype=dtype)


def _own_summed(item: Item, rank: int, size: int, indices: np.ndarray, count: np.uint64) -> np.ndarray:
    return _summed(item, rank, size, indices + np.uint64(rank) * count, count)


def _of_root(item: Item, rank: int, size: int, indices: np.ndarray, count: np.uint64) -> np.ndarray:
    return values(item.root, indices, _ROUND, item.dtype)


def _own_of_root(item: Item, rank: int, size: int, indices: np.ndarray, count: np.uint64) -> np.ndarray:
    return _of_root(item, rank, size, indices + np.uint64(rank) * count, count)


def _exchanged(item: Item, rank: int, size: int, indices: np.ndarray, count: np.uint64) -> np.ndarray:
    return values(indices // count, indices % count + np.uint64(rank) * count, _ROUND, item.dtype)


_EXPECTED = {
    "all_gather": _gathered,
    "gather": _gathered,
    "reduce_scatter": _own_summed,
    "all_reduce": _summed,
    "reduce": _summed,
    "broadcast": _of_root,
    "scatter": _own_of_root,
    "all_to_all": _exchanged,
}


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
