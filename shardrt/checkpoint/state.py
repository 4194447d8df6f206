"""Gathers a model's whole weights on one rank, unit by unit."""

from collections.abc import Iterator

import numpy as np

from shardrt import device
from shardrt.comm import world as worlds
from shardrt.fsdp.unit import Unit
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter


def full_state_dict(model: Module) -> dict[str, np.ndarray]:
    """Name -> whole array, copied to the host, on rank 0; an empty dict elsewhere. Collective.

    Rank 0 needs memory for the whole model; every rank for one gathered unit at a time.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {names[id(parameter)]: np.array(values) for parameter, values in _gathered(model)}
    if worlds.current().rank != 0:
        return {}
    return {name: state[name] for name in names.values()}


def _gathered(model: Module) -> Iterator[tuple[Parameter, np.ndarray]]:
    """(parameter, whole host array, valid until the next one), on rank 0 only; a unit is gathered once."""
    here = device.current()
    parameters = list(model.parameters())
    done: set[int] = set()
    for parameter in parameters:
        storage = parameter.storage
        if not isinstance(storage, Unit):
            yield parameter, here.to_numpy(parameter.data)
        elif id(storage) not in done:
            done.add(id(storage))
            schedule = storage.schedule
            with schedule.gathered(storage):
                if schedule.rank == 0:
                    for member in storage.parameters:
                        yield member, here.to_numpy(member.data)
