"""Optimizer: parameter groups over flat storages. What an update computes is in sgd.py and adamw.py.

An optimizer never sees a parameter's shape. Each storage (a sharded unit, or one plain parameter) is a flat
1-D array of which every group owns some ranges; one fused kernel pass updates all of them.
"""

from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

import numpy as np

from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import Storage
from shardrt.nn.utils import merged

Array = Any

NO_DECAY = ("*bias", "*norm*")


def decay_groups(module: Module, weight_decay: float, no_decay: tuple[str, ...] = NO_DECAY) -> list[dict]:
    """Two parameter groups by name: decayed, and (biases, norms) not.

    no_decay: shell patterns matched against each full parameter name, in lower case.
    """
    groups = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in module.named_parameters():
        groups[any(fnmatch(name.lower(), pattern) for pattern in no_decay)]["params"].append(parameter)
    return [group for group in groups if group["params"]]


class Slice:
    """What an optimizer keeps for one storage: its ranges by group, its state arrays, its step count."""

    __slots__ = ("storage", "starts", "stops", "groups", "state", "steps")

    def __init__(self, storage: Storage, ranges: list[tuple[int, int, int]]) -> None:
        self.storage = storage
        self.starts = np.array([start for start, _, _ in ranges], np.int64)
        self.stops = np.array([stop for _, stop, _ in ranges], np.int64)
        self.groups = [group for _, _, group in ranges]
        self.state: dict[str, Array] = {}
        self.steps = 0


class Optimizer:
    """Base class: groups, zero_grad, step.

    params: Parameters, or dicts with "params" and settings of their own ("lr", "weight_decay"). Build it
    after fully_shard. `param_groups` is the list of groups; schedules change its "lr".

    Raises ValueError for no parameters, a parameter in two groups, or an unknown or negative setting.
    """

    def __init__(self, params: Iterable[Parameter | dict], *, lr: float, weight_decay: float) -> None:
        given = list(params)
        if not given:
            raise ValueError(f"{type(self).__name__}: params is empty")
        defaults = {"lr": lr, "weight_decay": weight_decay}
        grouped = given if isinstance(given[0], dict) else [{"params": given}]
        self.param_groups = [_group({**defaults, **group}) for group in grouped]
        self.slices = _slices(self.param_groups)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for piece in self.slices:
            piece.storage.zero_grad()

    def step(self) -> None:
        """Update every storage that has a gradient."""
        for piece in self.slices:
            gradient = piece.storage.gradient
            if gradient is None:
                continue
            piece.steps += 1
            lrs = np.array([self.param_groups[g]["lr"] for g in piece.groups], np.float64)
            decays = np.array([self.param_groups[g]["weight_decay"] for g in piece.groups], np.float64)
            self.update(piece, gradient, lrs, decays)

    def update(self, piece: Slice, gradient: Array, lrs: Array, decays: Array) -> None:
        """Update one storage; lrs and decays hold one number per range of `piece`."""
        raise NotImplementedError


def _group(group: dict) -> dict:
    unknown = sorted(group.keys() - {"params", "lr", "weight_decay"})
    if unknown:
        raise ValueError(f"parameter group: unknown settings {unknown}; known: 'lr', 'weight_decay'")
    for name in ("lr", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"optimizer: {name} must not be negative, got {group[name]}")
    group["params"] = list(group["params"])
    return group


def _slices(groups: list[dict]) -> list[Slice]:
    owned: dict[Storage, dict[int, list[tuple[int, int]]]] = {}
    seen: set[int] = set()
    for index, group in enumerate(groups):
        for parameter in group["params"]:
            if id(parameter) in seen:
                raise ValueError(f"optimizer: parameter {parameter.name!r} is given twice")
            seen.add(id(parameter))
            if parameter.requires_grad:
                start, stop, _ = parameter.storage.range_of(parameter)
                owned.setdefault(parameter.storage, {}).setdefault(index, []).append((start, stop))
    slices = []
    for storage, by_group in owned.items():
        ranges = [(start, stop, g) for g, pieces in by_group.items() for start, stop in merged(pieces)]
        slices.append(Slice(storage, sorted(ranges)))
    return slices
