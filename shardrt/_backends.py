"""What plugs into the runtime: each device and communicator beside those of the core is registered here.

`import shardrt` runs this file. Its functions import a backend when it is chosen, so neither CuPy nor MPI is
loaded before.
"""

from shardrt import device
from shardrt.comm import backends, supervision
from shardrt.comm.backends import Carrier
from shardrt.comm.protocol import Communicator
from shardrt.comm.staged import StagedCommunicator
from shardrt.comm.supervision import Supervisor
from shardrt.comm.world import World
from shardrt.device import Device
from shardrt.faults import deadline, failure, guard


def _cuda(index: int, host: Device) -> Device:
    from shardrt.device.cuda import CUDADevice

    return CUDADevice(index, host)


def _gpus() -> int:
    from shardrt.device import cuda

    return cuda.count()


def _shm(ranks: World) -> Communicator:
    from shardrt.comm.shm import ShmCommunicator

    if ranks.local_size < ranks.size:
        raise ValueError("communicator: 'shm' needs all ranks on one node; 'auto' combines it with MPI")
    return ShmCommunicator(ranks.root.Dup())


def _by_nodes(ranks: World) -> Communicator:
    from shardrt.comm import hierarchical

    return hierarchical.create(ranks.root.Dup())


def _staged(host: Communicator, place: Device, reduction: str) -> Communicator:
    return StagedCommunicator(host, place)


def _nccl(host: Communicator, place: Device, reduction: str) -> Communicator:
    from shardrt.comm import nccl

    return nccl.create(host, place, reduction)


def _suits_nccl(host: Communicator, place: Device) -> bool:
    from shardrt.comm import nccl

    return nccl.a_gpu_for_each(host, place)


def _ipc(host: Communicator, place: Device, reduction: str) -> Communicator:
    from shardrt.comm.ipc import IPCCommunicator

    return IPCCommunicator(host, place)


supervision.supervisor = Supervisor(
    guard.start, failure.install_hooks, failure.departed, failure.at, deadline.within, failure.end_job
)
device.KINDS["cuda"] = device.Kind(_cuda, _gpus)
backends.OVER_MPI |= {"auto": _by_nodes, "shm": _shm}
backends.CARRIERS |= {
    "staged": Carrier(_staged, carries_host=True),
    "nccl": Carrier(_nccl, _suits_nccl, reductions=("nccl",)),
    "ipc": Carrier(_ipc),
}
