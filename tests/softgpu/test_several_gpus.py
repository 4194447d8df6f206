"""Machines with several GPUs: each rank computes on its own, and finds NCCL where it sees no other one."""

import gc
import json
import os
import threading
from functools import partial

import numpy as np
import pytest

from bench.collectives.__main__ import main
from shardrt import device
from shardrt.comm import init_device_mesh, thread
from shardrt.device import threads
from shardrt.device.cpu import ThreadStream
from tests import lab
from tests.cuda.small_gpt import VARIANTS, agree, train
from tests.ranks import mpirun
from tests.softgpu.available import missing

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SEEN = """
import json
from shardrt.comm import init_device_mesh
mesh = init_device_mesh("cuda")
kind = type(mesh.communicator("gather")).__name__
numbers = mesh.device.zeros(2, "f4") + mesh.rank
mesh.communicator("gather").all_reduce(numbers, stream=mesh.device.current_stream)
found = json.dumps([kind, mesh.device.index, mesh.device.to_numpy(numbers).tolist()])
everyone = mesh.communicator("control").all_gather_bytes(found.encode())
if mesh.rank == 0:
    for each in everyone:
        print(each.decode(), flush=True)
"""
GROUPS = """
from shardrt.comm import init_device_mesh
mesh = init_device_mesh("cuda", (2, 2), ("dp", "tp"))
for axis in ("tp", "dp"):
    for role in ("gather", "reduce"):
        mesh.communicator(role, axis)
print(type(mesh.communicator("gather")).__name__, flush=True)
for source in range(3):
    mesh.pair(source, source + 1)
"""
CHOSEN = """
import threading
import time
from itertools import count
import cupy
from shardrt.comm import init_device_mesh
from shardrt.device.cpu import ThreadStream
from shardrt.faults.watchdog import Watch
from shardrt.train.prefetch import Prefetched
chosen, choose = {}, cupy.cuda.runtime.setDevice
def seen(index):
    chosen[threading.current_thread().name] = index
    choose(index)
cupy.cuda.runtime.setDevice = seen
batches, stream = Prefetched(lambda step: time.sleep(0.1), 0, 1000), ThreadStream("stream")
mesh = init_device_mesh("cuda")
mesh.communicator("gather")
with Watch(mesh):
    for _ in range(20):
        next(batches)
    stream.synchronize()
names = [name.removeprefix("shardrt-") for name, index in chosen.items() if index == mesh.device.index]
told = " ".join([f"{mesh.rank}:", *sorted(set(names) - {"MainThread"})])
for each in mesh.communicator("control").all_gather_bytes(told.encode()):
    if mesh.rank == 0:
        print(each.decode(), flush=True)
"""
HIDDEN = """
import os, runpy, sys
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["PMI_RANK"]
sys.argv[:] = ["run", *sys.argv[1:]]
runpy.run_module("tests.softgpu.run", run_name="__main__", alter_sys=True)
"""


def test_thread_ranks_on_a_gpu_each_train_as_the_cpu(software):
    """A kernel, a stream and a handle of cublasLt belong to the GPU that they were made on."""
    expected = thread.run(2, train, "cpu", **VARIANTS["all on the host"])
    for communicator in ("nccl", "staged", "nccl"):  # again, with all kernels loaded
        found = thread.run(2, train, "cuda", communicator=communicator, **VARIANTS["all on the host"])
        agree(found, expected, 2e-5)
    assert {kernel.device for kernel in software._kernels.values()} >= {0, 1}


def test_a_gpu_has_one_device_object_whatever_it_is_called(software):
    """Two would have two compute streams, and CuPy would go back from a side stream to the wrong one."""
    assert device.get("cuda") is device.get("cuda:0") is not device.get("cuda:1")


def test_kernels_go_to_the_compute_stream_after_a_mesh_was_made_beside_the_device(software):
    def rank():
        here = device.get("cuda")
        device.set_current(here)
        device.set_current(init_device_mesh("cuda").device)
        device.set_current(here)
        here.new_stream("side").submit(int)
        return cupy.cuda.get_current_stream().ptr == here.current_stream.handle.ptr

    assert thread.run(1, rank) == [True]


@pytest.mark.mpi
def test_ranks_that_each_see_one_gpu_of_their_own_take_nccl():
    """As by `srun --gpus-per-task=1`."""
    done = mpirun(2, ["-c", HIDDEN, "-c", SEEN], SOFTGPU_DEVICES="2")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found == [["NCCLCommunicator", 0, [1.0, 1.0]]] * 2
    assert "staged" not in done.stderr


