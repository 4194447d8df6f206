"""Optimizer: parameter groups over flat storages. What an update computes is in sgd.py and adamw.py.

An optimizer never sees a parameter's shape. Each storage (a sharded unit's, or one plain parameter's) is a
flat 1-D array of which every group owns some ranges; one fused kernel pass updates all of them: here, or, for
storages on the host and during backward, in the streams of offload.py.
"""

import weakref
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from shardrt import autograd, device
from shardrt.nn import elsewhere
from shardrt.nn.module import Module, check_set_to_none
from shardrt.nn.parameter import Parameter
from shardrt.optim.offload import Updates
from shardrt.optim.slices import Slice, Update, slices_of

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


class Optimizer:
    """Base class: groups, zero_grad, step.

    params: Parameters, or dicts with "params" and settings of their own. Build it after fully_shard.
    `param_groups` is the list of groups; schedules change its "lr".
    settings: those that a group may have ("lr", "weight_decay", ...), each with its value where it has not.
    state: names of the arrays, as long as each shard, that an update keeps.
    in_backward: update each sharded unit as soon as backward has reduced its gradient, with the settings that
    its group has then; step() only waits. Not together with anything that needs all gradients before the
    first update: clipping, GradScaler. Plain parameters are updated in step().

    Raises ValueError for no parameters, a parameter in two groups, an unknown or negative setting, other
    parameters of a unit than those that another optimizer has, or an update on the host of what is not all
    there.
    """

    def __init__(
        self,
        params: Iterable[Parameter | dict],
        settings: dict[str, Any],
        *,
        state: tuple[str, ...] = (),
        in_backward: bool = False,
    ) -> None:
        given = list(params)
        if not given:
            raise ValueError(f"{type(self).__name__}: params is empty")
        grouped = given if isinstance(given[0], dict) else [{"params": given}]
        self.param_groups = [_group(settings, group) for group in grouped]
        self.slices = slices_of(self.param_groups)
        for piece in self.slices:
            piece.claim(self)
        self.in_backward = in_backward
        self._device = device.current()
        for piece in self.slices:
            piece.state = {name: piece.storage.new_state(name) for name in state}
        on_device = all(piece.storage.placement.everything_on_device for piece in self.slices)
        self.updates = None if on_device and not in_backward else Updates(self._device, self.slices)
        if in_backward:
            for index, piece in enumerate(self.slices):
                # Weak, and by index: a storage must not keep an optimizer and its state alive.
                piece.storage.on_gradient = partial(_apply_now, weakref.ref(self), index)

    def __getattr__(self, name: str) -> Any:
        raise elsewhere.missing(self, name, elsewhere.OPTIMIZER)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. Raises ValueError for set_to_none=False."""
        check_set_to_none(set_to_none)
        for piece in self.slices:
            piece.storage.zero_grad()

    def step(self) -> None:
        """Update every storage that has a gradient, if backward has not done it already."""
        here = []
        for piece in self.slices:
            if not piece.applied and piece.storage.gradient is not None:
                piece.storage.before_write()
            if piece.applied:
                piece.applied = piece.storage.applied = False
            elif piece.storage.gradient is None:
                continue
            elif piece.storage.placement.everything_on_device:
                here.append(piece)
            else:
                self._issue(piece)
        if here:  # beside those that were issued
            self._update_here(here)
        if self.updates is not None:
            self.updates.settle()

    def numbers(self, group: dict, steps: int) -> tuple[float, ...]:
        """What the kernel wants to know of a range of `group` in step `steps`, from 1."""
        raise NotImplementedError

    def update(self, kernels: ModuleType, update: Update) -> None:
        """Run the kernel of this optimizer."""
        raise NotImplementedError

    def _update_here(self, pieces: list[Slice]) -> None:
        """In the compute stream, all with one copy of their numbers. May be captured in a graph."""

        def count() -> None:
            for piece in pieces:
                piece.steps += 1

        def count_replay() -> None:
            count()
            for piece in pieces:
                piece.storage.modified()

        graph = self._device.capturing
        if graph is None:
            count()
        else:
            graph.before_replay(count_replay)
        ranges = self._device.numbers(lambda: np.concatenate([self._ranges(piece) for piece in pieces]))
        stop = 0
        for piece in pieces:
            start, stop = stop, stop + len(piece.starts)
            if piece.storage.gradient_ready is not None:
                self._device.current_stream.wait(piece.storage.gradient_ready)  # it may still be reduced
            self.update(self._device.kernels, Update(piece.arrays(), ranges[start:stop]))
            piece.storage.modified()

    def _ranges(self, piece: Slice) -> Array:
        return piece.ranges([self.numbers(group, piece.steps) for group in self.param_groups])

    def _issue(self, piece: Slice) -> None:
        piece.steps += 1
        self.updates.issue(piece, Update(piece.arrays(), self._ranges(piece)), self._update_there)
        piece.storage.modified()

    def _update_there(self, kernels: ModuleType, update: Update) -> None:
        """In a stream of offload.py, on the device of its kernels."""
        there = device.of(update.arrays["shard"])
        self.update(kernels, replace(update, ranges=there.upload(update.ranges)))

    def _on_gradient(self, piece: Slice) -> None:
        """Backward has issued the last work on the gradient of `piece`."""
        if piece.applied:
            raise RuntimeError(
                f"{type(self).__name__}(in_backward=True): a second backward has come to the gradient of "
                f"{piece.name!r} before step(), and the first has updated the parameters with it already; "
                "accumulate with no_sync for all but the last micro-batch"
            )
        piece.applied = piece.storage.applied = True
        self._issue(piece)
        run = autograd.running()
        if run is not None:
            run.at_end(self.updates.settle)  # what comes after backward finds the new parameters


def _apply_now(optimizer: weakref.ref, index: int) -> None:
    """The hook of a storage: nothing if the optimizer that set it is gone."""
    alive = optimizer()
    if alive is not None:
        alive._on_gradient(alive.slices[index])


def _group(settings: dict[str, Any], own: dict) -> dict:
    unknown = sorted(own.keys() - settings.keys() - {"params"})
    if unknown:
        known = ", ".join(map(repr, settings))
        raise ValueError(f"parameter group: unknown settings {unknown}; known: {known}")
    group = {**settings, **own, "params": list(own["params"])}
    for name in settings.keys() & {"lr", "weight_decay", "eps"}:
        if not group[name] >= 0:
            raise ValueError(f"optimizer: {name} must not be negative, got {group[name]}")
    return group
