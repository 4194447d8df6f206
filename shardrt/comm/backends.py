"""Communicators by name. Each backend's module is imported only here, and only when it is chosen."""

import warnings
import weakref

from shardrt.comm import world as worlds
from shardrt.comm.protocol import Communicator
from shardrt.comm.single import SingleCommunicator
from shardrt.comm.staged import StagedCommunicator
from shardrt.device import Device

KINDS = ("auto", "single", "thread", "mpi", "shm", "staged", "nccl", "ipc")
DEVICE_KINDS = ("staged", "nccl", "ipc")  # for arrays of a GPU; a host communicator is below them
REDUCTIONS = ("nccl", "tree")  # who adds up over NCCL: it, or our kernels by the fixed tree over ranks
HOST_ROLES = ("control", "used")  # what they carry is mostly, or only, in the memory of the hosts

_warned: "weakref.WeakSet[worlds.World]" = weakref.WeakSet()  # runs that know that their ranks share a GPU


def for_device(
    host: Communicator, device: Device, kind: str, role: str, reduction: str = "nccl"
) -> Communicator:
    """The communicator for `device`'s arrays in a role, over the ranks of `host`. Collective.

    It takes over `host`, which it is where arrays are the host's. On a GPU it is "staged", "nccl" or
    "ipc" (the ranks of one node); "auto" takes NCCL where every rank has a GPU of its own, else "staged".
    HOST_ROLES are always staged, which leaves host arrays where they are. reduction: one of REDUCTIONS, for
    NCCL.
    """
    host.role = role
    made = _carrier(host, device, kind, role, reduction)
    made.role = role
    return made


def _carrier(host: Communicator, device: Device, kind: str, role: str, reduction: str) -> Communicator:
    if host.size == 1 and device is not device.host:
        return SingleCommunicator(device)
    world = worlds.current()
    if device.in_host_memory or (world.device is device and world.transport is None):
        return host
    if role in HOST_ROLES or kind == "staged":
        return StagedCommunicator(host, device)
    if kind == "ipc":
        from shardrt.comm.ipc import IPCCommunicator

        return IPCCommunicator(host, device)
    if kind == "auto" and not _a_gpu_for_each(host, device):
        return StagedCommunicator(host, device)
    from shardrt.comm.nccl import NCCLCommunicator, NCCLTransport

    return NCCLCommunicator(host, device, reduction, world.transport or NCCLTransport)


def create(kind: str = "auto") -> Communicator:
    """A communicator of host arrays over all ranks of the current world. Collective.

    "auto": the fastest that fits. One rank: "single". Threads: "thread". Under mpirun: "shm" on one node,
    shared memory combined with MPI on several (see hierarchical.py). "staged", "nccl" and "ipc", which are
    for GPUs (see for_device), have the automatic one below them. A simulated world has one kind alone, its
    own. Raises ValueError for a kind that is unknown or does not fit this run.
    """
    if kind in DEVICE_KINDS:
        kind = "auto"
    if kind not in KINDS:
        raise ValueError(f"communicator: {kind!r} is unknown; known are {', '.join(KINDS)}")
    world = worlds.current()
    if world.device is not None:
        return world.root.duplicate()
    if kind in ("mpi", "shm"):
        return _over_mpi(kind, worlds.of_mpi())
    if kind not in ("auto", world.kind):
        raise ValueError(f"communicator: {kind!r} does not fit this run, which is {world.kind!r}")
    if world.kind == "mpi":
        return _over_mpi(kind, world)
    if world.kind == "thread":
        return world.root.duplicate()
    return SingleCommunicator()


def _over_mpi(kind: str, world: worlds.World) -> Communicator:
    from shardrt.comm.contexts import free_dropped

    free_dropped(world.root)
    if kind == "mpi":
        from shardrt.comm.mpi import MPICommunicator

        return MPICommunicator(world.root.Dup())
    if kind == "shm":
        from shardrt.comm.shm import ShmCommunicator

        if world.local_size < world.size:
            raise ValueError("communicator: 'shm' needs all ranks on one node; 'auto' combines it with MPI")
        return ShmCommunicator(world.root.Dup())
    from shardrt.comm import hierarchical

    return hierarchical.create(world.root.Dup())


def _a_gpu_for_each(host: Communicator, device: Device) -> bool:
    """Whether each rank has a GPU of its own. Else the first rank of a node warns. Collective."""
    world = worlds.current()
    if world.device is not None:
        return True
    first: dict[bytes, int] = {}  # GPU -> its first rank of the run
    for each in host.talk(b"%d %b" % (world.rank, device.identity)):
        number, gpu = each.split(b" ", 1)
        rank = int(number)
        if not gpu:
            return False
        if first.setdefault(gpu, rank) != rank:
            if host.rank == world.local_rank == 0 and world not in _warned:
                _warned.add(world)
                warnings.warn(
                    f"ranks {first[gpu]} and {rank} share a GPU: collectives are staged through host memory, "
                    "which is slow. NCCL needs a GPU for each rank; communicator='staged' silences this",
                    stacklevel=4,
                )
            return False
    return True
