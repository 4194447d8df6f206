"""TrainableSet: which parameters have gradients. By default the set is fixed when the model is built."""

from typing import Any

from shardrt.comm.protocol import Communicator
from shardrt.fsdp.streams import Streams
from shardrt.fsdp.unit import Unit


class TrainableSet:
    """The trained parameters of one schedule."""

    changed = False  # memory of gradients does not fit the trained parameters yet

    def __init__(self, units: list[Unit], control: Communicator) -> None:
        control.register_names([group.tag for unit in units for group in unit.groups])

    def follow(self, streams: Streams) -> bool:
        """When a forward begins, take over the user's changes. Returns whether there were any."""
        return False

    def agree(self, streams: Streams) -> None:
        """Wait in the reduce stream for all ranks, before they replace memory together. Collective."""


active: Any = TrainableSet  # the class of a schedule's set; an option names another
