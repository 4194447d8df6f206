"""Communicators by name. Each backend's module is imported only here, and only when it is chosen."""

from shardrt.comm import world as worlds
from shardrt.comm.protocol import Communicator

KINDS = ("auto", "single", "thread", "mpi", "shm")


def create(kind: str = "auto") -> Communicator:
    """A communicator over all ranks of the current world. Collective.

    "auto": the fastest that fits. One rank: "single". Threads: "thread". Under mpirun: "shm" on one node,
    shared memory combined with MPI on several (see hierarchical.py). Raises ValueError for a kind that is
    unknown or does not fit this run.
    """
    if kind not in KINDS:
        raise ValueError(f"communicator: {kind!r} is unknown; known are {', '.join(KINDS)}")
    if kind in ("mpi", "shm"):
        return _over_mpi(kind, worlds.of_mpi())
    world = worlds.current()
    if kind not in ("auto", world.kind):
        raise ValueError(f"communicator: {kind!r} does not fit this run, which is {world.kind!r}")
    if world.kind == "mpi":
        return _over_mpi(kind, world)
    if world.kind == "thread":
        return world.root.duplicate()
    from shardrt.comm.single import SingleCommunicator

    return SingleCommunicator()


def _over_mpi(kind: str, world: worlds.World) -> Communicator:
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
