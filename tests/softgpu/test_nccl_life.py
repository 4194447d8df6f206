"""NCCL's life: graphs before communicators, errors that no call reports, a library that is not there."""

import gc
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from shardrt import device
from shardrt.comm import init_device_mesh, nccl_watchdog, supervision, thread
from shardrt.faults import failure
from tests import lab
from tests.ranks import BACKSTOP, ROOT, clean_environment, mpirun
from tests.softgpu import nccl
from tests.softgpu.available import missing

pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
BROKEN = """
import time
from shardrt.comm import init_device_mesh
from tests.softgpu.nccl import REMOTE_ERROR
mesh = init_device_mesh("cuda")
gather = mesh.communicator("gather")
numbers = mesh.device.zeros(2, "f4")
gather.all_reduce(numbers, stream=mesh.device.current_stream)
mesh.device.current_stream.synchronize()
if mesh.rank == 1:
    print("at", time.time(), flush=True)
    gather._transport.comm.fault = REMOTE_ERROR
    time.sleep(100)  # its peer is lost; this rank waits for the device
gather.all_reduce(numbers, stream=mesh.device.current_stream)
mesh.device.current_stream.synchronize()
"""
DROPS = """
import gc
import weakref
from itertools import count
from shardrt.comm import init_device_mesh, mpi_world
from tests.softgpu.nccl import NcclCommunicator
rank, numbers = mpi_world.launch().rank, count()
make, destroy = NcclCommunicator.__init__, NcclCommunicator.destroy
def made(self, *given):
    self.number = next(numbers)
    make(self, *given)
def ends(self):
    if self.alive:
        print(f"{rank}: communicator {self.number}", flush=True)
    destroy(self)
NcclCommunicator.__init__, NcclCommunicator.destroy, NcclCommunicator.__del__ = made, ends, ends  # as CuPy's
for close in (True, True, False, False):
    mesh = init_device_mesh("cuda")
    for role in ("gather", "reduce"):
        mesh.communicator(role)
    if close:
        mesh.close()
    seen = weakref.ref(mesh)
    del mesh
    if rank == 0:
        gc.collect()  # on the other rank at another time
        assert seen() is None, "a mesh outlives its last reference"
print(f"{rank}: end", flush=True)
"""
ENDS = """
import time
from shardrt.comm import init_device_mesh
from shardrt.comm import supervision
from tests.softgpu.nccl import INVALID_USAGE
comm = init_device_mesh("cuda").communicator("gather")._transport.comm

@supervision.after_all_programs
def ends():
    comm.fault = INVALID_USAGE
    time.sleep(1.5)
"""
AT_EXIT = """
import atexit, os
@atexit.register
def last():
    print(bool(cuda.captured()), flush=True)
    os._exit(0)
from tests.softgpu.start import start
cuda = start()
from shardrt import device
here = device.get("cuda")
device.set_current(here)
numbers = here.zeros(2, "f4")
graph = here.capture(lambda: numbers.fill(1))
print(bool(cuda.captured()), flush=True)
"""
MB = 1 << 20


def captured(mesh):
    """(Graph of a sum over the ranks, what is summed)."""
    here, gather = mesh.device, mesh.communicator("gather")
    numbers = here.zeros(2, np.float32)

    def work():
        numbers[...] = 1
        gather.all_reduce(numbers, stream=here.current_stream)

    work()
    return here.capture(work), numbers


def add_one(numbers, *_):
    numbers += 1


@pytest.mark.parametrize("how", ["close", "abandon"])
def test_a_communicator_ends_though_a_graph_has_its_calls(software, how):
    def rank():
        mesh = init_device_mesh("cuda", communicator="nccl")
        graph, numbers = captured(mesh)
        graph.replay()
        assert mesh.device.to_numpy(numbers).tolist() == [2, 2]
        getattr(mesh.communicator("gather"), how)()
        with pytest.raises(RuntimeError, match="a communicator that this graph calls has been closed"):
            graph.replay()
        return True

    assert thread.run(2, rank) == [True, True]


