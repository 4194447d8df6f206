"""Gathers a model's whole weights on one rank, unit by unit, and lets all ranks know how their use went."""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from shardrt import device
from shardrt.comm import talk
from shardrt.fsdp.full import full_group
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.setup import units_below
from shardrt.nn.module import Module, ranks_of, speaks_for_all
from shardrt.nn.parameter import Parameter
from shardrt.nn.share import joined


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
    if not speaks_for_all(model):
        return {}
    buffers = {name: np.array(here.to_numpy(array)) for name, array in model.named_buffers()}
    return {name: state[name] for name in names.values()} | buffers


def gathered(model: Module) -> Iterator[tuple[Parameter, np.ndarray]]:
    """(parameter, whole host array, valid until the next one), on rank 0 only; a unit is gathered once.

    What is cut over the ranks of an axis besides is put together.

    Delete the array before the next one: it is a view that keeps its unit in memory.
    """
    here = device.current()
    first = speaks_for_all(model)
    wanted = {id(parameter) for parameter in model.parameters()}
    together = {group: unit.groups for unit in units_below(model) for group in unit.groups}
    done: set[ParameterGroup] = set()
    for parameter in model.parameters():
        storage = parameter.storage
        if not isinstance(storage, ParameterGroup):
            values = joined(parameter, here.to_numpy(parameter.data))
            if first:
                yield parameter, values
        elif storage not in done:
            groups = together.get(storage, [storage])  # alone where the unit lies above `model`
            done.update(groups)
            with ExitStack() as stack:
                for group in groups:
                    stack.enter_context(full_group(group))
                for member in [p for group in groups for p in group.parameters]:
                    if id(member) in wanted and (first or member.share is not None):
                        values = joined(member, here.to_numpy(member.data))
                        if first:
                            yield member, values
                        del values


def failures(model: Module, error: BaseException | None) -> list[str]:
    """What went wrong on any rank, alike on all; every rank has come here when it returns. Collective.

    A model that is neither sharded nor cut knows of no other ranks: then it is this rank's error alone.
    """
    ranks = ranks_of(model)
    if ranks is not None:
        return talk.failures(ranks, error)
    return [] if error is None else [f"{type(error).__name__}: {error}"]
