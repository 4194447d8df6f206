"""Communicators by name: "single", "thread", and those that are registered (shardrt/_backends.py)."""

from collections.abc import Callable
from typing import NamedTuple

from shardrt.comm import world as worlds
from shardrt.comm.protocol import Communicator
from shardrt.comm.single import SingleCommunicator
from shardrt.comm.world import World
from shardrt.device import Device

HOST_ROLES = ("control", "used")  # what they carry is mostly, or only, in the memory of the hosts


class Carrier(NamedTuple):
    """Communicators of GPU arrays, with a host communicator below them. Its functions are collective."""

    make: Callable[[Communicator, Device, str], Communicator]  # of (host, device, reduction)
    suits: Callable[[Communicator, Device], bool] | None = None  # whether to take it unnamed; None: never
    carries_host: bool = False  # whether it leaves arrays of the host where they are, and suits any ranks
    reductions: tuple[str, ...] = ()  # how it can make sums, beside "tree", which is by our kernels


def for_device(
    host: Communicator, device: Device, kind: str, role: str, reduction: str = "nccl"
) -> Communicator:
    """The communicator for `device`'s arrays in a role, over the ranks of `host`. Collective.

    It takes over `host`, which it is where arrays are the host's. On a GPU it is "staged", "nccl" or
    "ipc" (the ranks of one node); "auto" takes NCCL where every rank has a GPU of its own, else "staged".
    HOST_ROLES are always staged, which leaves host arrays where they are. reduction: one of `reductions()`,
    for NCCL.
    """
    host.role = role
    made = _made(host, device, kind, role, reduction)
    made.role = role
    return made


def _made(host: Communicator, device: Device, kind: str, role: str, reduction: str) -> Communicator:
    if host.size == 1 and device is not device.host:
        return SingleCommunicator(device)
    world = worlds.current()
    if device.in_host_memory or (world.device is device and world.transport is None):
        return host
    if role in HOST_ROLES or kind not in CARRIERS:
        kind = _chosen(host, device, kind, role)
    return CARRIERS[kind].make(host, device, reduction)


def _chosen(host: Communicator, device: Device, kind: str, role: str) -> str:
    """The first carrier that suits, else the one that carries the host's arrays. Collective."""
    for name, carrier in CARRIERS.items():
        if role not in HOST_ROLES and carrier.suits and (kind != "auto" or carrier.suits(host, device)):
            return name
    return next(name for name, carrier in CARRIERS.items() if carrier.carries_host)


def create(kind: str = "auto") -> Communicator:
    """A communicator of host arrays over all ranks of the current world. Collective.

    "auto": the fastest that fits. One rank: "single". Threads: "thread". Under mpirun: "shm" on one node,
    shared memory combined with MPI on several (see hierarchical.py). "staged", "nccl" and "ipc", which are
    for GPUs (see for_device), have the automatic one below them. A simulated world has one kind alone, its
    own. Raises ValueError for a kind that is unknown or does not fit this run.
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
        raise ValueError(f"communicator: {kind!r} does not fit this run, which is {world.kind!r}")
    return AUTOMATIC[world.kind](world)


# Kind of a world -> what makes its automatic communicator. Collective, as are the functions of BY_NAME.
AUTOMATIC: dict[str, Callable[[World], Communicator]] = {
    "single": lambda world: SingleCommunicator(),
    "thread": lambda world: world.root.duplicate(),
}
BY_NAME: dict[str, Callable[[], Communicator]] = {}  # those that bring a world of their own kind along
CARRIERS: dict[str, Carrier] = {}


def kinds() -> tuple[str, ...]:
    """All names of communicators, "auto" first."""
    return ("auto", "single", "thread", *BY_NAME, *CARRIERS)


def reductions() -> tuple[str, ...]:
    """How sums over ranks can be made: by a carrier's own means, or by our kernels ("tree")."""
    return (*(name for carrier in CARRIERS.values() for name in carrier.reductions), "tree")
