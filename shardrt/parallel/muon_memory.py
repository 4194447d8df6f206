"""Muon's memory, before anything is allocated: as memory_plan says for AdamW, less and more."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from shardrt.comm.protocol import Communicator
from shardrt.comm.single import SingleCommunicator
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.memory import MemoryPlan, connect, whole_of
from shardrt.fsdp.setup import lay_out
from shardrt.fsdp.unit import root_of
from shardrt.nn.extents import Extents, contiguous
from shardrt.nn.module import stages_of
from shardrt.nn.parameter import Parameter
from shardrt.nn.public import Module
from shardrt.nn.storage import LocalStorage
from shardrt.optim.muon.exchange import Exchange, gathered, planned
from shardrt.optim.muon.state import adamw_ranges, elements_of

__all__ = ["muon_plan"]


def muon_plan(plan: MemoryPlan, model: Module, hidden: Collection[Parameter]) -> MemoryPlan:
    """The plan of AdamW's memory, changed to Muon's. Collective.

    Hidden matrices have no second moments. "matrices of Muon" is what step() takes at most, beyond the memory
    that activations have left by then.

    Args:
        plan: of `model`, with optimizer_states=2.
        hidden: the hidden matrices, as muon_groups orders them.
    """
    units = [u for part in stages_of(model) or [model] for u in whole_of("muon_plan", part)]
    layouts, ranks_of = lay_out(units), connect(units)
    known = {id(parameter) for parameter in hidden if parameter.requires_grad and parameter.updated}
    device, host = dict(plan.device), dict(plan.host)
    for group, layout in layouts.items():
        if group.trainable and group.parameters[0].updated:
            places = zip(group.parameters, layout.entries, strict=True)
            rank = ranks_of[group].rank
            ranges = [layout.in_shard(entry, rank)[:2] for p, entry in places if id(p) in known]
            spared = layout.shard_size - elements_of(adamw_ranges(layout.shard_size, ranges))
            where = host if group.offloaded.optimizer_state else device
            if spared:
                where["optimizer state"] -= spared * group.parameters[0].dtype.itemsize
    alike: dict[Any, list[tuple[Parameter, Layout | None]]] = {}
    for parameter in _by_storage([parameter for parameter in hidden if id(parameter) in known]):
        if isinstance(parameter.storage, LocalStorage):
            device["optimizer state"] -= parameter.size * parameter.dtype.itemsize
            key, layout = (None, None, parameter.dtype), None
        else:
            ranks = ranks_of[parameter.storage]
            key, layout = (ranks.whole_communicator, ranks, parameter.dtype), layouts[parameter.storage]
        alike.setdefault(key, []).append((parameter, layout))
    here, step = root_of(units).settings.mesh.device, 0
    for (communicator, ranks, dtype), own in alike.items():
        step = max(step, _exchange(communicator, ranks, own).step_bytes(here, np.dtype(dtype)))
    beyond = step - device.get("activations", 0)
    if beyond > 0:
        device["matrices of Muon"] = beyond
    return replace(plan, device=device, host=host)


def _by_storage(parameters: list[Parameter]) -> list[Parameter]:
    """In the order of the optimizer's slices."""
    found: dict[Any, list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.storage, []).append(parameter)
    return [parameter for together in found.values() for parameter in together]


def _exchange(
    communicator: Communicator | None, ranks: Any, own: list[tuple[Parameter, Layout | None]]
) -> Exchange:
    mesh = None if ranks is None else ranks.whole_mesh
    held = planned(own, mesh)
    if held is None:
        held = gathered(communicator or SingleCommunicator(), [_extents(ranks, *each) for each in own])
    return Exchange(mesh, tuple(parameter.whole_shape for parameter, _ in own), tuple(held))


def _extents(ranks: Any, parameter: Parameter, layout: Layout | None) -> Extents:
    """What this rank holds of the whole matrix."""
    if layout is None:
        return parameter.in_whole(contiguous(0, parameter.size))
    entry = layout.entries[parameter.storage.position[id(parameter)]]
    return parameter.in_whole(layout.in_shard(entry, ranks.rank)[2])
