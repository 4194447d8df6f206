"""Access to whole parameters and gradients outside of forward.

full_parameters gathers copies of the float32 values that the optimizer updates, whatever type forward
computes in. unshard gathers the values that forward computes with, until reshard.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np

from shardrt import device
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.setup import units, units_below
from shardrt.fsdp.transfer import as_sent
from shardrt.fsdp.unit import State, Unit
from shardrt.nn.collect import collected
from shardrt.nn.extents import take
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.storage import LocalStorage

__all__ = ["full_group", "whole_on_first"]

Array = Any
Sharded = TypeVar("Sharded", bound=Module)


def unshard(module: Sharded) -> Sharded:
    """Gather the units of `module` and below, and keep them gathered until reshard. Collective.

    Parameter.data is then the whole array that forward computes with, read-only. This costs the bytes of the
    whole parameters.

    Args:
        module: a sharded module.

    Returns:
        `module`.

    Raises:
        ValueError: if `module` has no unit.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.fsdp import fully_shard, reshard, unshard
        >>> model = fully_shard(nn.Linear(8, 2))
        >>> _ = unshard(model)
        >>> model.weight.data.shape
        (2, 8)
        >>> _ = reshard(model)
    """
    for unit in units(module):
        _hold(unit)
    return module


def reshard(module: Sharded) -> Sharded:
    """Release the units of `module` and below, gathered by unshard or kept by their strategy.

    The next use gathers them again. Call it on every rank.

    Args:
        module: a sharded module.

    Returns:
        `module`.

    Raises:
        ValueError: if `module` has no unit.
    """
    for unit in units(module):
        _let_go(unit)
    return module


def _hold(unit: Unit) -> None:
    """Gather `unit` and keep it gathered until `_let_go`. Collective."""
    gathers, forward = unit.schedule.gathers, unit.schedule.forward
    if forward.depth == 0:
        gathers.refresh()
    unit.choices.kept_unsharded = True
    gathers.ensure(unit)
    if unit not in forward.entered:
        gathers.finish(unit, State.KEPT)


def _let_go(unit: Unit) -> None:
    """Release `unit`, unless its forward is running."""
    unit.choices.kept_unsharded = False
    if unit.gathered and unit not in unit.schedule.forward.entered:
        unit.schedule.gathers.finish(unit, State.SHARDED)


@contextmanager
def full_parameters(module: Sharded, *, writeback: bool = False) -> Iterator[Sharded]:
    """Make Parameter.data a whole array for all parameters of `module`, inside a with block. Collective.

    The arrays are copies in the type of the shards (float32). This costs the bytes of the whole parameters of
    `module`; use it on one block after the other to need less. For a parameter that parallelize_module
    has split, the array is the whole of this rank's part. Parameters that no unit has stay as they are.

    Args:
        module: a module.
        writeback: at the end of the block, each rank copies its part of the arrays into its shard. Write the
            same values on every rank.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.fsdp import full_parameters, fully_shard
        >>> model = fully_shard(nn.Linear(8, 2))
        >>> with full_parameters(model, writeback=True):
        ...     model.weight.data[:] = 0
    """
    units = units_below(module)
    with ExitStack() as stack:
        for unit in units:
            unit.built()
            for group in unit.groups:
                stack.enter_context(full_group(group))
        yield module
        if writeback:
            for unit in units:
                _take_back(unit)
    for schedule in {unit.built() for unit in units} if writeback else ():
        # A gather reads the other ranks' shards: all must be written.
        schedule.control.barrier(stream=schedule.streams.compute)


def full_gradients(module: Module) -> Iterator[tuple[str, Array | None]]:
    """Yield (name, whole gradient) of each trained parameter of `module`, unit by unit.

    Collective: every rank must iterate to the end. Gradients are copies on the device in the type of the
    shards, or None. Only those of one unit take memory at a time. For a parameter that parallelize_module has
    split, the gradient is that of this rank's part. Parameters that no unit has are included.

    Args:
        module: a module, after backward.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        if isinstance(parameter.storage, LocalStorage) and parameter.requires_grad:
            yield names[id(parameter)], parameter.grad
    for unit in units_below(module):
        unit.built()
        for group in (group for group in unit.groups if group.trainable):
            views = (None,) * len(group.parameters)
            gradient = group.complete_gradient()
            if gradient is not None:
                views = group.views_of(_gathered(group, gradient))
            for position, (parameter, view) in enumerate(zip(group.parameters, views, strict=True)):
                if position in group.trained and id(parameter) in names:
                    yield names[id(parameter)], view if group.has_gradient(parameter) else None


def whole_on_first(parameter: Parameter, array: Array) -> np.ndarray | None:
    """Collect on rank 0 a parameter's values from `array`, which is laid out like its shard.

    Collective.

    Args:
        array: 1-D, for instance optimizer state.

    Returns:
        A host array in the shape of the whole parameter on rank 0, and None on ranks that send their part.
    """
    storage = parameter.storage
    start, stop = storage.range_of(parameter)
    local = np.ascontiguousarray(device.of(array).to_numpy(array[start:stop]))
    if isinstance(storage, LocalStorage):
        return _joined(parameter, local.reshape(parameter.shape).copy())  # every rank holds all of it
    ranks, layout = storage.ranks, storage.layout
    if ranks.replicate is not None and ranks.replicate.rank > 0:
        return None  # rank 0's shard group holds the whole parameter
    entry = layout.entries[storage.position[id(parameter)]]
    parts = [layout.in_shard(entry, rank)[2] for rank in range(ranks.size)]
    whole = collected(ranks.control, local, parameter.shape, parts)
    return None if whole is None else _joined(parameter, whole)


def _joined(parameter: Parameter, local: np.ndarray) -> np.ndarray | None:
    return local if parameter.placement is None else parameter.placement.joined(local)


@contextmanager
def full_group(group: ParameterGroup) -> Iterator[None]:
    """full_parameters for one group, without writeback. Does nothing if the parameters are whole already."""
    if group.full_views is not None:
        yield
        return
    try:
        group.full_views = group.views_of(_gathered(group, group.shard))
        yield
    finally:
        group.full_views = None


def _gathered(group: ParameterGroup, shard: Array) -> Array:
    """A new flat buffer with the shards of all ranks. shard: this rank's."""
    streams, layout, ranks = group.runtime.streams, group.layout, group.ranks
    whole = streams.device.buffer(layout.total, group.key.dtype)
    start, stop = layout.shard_range(ranks.rank)
    streams.compute.submit(streams.device.copy, whole[start:stop], shard)
    if ranks.size > 1:
        ranks.control.all_gather(as_sent(whole), stream=streams.compute, tag=group.label)
    return whole


def _take_back(unit: Unit) -> None:
    streams = unit.schedule.streams
    for group in unit.groups:
        for parameter, view in zip(group.parameters, group.full_views, strict=True):
            start, stop = group.range_of(parameter)
            piece = take(group.extents_of(parameter), view)
            streams.compute.submit(streams.device.copy, group.shard[start:stop], piece)
        group.modified()