def test_a_graph_without_calls_of_a_communicator_outlives_it(software):
    def rank():
        mesh = init_device_mesh("cuda", communicator="nccl")
        here, numbers = mesh.device, mesh.device.zeros(2, np.float32)
        graph = here.capture(partial(add_one, numbers))
        mesh.communicator("gather").close()
        graph.replay()
        return here.to_numpy(numbers).tolist()

    assert thread.run(2, rank) == [[1, 1]] * 2


def test_what_a_graph_refers_to_goes_after_it(software):
    """NCCL destroys a communicator that is collected, and waits for its graphs."""

    class Communicator:
        def __del__(self):
            found.append(bool(software.captured()))

    found = []

    def rank():
        here = device.get("cuda")
        device.set_current(here)
        work = partial(add_one, here.zeros(2, np.float32), Communicator())
        graph = here.capture(work)
        assert software.captured()
        del work, graph
        gc.collect()

    thread.run(1, rank)
    assert found == [False]


def test_graphs_go_when_the_program_ends():
    """Then Python collects communicators in an order of its own, and NCCL destroys each that it collects."""
    words, how = [sys.executable, "-c", AT_EXIT], {"capture_output": True, "text": True, "cwd": ROOT}
    done = subprocess.run(words, env=clean_environment(), timeout=BACKSTOP, **how)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_nccl_finds_free_what_no_array_has_any_more(software, monkeypatch):
    """It takes memory of its own, for which CuPy's pool gives nothing back."""
    create, held = nccl.NcclCommunicator.__init__, {}

    def created(self, *how):
        held[software.device] = software.used[software.device]
        create(self, *how)

    monkeypatch.setattr(nccl.NcclCommunicator, "__init__", created)

    def rank():
        mesh = init_device_mesh("cuda", communicator="nccl")
        before = software.used[mesh.device.index]
        mesh.device.empty(40 * MB, np.uint8)
        mesh.communicator("gather")
        return held[mesh.device.index] - before

    assert max(thread.run(2, rank)) < 40 * MB


def test_threads_end_a_communicator_one_after_the_other(software, monkeypatch):
    """CuPy forgets its handle when ncclCommAbort has returned: until then another call frees it again."""
    both, met = threading.Barrier(2), []

    def ends(comm):
        try:
            met.append(both.wait(0.5))
        except threading.BrokenBarrierError:
            both.reset()

    def rank():
        mesh = init_device_mesh("cuda", communicator="nccl")
        transport = mesh.communicator("gather")._transport
        if mesh.rank == 0:
            with monkeypatch.context() as patch:
                for name in ("abort", "destroy"):
                    patch.setattr(nccl.NcclCommunicator, name, ends)
                other = threading.Thread(target=transport.abort)
                other.start()
                transport.close()
                other.join()
        mesh.communicator("control").all_gather_bytes(b"")

    thread.run(2, rank)
    assert not met


@pytest.mark.mpi
@pytest.mark.timed
def test_an_error_in_the_threads_of_nccl_ends_the_job_and_is_named():
    """CuPy has no name for this one; the next test has one that it names."""
    done = mpirun(2, ["-m", "tests.softgpu.run", "-c", BROKEN])
    ended = time.time()
    assert done.returncode == nccl_watchdog.EXIT_CODE, done.stderr
    assert "NCCL failed on rank 1, communicator 'gather': KeyError: 6" in done.stderr
    assert ended - float(done.stdout.split()[1]) < 30, "the limit of a hang"


