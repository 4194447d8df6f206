"""Optimizer: parameter groups over flat storages. The updates themselves are in sgd.py, adamw.py and lion.py.

An optimizer never sees a parameter's shape. Each storage (a sharded unit's, or one plain parameter's) is a
flat 1-D array of which every group owns some ranges; one fused kernel pass updates all of them: here, or, for
storages on the host and during backward, in the streams of offload.py.
"""

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from shardrt import autograd, device
from shardrt.device import Array
from shardrt.nn import elsewhere
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.public import check_set_to_none, parameters_in
from shardrt.nn.storage import Storage
from shardrt.optim.offload import Updates
from shardrt.optim.slices import (
    BITS,
    Cut,
    Member,
    Slice,
    Update,
    by_storage,
    members_of,
    refuse_partly_sharded,
)

__all__ = ["Optimizer"]


NO_DECAY = ("*bias", "*norm*")


def decay_groups(module: Module, weight_decay: float, no_decay: tuple[str, ...] = NO_DECAY) -> list[dict]:
    """Two parameter groups by name: decayed, and (biases, norms) not.

    Args:
        no_decay: shell patterns matched against each full parameter name, in lower case.

    Example:
        >>> from shardrt import nn, optim
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> optimizer = optim.AdamW(optim.decay_groups(model, 0.1))
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [(2, 0.1), (2, 0.0)]
    """
    groups = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in module.named_parameters():
        groups[any(fnmatch(name.lower(), pattern) for pattern in no_decay)]["params"].append(parameter)
    return [group for group in groups if group["params"]]


