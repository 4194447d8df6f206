"""Roles: the purposes of buffers. These four are always there; options add theirs to `ROLES`."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from shardrt.comm.protocol import Communicator
from shardrt.fsdp.process_groups import ProcessGroups


def _by_device(ranks: ProcessGroups) -> None:
    """No communicator: the device allocates the buffer, which is not sent."""


def _of_sums(ranks: ProcessGroups) -> Communicator | None:
    # Backward may write full gradients of an unsharded group there, and `replicate` sends them from there.
    return ranks.replicate if ranks.size == 1 else None


@dataclass(frozen=True)
class Role:
    """The purpose of a buffer.

    category: in memory plans and traces.
    maker: the communicator that sends, and so allocates, the buffer; None: the device allocates it.
    built: `setup.build` makes an arena for it (shards and sharded gradients are buffers without one).
    gradient: only reductions use it, so it comes and goes with the trained parameters.
    """

    category: str
    maker: Callable[[ProcessGroups], Communicator | None] = _by_device
    built: bool = False
    gradient: bool = False


ROLES = {
    "shard": Role("sharded parameters"),
    "reduced": Role("sharded gradients", _of_sums),
    "gathered": Role("gathered parameters", attrgetter("gather"), built=True),
    "gradients": Role("full gradients", attrgetter("reducer"), gradient=True),
}


def gradient_roles() -> list[str]:
    """The roles that only reductions use."""
    return [name for name, role in ROLES.items() if role.gradient]