def test_an_error_of_nccl_names_the_rank_of_the_job(software, monkeypatch):
    """Not the one of the communicator, of which groups have one each."""
    message, heard = [], threading.Event()

    def end_job(report, code):
        message.append(report)
        heard.set()

    monkeypatch.setattr(supervision, "supervisor", supervision.Supervisor(end_job=end_job))

    def rank():
        mesh = init_device_mesh("cuda", (2, 2), ("dp", "tp"), communicator="nccl")
        comm = mesh.communicator("gather", "tp")._transport.comm
        if mesh.rank == 3:
            comm.fault = nccl.INVALID_USAGE
            heard.wait(30)
            comm.fault = 0
        mesh.communicator("control").all_gather_bytes(b"")

    thread.run(4, rank)
    assert message[0].startswith(
        "NCCL failed on rank 3, communicator 'gather': NcclError: NCCL_ERROR_INVALID_USAGE"
    )


@pytest.mark.mpi
def test_peers_that_go_when_all_programs_have_ended_are_no_error():
    done = mpirun(2, ["-m", "tests.softgpu.run", "-c", ENDS])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.mpi
def test_communicators_are_destroyed_in_one_order_and_not_by_the_collector():
    """At `close`, or when all programs have ended: NCCL's destroy waits for other ranks."""
    lines = lab.printed(2, "-m", "tests.softgpu.run", "-c", DROPS)
    destroyed = [f"communicator {number}" for number in range(8)]
    expected = [*destroyed[:4], "end", *destroyed[4:]]
    for rank in ("0", "1"):
        message = [line.split(": ") for line in lines]
        assert [what for who, what in message if who == rank] == expected


@pytest.mark.parametrize(
    "takes, status, warned, expected",
    [
        ((1 << 40, 0), 1, "", "Failed to CUDA calloc 1099511627776 bytes, and"),
        ((0, 1 << 40), 1, "", "Failed to CUDA calloc 1099511627776 bytes, and"),
        (None, 1, "Cuda failure 2 'out of memory'", "Cuda failure 2 'out of memory', and"),
        (None, 1, "Cuda failure 700 'an illegal memory access was encountered'", ""),
        (None, 5, "Cuda failure 2 'out of memory'", ""),  # an old one: this error comes from no call of CUDA
    ],
)
def test_a_gpu_without_room_for_nccl_is_a_memory_error(
    software, monkeypatch, takes, status, warned, expected
):
    """When a communicator is made, or at its first call."""

    def fails(*args):
        nccl.warn(warned)
        raise nccl.NcclError(status)

    def rank():
        mesh = init_device_mesh("cuda", communicator="nccl")
        if takes is None:
            monkeypatch.setattr(nccl.NcclCommunicator, "allReduce", fails)
        else:
            monkeypatch.setattr(nccl.NcclCommunicator, "takes", takes)
        with pytest.raises(RuntimeError if not expected else MemoryError) as message:
            here, gather = mesh.device, mesh.communicator("gather")
            gather.all_reduce(here.zeros(2, np.float32), stream=here.current_stream)
        if expected:
            assert f"no room for NCCL on GPU {mesh.rank}: {expected} 1" in str(message.value)
        return failure.code_of(message.value)

    assert thread.run(2, rank) == [failure.OUT_OF_MEMORY if expected else 1] * 2


def test_a_communicator_that_is_closed_has_no_errors(software):
    def rank():
        mesh = init_device_mesh("cuda", communicator="nccl")
        transport = mesh.communicator("gather")._transport
        transport.comm.fault = nccl.IN_PROGRESS
        assert transport.error() == ""
        transport.comm.fault = nccl.INVALID_USAGE
        before = transport.error()
        mesh.communicator("gather").close()
        return before, transport.error()

    assert thread.run(2, rank) == [("NcclError: NCCL_ERROR_INVALID_USAGE: planted", "")] * 2


def test_without_nccl_there_is_one_line_that_says_what_to_install(software, monkeypatch):
    import cupy

    monkeypatch.setattr(cupy.cuda, "nccl", SimpleNamespace(available=False))  # what CuPy then has
    with pytest.raises(RuntimeError, match=r"CuPy finds no NCCL: pip install 'nvidia-nccl-cu13>=2.27.7'"):
        thread.run(2, lambda: init_device_mesh("cuda", communicator="nccl").communicator("gather"))