class Optimizer:
    """Base class: groups, zero_grad, step.

    Build it after fully_shard.

    Parameters that are absent (nn/placement.py) are left to the ranks that have them.
    A parameter that is frozen has no state until it is trained. A subclass that `rounds` writes "rounded"
    of an Update too, where it is there.

    Args:
        params: Parameters, or dicts with "params" and settings of their own. `param_groups` is the list of
            groups; schedules change its "lr".
        settings: those that a group may have ("lr", "weight_decay", ...), each with its value where it has
            not.
        state: names of the arrays, as long as each shard, that an update keeps, each with PyTorch's name of
            it.
        low_state: state arrays kept in bfloat16, as bits, for float32 parameters.
        constants: settings that all groups share, by PyTorch's names.
        in_backward: update each sharded unit as soon as backward has reduced its gradient, with the settings
            that its group has then; step() only waits. Not together with anything that needs all gradients
            before the first update: clipping, GradScaler. Plain parameters are updated in step().

    Raises:
        TypeError: for other than Parameters.
        ValueError: for none of them, a parameter in two groups, an unknown or negative setting, parameters of
            a unit of which another optimizer has others, or an update on the host of shards and state that
            are not all there.
    """

    rounds = False
    slice_type = Slice

    def __init__(
        self,
        params: Iterable[Parameter | dict],
        settings: dict[str, Any],
        *,
        state: dict[str, str] | None = None,
        low_state: Collection[str] = (),
        constants: dict[str, Any] | None = None,
        in_backward: bool = False,
    ) -> None:
        given = list(params) if isinstance(params, Iterable) else [params]
        if not given:
            raise ValueError(f"{type(self).__name__}: params is empty; pass model.parameters()")
        self.in_backward = in_backward
        self.state_names = state or {}
        self._low_state = frozenset(low_state)
        self.updates: Updates | None = None
        self.param_groups: list[dict] = []
        self.constants = {} if constants is None else constants
        self._settings = settings
        self._device = device.current()
        self.slices: list[Slice] = []  # the updated slices, storage by storage
        self._waiting: list[Member] = []  # frozen, and in no slice
        self._add(given if isinstance(given[0], dict) else [{"params": given}])

    def __getattr__(self, name: str) -> Any:
        raise elsewhere.missing(self, name, elsewhere.OPTIMIZER)

    def take_in(self, also: Collection[int] = ()) -> None:
        """Give state to parameters that were frozen until now, and are trained or have their id in `also`."""
        wanted = [member for member in self._waiting if member[0].requires_grad or id(member[0]) in also]
        if wanted:
            self._take_in(wanted)

    def add_param_group(self, param_group: dict) -> None:
        """Update more parameters from now on: a dict as `params` may have. ValueError as from the class."""
        self._add([param_group])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients.

        Raises:
            ValueError: for set_to_none=False.
        """
        check_set_to_none(set_to_none)
        self.take_in()
        for piece in self.slices:
            piece.storage.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, if backward has not done it already.

        Args:
            closure: computes the loss again, with its gradients, before the update; its result is returned.
        """
        loss = None
        if closure is not None:
            with autograd.enable_grad():
                loss = closure()
        self.take_in()
        here = []
        for piece in self.slices:
            if not piece.storage.applied and piece.storage.gradient is not None:
                piece.storage.before_write()
            if piece.storage.applied:
                piece.storage.applied = False
            elif piece.storage.gradient is None:
                continue
            elif piece.storage.offloaded.everything_on_device:
                here.append(piece)
            else:
                self._issue(piece)
        if here:  # next to those that were issued
            self._update_here(here)
        if self.updates is not None:
            self.updates.wait()
        self._device.step_done()
        return loss

    def numbers(self, group: dict, steps: int) -> tuple[float, ...]:
        """The kernel's numbers for a range of `group` in step `steps`, from 1."""
        raise NotImplementedError

    def update(self, kernels: ModuleType, update: Update) -> None:
        """Run the kernel of this optimizer."""
        raise NotImplementedError

    def state_names_of(self, group: int) -> dict[str, str]:
        """`state_names` that the parameters of a group have."""
        return self.state_names

    def check(self, group: dict) -> None:
        """Raise ValueError for settings of a group that can't be."""

    def checked(self, own: dict) -> dict:
        """A group with its own settings and defaults for the rest. Raises ValueError."""
        group = _group(self._settings, own)
        self.check(group)
        return group

    def _add(self, given: list[dict]) -> None:
        groups = [self.checked(group) for group in given]
        members = members_of([*self.param_groups, *groups])
        # Ranks of other stages update their own parameters.
        new = [m for m in members if m[1] >= len(self.param_groups) and m[0].updated]
        self._take_in([member for member in new if member[0].requires_grad])
        self._waiting += [member for member in new if not member[0].requires_grad]
        self.param_groups += groups

    def _take_in(self, members: list[Member]) -> None:
        """Make, or enlarge, the slices of parameters that are trained."""
        known = {piece.storage: piece for piece in self.slices}
        found = by_storage(members)
        new = [self.slice_type(storage) for storage in found if storage not in known]
        for piece in new:
            piece.add(found[piece.storage])
        refuse_partly_sharded([*self.slices, *new])
        for piece in new:
            piece.claim(self)
        for piece in new:
            piece.state = {name: self._new_state(piece.storage, name) for name in self.state_names}
        for storage, piece in known.items():
            if storage in found:
                piece.add(found[storage])
                piece.claim(self)
        taken = {id(parameter) for parameter, _ in members}
        self._waiting = [member for member in self._waiting if id(member[0]) not in taken]
        self._start_updates(new)

    def _new_state(self, storage: Storage, name: str) -> Array:
        low = name in self._low_state and storage.shard.dtype == np.float32
        return storage.new_state(name, BITS) if low else storage.new_state(name)

    def _start_updates(self, new: list[Slice]) -> None:
        """Streams, staging memory and hooks for updates that are not made in step() on the device."""
        if new and self.updates is not None:
            self.updates.wait()
        if self.in_backward:
            for index, piece in enumerate(new, start=len(self.slices)):
                # Weak, and by index: a storage must not keep an optimizer and its state alive.
                piece.storage.on_gradient = partial(_apply_now, weakref.ref(self), index)
        self.slices += new
        on_device = all(piece.storage.offloaded.everything_on_device for piece in self.slices)
        if new and (self.in_backward or not on_device):
            self.updates = Updates(self._device, self.slices)

    def _update_here(self, pieces: list[Slice]) -> None:
        """In the compute stream, all with one copy of their numbers. May be captured in a graph."""
        graph = self._device.capturing
        if graph is None:
            cuts = [(piece, piece.due()) for piece in pieces]
        else:  # a range each: numbers of updates may come apart between replays, whose table has one length
            cuts = [(piece, piece.due_apart()) for piece in pieces]

        def count() -> None:
            for piece, cut in cuts:
                piece.steps[cut.members] += 1

        rounds = [self._rounds(piece) for piece in pieces]

        def count_replay() -> None:
            count()
            for piece, rounded in zip(pieces, rounds, strict=True):
                piece.storage.modified(rounded)

        if graph is None:
            count()
        else:
            graph.before_replay(count_replay)
        if any(cut.rows for _, cut in cuts):
            ranges = self._device.numbers(lambda: self._table(cuts))
        stop = 0
        for (piece, cut), rounded in zip(cuts, rounds, strict=True):
            start, stop = stop, stop + len(cut.rows)
            piece.storage.complete_gradient()  # it may still be reduced
            if cut.rows:  # this rank holds something of it
                self.update(self._device.kernels, piece.update(ranges[start:stop], rounded))
            piece.storage.modified(rounded)

    def _rounds(self, piece: Slice) -> bool:
        return self.rounds and piece.storage.may_write_copy()

    def _table(self, cuts: list[tuple[Slice, Cut]]) -> Array:
        """The ranges of all, with their numbers: float64 (ranges, 2 + numbers)."""

        def numbers(group: int, steps: int) -> tuple[float, ...]:
            return self.numbers(self.param_groups[group], steps)

        return np.array([row for piece, cut in cuts for row in piece.rows(cut, numbers)], np.float64)

    def _issue(self, piece: Slice) -> None:
        cut = piece.due()
        piece.steps[cut.members] += 1
        rounds = self._rounds(piece)
        if cut.rows:
            update = piece.update(self._table([(piece, cut)]), rounds)
            self.updates.issue(piece, update, self._update_there)
        piece.storage.modified(rounds)

    def _update_there(self, kernels: ModuleType, update: Update) -> None:
        """In a stream of offload.py, on the device of its kernels."""
        there = device.of(update.arrays["shard"])
        self.update(kernels, replace(update, ranges=there.upload(update.ranges)))

    def _on_gradient(self, piece: Slice) -> None:
        """Backward has issued the last work on the gradient of `piece`."""
        if piece.storage.applied:
            raise RuntimeError(
                f"{type(self).__name__}(in_backward=True): a second backward has reached the gradient of "
                f"{piece.name!r} before step(), and the first has updated the parameters with it already; "
                "accumulate with no_sync for all but the last micro-batch"
            )
        piece.storage.applied = True
        run = autograd.running()
        if run is not None:  # code after backward finds the new parameters, also where it raises
            run.in_any_case(self.updates.wait)
        self._issue(piece)


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
    group = {**settings, **own, "params": parameters_in(own["params"], "optimizer")}
    for name in settings.keys() & {"lr", "weight_decay", "eps"}:
        if not group[name] >= 0:
            raise ValueError(f"optimizer: {name} must not be negative, got {group[name]}")
    return group


def check_betas(name: str, group: dict) -> None:
    """Raise ValueError unless the betas of a group of optimizer `name` are two numbers in [0, 1)."""
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"{name}: betas must be two numbers in [0, 1), got {group['betas']}")
