"""What plugs into the runtime: each device and communicator beside those of the core is registered here.

`import shardrt` runs this file. It loads neither CuPy nor MPI: what needs them is imported when it is chosen.
"""

from shardrt import device
from shardrt.comm import backends, nccl, supervision
from shardrt.comm.backends import Carrier
from shardrt.comm.protocol import Communicator
from shardrt.comm.staged import StagedCommunicator
from shardrt.comm.supervision import Supervisor
from shardrt.comm.world import World
from shardrt.device import Device, cuda
from shardrt.faults import deadline, failure, guard


def _shm(ranks: World) -> Communicator:
    from shardrt.comm.shm import ShmCommunicator

    if ranks.local_size < ranks.size:
        raise ValueError("communicator: 'shm' needs all ranks on one node; 'auto' combines it with MPI")
    return ShmCommunicator(ranks.root.Dup())


def _by_nodes(ranks: World) -> Communicator:
    from shardrt.comm import hierarchical

    return hierarchical.create(ranks.root.Dup())


def _ipc(host: Communicator, place: Device, reduction: str) -> Communicator:
    from shardrt.comm.ipc import IPCCommunicator

    return IPCCommunicator(host, place)


supervision.supervisor = Supervisor(
    guard.start, failure.install_hooks, failure.departed, failure.at, deadline.within, failure.end_job
)
device.KINDS["cuda"] = device.Kind(cuda.CUDADevice, lambda: cuda.count())
backends.OVER_MPI |= {"auto": _by_nodes, "shm": _shm}
backends.CARRIERS |= {
    "staged": Carrier(lambda host, place, reduction: StagedCommunicator(host, place), carries_host=True),
    "nccl": Carrier(nccl.NCCLCommunicator, nccl.a_gpu_for_each, reductions=("nccl",)),
    "ipc": Carrier(_ipc),
}
