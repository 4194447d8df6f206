"""Communicators of device arrays: the contract of tests/cuda on the GPU, NCCL and CUDA IPC by processes."""

import numpy as np
import pytest

from shardrt.comm.backends import create
from shardrt.device.cuda import CUDADevice
from tests.cuda import small_gpt
from tests.cuda import test_communicators as contract
from tests.ranks import mpirun

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def patient(request, monkeypatch):
    """The contract's tests order no streams: the host does. Threads can only stage."""
    if request.node.name.startswith("test_between_processes"):
        return
    kind = getattr(request.node, "callspec", None)
    if kind is not None and kind.params.get("kind", "staged") != "staged":
        pytest.skip("between threads only 'staged'")
    for name in ("asarray", "copy", "empty"):
        monkeypatch.setattr(CUDADevice, name, waited(getattr(CUDADevice, name)))
    monkeypatch.setattr(CUDADevice, "to_numpy", after_all(CUDADevice.to_numpy))


def waited(method):
    def call(self, *args):
        result = method(self, *args)
        self.wait_here()
        return result

    return call


def after_all(method):
    def call(self, *args):
        self._cupy.cuda.runtime.deviceSynchronize()
        return method(self, *args)

    return call


TestStaged = type(
    "TestStaged",
    (),
    {name: staticmethod(test) for name, test in vars(contract).items() if name.startswith("test_")},
)


def test_nccl_on_one_rank(gpu):
    from shardrt.comm.nccl import NCCLCommunicator

    comm, stream = NCCLCommunicator(create("single"), gpu), gpu.new_stream("collectives")
    values = np.arange(1001, dtype=np.float32)
    buffer, output = gpu.asarray(values), gpu.asarray(np.full(1001, np.nan, np.float32))
    comm.all_gather(buffer, stream=stream)
    comm.reduce_scatter(output, buffer, stream=stream, scale=0.5)
    comm.all_reduce(buffer, stream=stream)
    comm.broadcast(buffer, root=0, stream=stream)
    comm.barrier(stream=stream)
    stream.synchronize()
    assert getattr(comm, "_transport", None) is None or comm._transport.error() == ""
    np.testing.assert_array_equal(gpu.to_numpy(buffer), values)
    np.testing.assert_array_equal(gpu.to_numpy(output), values / 2)
    comm.close()


# NVIDIA promises nothing for two ranks on one GPU; it has worked with NCCL_HOSTID.
ON_ONE_GPU = pytest.mark.xfail(strict=False, reason="NCCL supports one rank for each GPU")
PROGRAM = """
import os, sys
rank = next(os.environ[n] for n in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK") if n in os.environ)
os.environ["NCCL_HOSTID"] = f"rank {rank}"  # NCCL refuses two ranks on one GPU of one host
os.environ["NCCL_SOCKET_IFNAME"] = "lo"
sys.path.insert(0, ".")
from tests.gpu.test_communicators import losses
sys.stdout.write(" ".join(["losses", *map(str, losses(sys.argv[1]))]) + "\\n")  # a whole line
"""


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["staged", pytest.param("nccl", marks=ON_ONE_GPU), "ipc"])
def test_between_processes_training_has_the_losses_of_threads(gpu, kind, ranks):
    pytest.importorskip("mpi4py")
    from shardrt.comm import thread

    expected = np.mean(thread.run(ranks, losses, "staged"), axis=0)
    done = mpirun(ranks, ["-c", PROGRAM, kind], timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("losses")]
    assert len(lines) == ranks
    found = np.mean(np.array(lines, float), axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def losses(kind):
    """Of a small GPT on this rank."""
    return [loss for loss, _ in small_gpt.train("cuda", communicator=kind, layers=2)[0]]
