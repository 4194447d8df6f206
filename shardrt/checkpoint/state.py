"""Gathers a model's whole weights on one rank, unit by unit, and reports errors of their use to all ranks."""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from shardrt import device
from shardrt.checkpoint.pieces import placed_buffers
from shardrt.comm import objects
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.options.full import full_group
from shardrt.fsdp.setup import units_below
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.parameter_placement import joined
from shardrt.nn.placement import along_pipeline, on_first
from shardrt.nn.ranks import is_leader, is_stage_leader, ranks_of

__all__ = ["failures", "gathered"]


def full_state_dict(model: Module) -> dict[str, np.ndarray]:
    """Name -> whole array, copied to the host, on rank 0; an empty dict elsewhere. Collective.

    Rank 0 needs memory for the whole model; every rank for one gathered unit at a time.
    """
    here = device.current()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {}
    for parameter, values in gathered(model):
        state[names[id(parameter)]] = np.array(values)
        del values
    buffers, leads = {}, is_stage_leader(model)
    for name, array, place in placed_buffers(model) if leads else ():
        buffers[name] = on_first(place, np.array(here.to_numpy(array)), array.shape, array.dtype)
    if not is_leader(model):
        return {}
    return {name: state[name] for name in names.values()} | buffers


def gathered(model: Module) -> Iterator[tuple[Parameter, np.ndarray]]:
    """(parameter, whole host array, valid until the next one), on rank 0 only; a unit is gathered once.

    Parameters that another axis splits over ranks are joined. In a pipeline, parameters of other stages come
    after the parameters of rank 0's stages.

    Delete the array before the next one: it is a view that keeps its unit in memory.
    """
    others = along_pipeline(model.parameters())
    if others is None:
        yield from _of_stage(model)
        return
    known = {parameter.name: parameter for parameter in model.parameters()}
    order = [p.name for _, members in _together(model) for p in members if p.counts]
    everyone = objects.all_gather_object(others, order)
    if strange := sorted({name for names in everyone for name in names} - known.keys()):
        raise ValueError(
            f"{type(model).__name__} has no {strange[0]!r}; give the model, not one of its stages"
        )
    for parameter, values in _of_stage(model):
        values = (
            on_first(parameter.pipeline, values, values.shape, values.dtype) if parameter.counts else None
        )
        if values is not None:
            yield parameter, values
        del values
    for name in (name for names in everyone[1:] for name in names) if is_leader(model) else ():
        parameter = known[name]
        yield parameter, on_first(parameter.pipeline, None, parameter.whole_shape, parameter.dtype)


def _together(model: Module) -> list[tuple[list[ParameterGroup], list[Parameter]]]:
    """The parameters of `model` that this rank has, in the order in which they are gathered, unit by unit."""
    wanted = {id(parameter) for parameter in model.parameters()}
    units = units_below(model)
    for unit in units:
        unit.built()
    together = {group: unit.groups for unit in units for group in unit.groups}
    done: set[ParameterGroup] = set()
    found = []
    for parameter in model.parameters():
        storage = parameter.storage
        if isinstance(storage, ParameterGroup) and storage not in done:
            groups = together.get(storage, [storage])  # alone if the unit is above `model`
            done.update(groups)
            found.append((groups, [p for group in groups for p in group.parameters if id(p) in wanted]))
        elif not isinstance(storage, ParameterGroup) and not parameter.absent:
            found.append(([], [parameter]))
    return found


def _of_stage(model: Module) -> Iterator[tuple[Parameter, np.ndarray]]:
    """Like `gathered`, for the parameters of this rank's stages, on their leader."""
    here, first = device.current(), is_stage_leader(model)
    for groups, members in _together(model):
        with ExitStack() as stack:
            for group in groups:
                stack.enter_context(full_group(group))
            for member in members:
                if first or member.placement is not None or not groups:
                    values = joined(member.placement, here.to_numpy(member.data))
                    if first:
                        yield member, values
                    del values


def failures(model: Module, error: BaseException | None) -> list[str]:
    """The errors of all ranks, equal on all; returns after every rank has called it. Collective.

    A model that is neither sharded nor split knows no other ranks: then only this rank's error.
    """
    ranks = ranks_of(model)
    if ranks is not None:
        return objects.failures(ranks, error)
    return [] if error is None else [f"{type(error).__name__}: {error}"]
