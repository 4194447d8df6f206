"""Muon's optimizer state: a momentum for every parameter, AdamW's second moment for AdamW's parameters alone.

The second moments of a shard are one array without places for hidden matrices. So an update of AdamW's
parameters goes run by run: a part of the shard, and the part of the second moments that belongs to it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardrt import device
from shardrt.device import Array
from shardrt.nn.storage import Storage
from shardrt.nn.utils import merged
from shardrt.optim.slices import Slice

__all__ = ["Run", "State", "as_shard", "names_of", "place_of", "runs_of"]

ALIGNMENT = 16  # elements: where parameters begin in a shard (fsdp/layout.py)
MATRIX = {"m": "momentum_buffer"}  # state of a hidden matrix, and its name in torch.optim.Muon


@dataclass(frozen=True)
class Run:
    """The second moments of shard[start:stop] begin at `place` of their array."""

    start: int
    stop: int
    place: int

    def arrays(self, piece: Slice) -> dict[str, Array]:
        """What an update of this part reads and writes, 1-D and equally long."""
        storage, part = piece.storage, slice(self.start, self.stop)
        second = piece.state["v"][self.place : self.place + self.stop - self.start]
        return {
            "shard": storage.shard[part],
            "gradient": storage.gradient[part],
            "m": piece.state["m"][part],
            "v": second,
        }


class State(dict[str, Array]):
    """The state arrays of a Slice.

    runs: the parts of the shard that "v" has.
    """

    def __init__(self, arrays: Mapping[str, Array], runs: tuple[Run, ...]) -> None:
        super().__init__(arrays)
        self.runs = runs

    def __or__(self, others: Mapping[str, Array]) -> "State":
        return State(dict(self) | dict(others), self.runs)


def runs_of(size: int, hidden: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """The runs of a shard of `size` elements. hidden: ranges of hidden matrices, whose padding is theirs."""
    holes = merged((start, min(size, -(-stop // ALIGNMENT) * ALIGNMENT)) for start, stop in hidden)
    runs, begin, place = [], 0, 0
    for start, stop in [*holes, (size, size)]:
        if begin < start:
            runs.append(Run(begin, start, place))
            place += start - begin
        begin = stop
    return tuple(runs)


def elements_of(runs: tuple[Run, ...]) -> int:
    """Elements of the second moments."""
    return sum(run.stop - run.start for run in runs)


def state_of(piece: Slice, hidden: Iterable[tuple[int, int]]) -> State:
    """The state of a slice that has its "m". hidden: ranges of hidden matrices in the shard."""
    storage = piece.storage
    runs = runs_of(storage.shard.size, hidden)
    return State({"m": piece.state["m"], "v": _zeros(storage, elements_of(runs))}, runs)


def names_of(optimizer: Any, group: int) -> dict[str, str]:
    """The state that an optimizer keeps for the parameters of a group, with PyTorch's names of it."""
    names = optimizer.state_names
    if optimizer.param_groups[group].get("use_muon"):
        return {kind: MATRIX.get(kind, theirs) for kind, theirs in names.items() if kind != "v"}
    return names


def place_of(piece: Any, kind: str, start: int, stop: int) -> tuple[int, int]:
    """Where the state of shard[start:stop] lies in the array piece.state[kind]."""
    runs = getattr(piece.state, "runs", ()) if kind == "v" else ()
    for run in runs:
        if run.start <= start and stop <= run.stop:
            return start - run.start + run.place, stop - run.start + run.place
    return start, stop


def as_shard(piece: Any, kind: str) -> Array:
    """A state array as long as the shard: itself, or on the host with zeros for hidden matrices."""
    array, size = piece.state[kind], piece.storage.shard.size
    if array.size == size:
        return array
    values, whole = device.of(array).to_numpy(array), np.zeros(size, array.dtype)
    for run in piece.state.runs:
        whole[run.start : run.stop] = values[run.place : run.place + run.stop - run.start]
    return whole


def _zeros(storage: Storage, count: int) -> Array:
    """An array of optimizer state, on the host where the storage has it there."""
    here, dtype = device.current(), storage.shard.dtype
    if not count:  # all of it is in hidden matrices
        array = here.empty(0, dtype)
    elif storage.offloaded.optimizer_state:
        array = storage.settings.offload.host_buffer(here, count, dtype)
    else:
        array = here.buffer(count, dtype)
    return here.set_tag(array, "optimizer state", getattr(storage, "label", None))
