"""Bytes that a rank receives in a step, and sends: counted at the communicators, and by the formula.

The formula is that of docs/strategies.md, with each unit's padding.
"""

from shardrt import nn
from shardrt.comm import Communicator, CountedCommunicator
from shardrt.fsdp import units


class Counter:
    """Counts what all communicators of a mesh move; give it to init_device_mesh as `wrap`."""

    def __init__(self) -> None:
        self._made: list[CountedCommunicator] = []

    def __call__(self, communicator: Communicator) -> CountedCommunicator:
        self._made.append(CountedCommunicator(communicator))
        return self._made[-1]

    @property
    def bytes(self) -> int:
        """Received from other ranks so far; as many were sent."""
        return sum(sum(made.bytes.values()) for made in self._made)


def expected(model: nn.Module) -> float:
    """Bytes for each rank and step of a model in fp32, all of it sharded."""
    total = 0.0
    for unit in units(model):
        copies, shards = (1, *unit.settings.mesh.shape)[-2:]
        gathers = 2 if unit.reshard_after_forward else 1
        for group in unit.groups:
            nbytes = 4 * group.layout.total
            total += (gathers + 1) * nbytes * (shards - 1) / shards
            total += 2 * nbytes / shards * (copies - 1) / copies
    return total