@pytest.mark.mpi
def test_ranks_that_share_a_gpu_are_staged_and_of_all_groups_and_roles_one_rank_says_so_once():
    done = mpirun(4, ["-m", "tests.softgpu.run", "-c", GROUPS], SOFTGPU_DEVICES="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["StagedCommunicator"] * 4
    assert done.stderr.count("UserWarning") == 1
    assert "ranks 0 and 2 share a GPU" in done.stderr


def test_a_thread_of_the_host_that_waits_for_a_gpu_makes_no_context_on_another(software):
    """Each takes hundreds of MB. A new thread is at GPU 0, and CUDA makes what is not there."""
    gc.collect()  # what earlier tests have left belongs to GPU 0
    software.contexts.clear()

    def rank():
        here = device.get("cuda:1")
        device.set_current(here)
        event, stream = here.new_event(), ThreadStream("optimizer")
        here.current_stream.record(event)
        stream.wait(event)
        stream.synchronize()
        held = [here.pinned(8, np.uint8)]
        for call in (event.done, held.clear):  # the second frees pinned memory
            other = threading.Thread(target=call)
            other.start()
            other.join()
        return set(software.contexts)

    assert thread.run(1, rank) == [{1}]


@pytest.mark.parametrize("how", ["last reference", "collector"])
@pytest.mark.parametrize("what", ["stream", "event", "buffer"])
def test_what_ends_in_a_thread_of_the_host_makes_no_context_on_another_gpu(software, what, how, monkeypatch):
    """A worker, begun before the GPU was chosen, drops the last reference, or the collector runs in it."""
    gc.collect()
    monkeypatch.setattr(threads, "_gpu", None)  # an earlier test may have chosen one
    worker = ThreadStream("worker")
    worker.synchronize()

    def rank():
        here = device.get("cuda:1")
        device.set_current(here)
        made = {"stream": partial(here.new_stream, "side"), "event": here.new_event}
        held = [made.get(what, partial(here.buffer, 8, np.uint8))()]
        software.contexts.clear()
        if how == "collector":
            held.append(held)
            gc.disable()
            del held
            worker.submit(gc.collect)
        else:
            worker.submit(held.clear)
        worker.synchronize()
        gc.enable()
        return set(software.contexts)

    assert thread.run(1, rank) == [{1}]


@pytest.mark.mpi
def test_all_threads_of_a_rank_choose_its_gpu():
    """The guard's is begun before MPI, those of batches and of a stream before the mesh."""
    lines = lab.printed(2, "-m", "tests.softgpu.run", "-c", CHOSEN, SOFTGPU_DEVICES="2")
    names = "batches guard nccl watchdog stream watchdog"
    assert lines == [f"{rank}: {names}" for rank in range(2)]


def test_asking_for_a_gpu_leaves_the_current_one(software):
    """The first `get` of a process makes the device, which chooses its GPU."""

    def rank():
        device.set_current(device.get("cuda:0"))
        device._get.__wrapped__("cuda:1")
        return cupy.cuda.runtime.getDevice()

    assert thread.run(1, rank) == [0]


def test_more_than_eight_streams_have_queues_of_their_own(software, monkeypatch):
    """The driver reads how many when the first context is made."""
    asked = []
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    runtime = cupy.cuda.runtime
    choose = runtime.setDevice

    def chosen(index):
        asked.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        choose(index)

    monkeypatch.setattr(runtime, "setDevice", chosen)
    device.get("cuda")
    assert asked[0] == "32"


def test_a_device_that_is_not_current_acts_on_its_own_gpu_and_leaves_the_current_one(software):
    """Its memory, its compute stream, and the streams and events that are made."""

    def rank():
        here, other = device.get("cuda:0"), device.get("cuda:1")
        device.set_current(here)
        used, stream = software.used[1], software.stream
        array = other.buffer(8, np.float32)
        made = other.new_stream("side")
        compute, event = other.current_stream, other.new_event()
        assert cupy.cuda.runtime.getDevice() == 0
        assert cupy.cuda.get_current_stream().ptr == here.current_stream.handle.ptr
        with device.use(other):
            assert other.current_stream is compute
            compute.record(event)
            compute.synchronize()
            assert other.to_numpy(array).tolist() == [0] * 8
        devices = [stream(each.handle.ptr).device for each in (compute, made, here.current_stream)]
        return software.used[1] - used, array.device.id, devices

    assert thread.run(1, rank) == [(32, 1, [1, 1, 0])]


def test_a_thread_that_has_chosen_its_gpu_by_cupy_stays_there(software):
    def rank():
        here = device.get("cuda:0")
        device.set_current(here)
        event, found = here.new_event(), []
        here.current_stream.record(event)

        def other():
            cupy.cuda.runtime.setDevice(1)
            event.synchronize()
            found.append(cupy.cuda.runtime.getDevice())

        user = threading.Thread(target=other)
        user.start()
        user.join()
        return found

    assert thread.run(1, rank) == [[1]]


@pytest.mark.parametrize("name", ["setDevice", "getDevice"])
def test_pinned_memory_that_is_collected_while_a_thread_chooses_gpu_0_changes_no_gpu(
    software, monkeypatch, name
):
    """The collector may run after any step of Python, here after the GPU is chosen or asked for."""
    runtime = cupy.cuda.runtime
    last, here = device.get("cuda:2"), device.get("cuda:0")
    last.enter()  # the GPU that a thread of the host takes
    garbage, found, call = [last.pinned(8, np.float32)], [], getattr(runtime, name)

    def then_collect(*args):
        returned = call(*args)
        garbage.clear()
        return returned

    def user():
        monkeypatch.setattr(runtime, name, then_collect)
        made = here.new_event() if name == "getDevice" else None
        here.enter()
        found.append((runtime.getDevice(), here.current_stream.handle.device_id, made))

    thread_of_user = threading.Thread(target=user)
    thread_of_user.start()
    thread_of_user.join()
    current, compute, made = found[0]
    assert (current, compute) == (0, 0)
    if made is not None:
        assert software._event(made.handle.ptr).device == 0


def test_the_benchmark_of_collectives_has_a_gpu_for_each_of_g_ranks(software, capsys):
    """nccl-tests' -g in one process, with each call timed by events."""
    words = "all_reduce reduce_scatter hypercube -g 2 -b 64 -e 1K -f 16 -d float,half -n 2 --rounds 1 -I 1"
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "device  1 [" in printed and "[cpu]" not in printed
    assert "# nccl: AllReduce" in printed and "# Out of bounds values : 0 OK" in printed
    lines = [line.split() for line in printed.splitlines() if line and line[0] != "#"]
    assert len(lines) == 12 and all("-" not in line[-2:] for line in lines if line[2] == "float")
