"""Chooses the communicators of a run, in two steps.

1. `create(kind)` makes a communicator of host arrays over all ranks. "auto" takes the one registered for the
   world: "single" for one rank, "thread" for threads, under mpirun MPI with shared memory inside each node.
2. `for_device` puts a communicator of GPU arrays on top of a host communicator. For "auto" it takes the first
   of CARRIERS whose `suits` is true: "nccl" if each rank has a GPU of its own. Otherwise it takes "staged",
   which copies through the host. On the CPU the host communicator itself is the result.

shardrt/_backends.py registers all but "single" and "thread".
"""

from collections.abc import Callable
from typing import NamedTuple

from shardrt.comm import world as worlds
from shardrt.comm.protocol import Communicator
from shardrt.comm.single import SingleCommunicator
from shardrt.comm.world import World
from shardrt.device import Device

__all__ = ["AUTOMATIC", "BY_NAME", "CARRIERS", "Carrier", "for_device", "kinds"]

HOST_ROLES = ("control", "used")  # their communicators carry mostly or only host arrays


class Carrier(NamedTuple):
    """A kind of communicator of GPU arrays on top of a host communicator. Its functions are collective."""

    make: Callable[[Communicator, Device, str], Communicator]  # of (host, device, reduction)
    suits: Callable[[Communicator, Device], bool] | None = None  # whether "auto" takes it; None: never
    carries_host: bool = False  # whether it carries host arrays directly, and works for any ranks
    reductions: tuple[str, ...] = ()  # its own ways to sum; "tree", by our kernels, always works


def for_device(
    host: Communicator, device: Device, kind: str, role: str, reduction: str = "nccl"
) -> Communicator:
    """The communicator for arrays of `device` over the ranks of `host`, which it owns. Collective.

    kind: "auto", or for a GPU "staged", "nccl" or "ipc" (ranks of one node). HOST_ROLES are always staged.
    reduction: one of `reductions()`, for NCCL. If `device` has its arrays in host memory, returns `host`.
    """
    host.role = role
    made = _make(host, device, kind, role, reduction)
    made.role = role
    return made


def _make(host: Communicator, device: Device, kind: str, role: str, reduction: str) -> Communicator:
    if host.size == 1 and device is not device.host:
        return SingleCommunicator(device)
    world = worlds.current()
    if device.in_host_memory or (world.device is device and world.transport is None):
        return host
    if role in HOST_ROLES or kind not in CARRIERS:
        kind = _choose(host, device, kind, role)
    return CARRIERS[kind].make(host, device, reduction)


def _choose(host: Communicator, device: Device, kind: str, role: str) -> str:
    """The first carrier that suits ("auto") or may suit, else the one for host arrays. Collective."""
    for name, carrier in CARRIERS.items():
        if role not in HOST_ROLES and carrier.suits and (kind != "auto" or carrier.suits(host, device)):
            return name
    return next(name for name, carrier in CARRIERS.items() if carrier.carries_host)


def create(kind: str = "auto") -> Communicator:
    """A communicator of host arrays over all ranks of the current world. Collective.

    Args:
        kind: one of `kinds()`. "auto" takes the fastest that fits, as above. The kinds for GPUs ("staged",
            "nccl", "ipc") give the same: `for_device` builds on it. A simulated world gives its own kind.

    Raises:
        ValueError: if the kind is unknown or does not fit this run.
    """
    if kind in CARRIERS:
        kind = "auto"
    if kind not in kinds():
        raise ValueError(f"communicator: {kind!r} is unknown; known are {', '.join(kinds())}")
    world = worlds.current()
    if world.device is not None:
        return world.root.duplicate()
    if kind in BY_NAME:
        return BY_NAME[kind]()
    if kind not in ("auto", world.kind):
        raise ValueError(f"communicator: {kind!r} can't be used in this run, whose ranks are {world.kind!r}")
    return AUTOMATIC[world.kind](world)


# Kind of a world -> the function for "auto" in that world. Collective, as are the functions of BY_NAME.
AUTOMATIC: dict[str, Callable[[World], Communicator]] = {
    "single": lambda world: SingleCommunicator(),
    "thread": lambda world: world.root.duplicate(),
}
BY_NAME: dict[str, Callable[[], Communicator]] = {}  # kinds that find their world themselves
CARRIERS: dict[str, Carrier] = {}


def kinds() -> tuple[str, ...]:
    """All names of communicators, "auto" first."""
    return ("auto", "single", "thread", *BY_NAME, *CARRIERS)


def reductions() -> tuple[str, ...]:
    """All ways to sum over ranks: the carriers' own, and "tree", by our kernels."""
    return (*(name for carrier in CARRIERS.values() for name in carrier.reductions), "tree")
