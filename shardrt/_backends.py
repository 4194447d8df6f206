"""The plug-ins of the runtime: each device and communicator next to those of the core is registered here.

`import shardrt` runs this file. It loads neither CuPy nor MPI: a backend imports them when it is chosen.
"""

from typing import Any

from shardrt import device
from shardrt.comm import backends, mesh, mpi_world, nccl, ranks, supervision, world
from shardrt.comm.backends import Carrier
from shardrt.comm.protocol import Communicator
from shardrt.comm.staged import StagedCommunicator
from shardrt.comm.supervision import Supervisor
from shardrt.comm.world import World
from shardrt.device import Device, cpu, cuda, memory
from shardrt.faults import deadline, failure, guard


def _plain() -> Communicator:
    from shardrt.comm.mpi import MPICommunicator

    return MPICommunicator(_root(mpi_world.of_mpi()).Dup())


def _shm() -> Communicator:
    from shardrt.comm.shm import ShmCommunicator

    ranks = mpi_world.of_mpi()
    root = _root(ranks)
    if ranks.local_size < ranks.size:
        raise ValueError("communicator: 'shm' needs all ranks on one node; 'auto' combines it with MPI")
    return ShmCommunicator(root.Dup())


def _by_nodes(ranks: World) -> Communicator:
    from shardrt.comm import hierarchical

    return hierarchical.create(_root(ranks).Dup())


def _root(ranks: World) -> Any:
    """MPI's communicator of all ranks, once those that the program has dropped are freed. Collective."""
    from shardrt.comm.contexts import free_dropped

    free_dropped(ranks.root)
    return ranks.root


def _ipc(host: Communicator, place: Device, reduction: str) -> Communicator:
    from shardrt.comm.ipc import IPCCommunicator

    return IPCCommunicator(host, place)


supervision.supervisor = Supervisor(
    guard.start, failure.install_hooks, failure.departed, failure.at, deadline.within, failure.end_job
)
cpu.memory = memory.Pool
device.make_cpu = cpu.CPUDevice
device.KINDS["cuda"] = device.Kind(cuda.CUDADevice, lambda: cuda.count())
world.launcher = mpi_world.LAUNCHER
ranks.default_mesh = mesh.default_mesh
backends.AUTOMATIC["mpi"] = _by_nodes
backends.BY_NAME |= {"mpi": _plain, "shm": _shm}
backends.CARRIERS |= {
    "staged": Carrier(lambda host, place, reduction: StagedCommunicator(host, place), carries_host=True),
    "nccl": Carrier(nccl.NCCLCommunicator, nccl.a_gpu_for_each, reductions=("nccl",)),
    "ipc": Carrier(_ipc),
}
