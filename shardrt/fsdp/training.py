"""Training: which parameters have gradients. By default those that required one when the model was built."""

from typing import Any

from shardrt.comm.protocol import Communicator
from shardrt.fsdp.sharded_gradient import Streams
from shardrt.fsdp.unit import Unit


class Training:
    """The trained parameters of one schedule. trained.py follows requires_grad from step to step instead."""

    changed = False  # memory of gradients does not fit the trained parameters yet

    def __init__(self, units: list[Unit], control: Communicator) -> None:
        control.register_names([group.tag for unit in units for group in unit.groups])

    def follow(self, streams: Streams) -> bool:
        """When a forward begins, take over what the user has changed. Gives whether that was anything."""
        return False

    def agree(self, streams: Streams) -> None:
        """Wait in the reduce stream for all ranks, before they replace memory together. Collective."""


chosen: Any = Training  # makes what a schedule has; an option names another class
