"""Collectives, slots and bytes, counted exactly."""

from collections import Counter

from shardrt.comm import CollectiveCounter
from shardrt.comm.protocol import Communicator
from shardrt.device.arena import Arena
from shardrt.fsdp import memory_plan, units
from shardrt.fsdp.group import ParameterGroup
from shardrt.nn import Module


class Counts:
    """Counts what is called on the communicators of a mesh: init_device_mesh(..., wrap=counts)."""

    def __init__(self) -> None:
        self.communicators: list[CollectiveCounter] = []

    def __call__(self, communicator: Communicator) -> CollectiveCounter:
        self.communicators.append(CollectiveCounter(communicator))
        return self.communicators[-1]

    def reset(self) -> None:
        """Count from zero."""
        for communicator in self.communicators:
            communicator.reset()

    def calls(self, *ops: str) -> list[int]:
        """How often each of `ops` was called."""
        return [sum(communicator.calls[op] for communicator in self.communicators) for op in ops]

    def bytes(self, *ops: str) -> list[int]:
        """What this rank received in each of `ops`."""
        return [sum(communicator.bytes[op] for communicator in self.communicators) for op in ops]

    def all_calls(self) -> Counter[str]:
        """Op -> calls."""
        return sum((communicator.calls for communicator in self.communicators), Counter())

    def all_bytes(self) -> Counter[str]:
        """Op -> bytes that this rank received."""
        return sum((communicator.bytes for communicator in self.communicators), Counter())


def groups_of(model: Module) -> list[ParameterGroup]:
    """Those of all units."""
    return [group for unit in units(model) for group in unit.groups]


def arenas_of(model: Module, *roles: str) -> list[Arena]:
    """Each once, of these roles or of all."""
    found = (
        arena for g in groups_of(model) for role, arena in g.arenas.items() if not roles or role in roles
    )
    return list({id(arena): arena for arena in found}.values())


def in_use(model: Module, *roles: str) -> int:
    """Slots that are in use now."""
    return sum(arena.in_use for arena in arenas_of(model, *roles))


def slots(model: Module, *roles: str) -> list[tuple[int, int]]:
    """(slots, the most in use) of each arena."""
    return [(len(arena.slots), arena.peak_in_use) for arena in arenas_of(model, *roles)]


def bytes_held(model: Module) -> int:
    """Bytes of what the units have allocated, on a rank that shares no memory."""
    groups = groups_of(model)
    arrays = [
        array
        for group in groups
        for array in (*group.sharded_gradient.arrays, group.sharded_gradient.uses)
        if array is not None
    ]
    arrays += [group.shard for group in groups if not group.memory.shard_in_slot]
    return sum(array.nbytes for array in [*arrays, *(s.array for a in arenas_of(model) for s in a.slots)])


def bytes_planned(model: Module, **options: object) -> int:
    """Bytes on the device by the plan, without activations and optimizer states."""
    plan = memory_plan(model, optimizer_states=0, **options).device
    return sum(plan.values()) - plan.get("activations", 0)
