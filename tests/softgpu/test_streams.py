"""The rules of CUDA that the software GPU keeps, asked without CuPy in between."""

import ctypes
import gc
import threading

import numpy as np
import pytest

from shardrt.comm import thread, world
from tests.cuda.libraries import library_folder
from tests.softgpu import compiler, errors, nccl, products, ring, rooms, scheduler
from tests.softgpu.available import missing
from tests.softgpu.cuda import CUDA, Deadlock, Work
from tests.softgpu.start import ROOT

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
INT32, FLOAT16 = 2, 6
BIG = 6 << 20  # bytes


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(scheduler, "PATIENCE", 2.0)
    made = CUDA("late")
    monkeypatch.setattr(nccl.NcclCommunicator, "cuda", made, raising=False)
    return made


def new(cuda, priority=0):
    return cuda.streamCreateWithPriority(1, priority)


def fails(cuda, stream):
    def run():
        raise errors.failed(errors.LAUNCH_FAILURE)

    cuda.issue("launch", stream, Work(run))


def refused(status):
    """A context in which a call is refused with this status of CUDA's."""
    return pytest.raises(RuntimeError, match=str(errors.failed(status)))


def numbers(address, count=4):
    return ring.view(address, count, INT32)


def test_an_error_stays_with_the_rank_whose_work_it_is(cuda):
    met = threading.Barrier(2)

    def rank():
        mine, stream = world.current().rank, new(cuda)
        if mine == 0:
            fails(cuda, stream)
        met.wait()
        if mine == 1:  # lets all streams go on, and is told nothing
            cuda.mode = "compute first"
            cuda.issue("launch", stream, Work(int))
            cuda.streamSynchronize(stream)
        met.wait()
        if mine == 0:
            cuda.free(cuda.malloc(8))  # says nothing either
            for call in (
                cuda.deviceSynchronize,
                lambda: cuda.streamSynchronize(stream),
                cuda.deviceSynchronize,
            ):
                with refused(errors.LAUNCH_FAILURE):
                    call()

    thread.run(2, rank)


def test_a_product_that_is_refused_is_a_status(cuda):
    """Through C, an exception would be lost."""
    enqueue = products.enqueue(cuda)
    run = ctypes.cast(products._RUN(lambda job: None), ctypes.c_void_p)
    assert enqueue(new(cuda), run, None) == 0
    assert enqueue(12345, run, None) == 13  # CUBLAS_STATUS_EXECUTION_FAILED: there is no such stream


def test_a_kernel_takes_no_memory_of_the_host_that_is_not_pinned(cuda):
    nvrtc = compiler.NVRTC(library_folder(ROOT / "build" / "softgpu"))
    source = 'extern "C" __global__ void twice(int* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }'
    program = nvrtc.createProgram(source, "twice", (), ())
    nvrtc.compileProgram(program, ())
    kernel = cuda.moduleGetFunction(cuda.moduleLoadData(nvrtc.getCUBIN(program)), "twice")
    host, stream = np.ones(4, np.int32), new(cuda)

    def launch(address, threads=32):
        values = ctypes.c_void_p(address), ctypes.c_int(4)
        places = (ctypes.c_void_p * 2)(*map(ctypes.addressof, values))
        cuda.launchKernel(kernel, 1, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(places), 0)

    for address in (cuda.malloc(16), cuda.hostAlloc(16, 0)):
        numbers(address)[:] = 1
        launch(address)
        cuda.streamSynchronize(stream)
        assert set(numbers(address)) == {2}
    with refused(errors.ILLEGAL_ADDRESS):
        launch(host.ctypes.data)
    with refused(errors.INVALID_CONFIGURATION):
        launch(address, threads=1056)


def test_freed_memory_outlives_a_capture_and_the_work_before_it(cuda):
    stream, other = new(cuda), new(cuda)
    block, out = cuda.malloc(16), cuda.hostAlloc(16, 0)
    cuda.memsetAsync(block, 1, 16, stream)
    cuda.memcpyAsync(out, block, 16, 4, stream)
    cuda.streamBeginCapture(other)
    cuda.free(block)
    cuda.streamEndCapture(other)
    cuda.streamSynchronize(stream)
    assert set(numbers(out)) == {0x01010101}
    cuda.free(cuda.malloc(1))
    with refused(errors.ILLEGAL_ADDRESS):
        cuda.memcpyAsync(out, block, 16, 4, stream)


def test_memory_of_a_pool_is_poisoned_in_the_graph_that_took_it_and_gave_it_back(cuda):
    stream, before, inside = new(cuda), cuda.malloc(16), cuda.malloc(16)
    for block in (before, inside):
        numbers(block)[:] = 7
    cuda.streamBeginCapture(stream)
    capture = cuda.capture_of(stream)
    cuda.poison(
        before, 16, stream, None
    )  # taken before: somebody else may have it when the graph is launched
    cuda.poison(inside, 16, stream, capture)
    graph = cuda.graphInstantiate(cuda.streamEndCapture(stream))
    cuda.graphLaunch(graph, stream)
    cuda.streamSynchronize(stream)
    assert set(numbers(before)) == {7} and set(numbers(inside)) == {-1}


def test_all_of_a_block_is_poisoned_when_it_is_new_and_when_it_is_freed(cuda):
    block = cuda.malloc(BIG)
    whole = ring.view(block, BIG // 4, INT32)
    assert (whole == -1).all()
    whole[:] = 0
    kept = cuda.block(block, BIG)
    cuda.free(block)
    assert (whole == -1).all() and kept.freed


def test_a_refused_call_invalidates_the_capture(cuda):
    stream = new(cuda)
    cuda.streamBeginCapture(stream)
    for call, status in (
        (lambda: cuda.streamSynchronize(stream), errors.CAPTURE_UNSUPPORTED),
        (lambda: cuda.issue("launch", stream, Work(int)), errors.CAPTURE_INVALIDATED),
        (lambda: cuda.streamIsCapturing(stream), errors.CAPTURE_INVALIDATED),
        (lambda: cuda.streamEndCapture(stream), errors.CAPTURE_INVALIDATED),
    ):
        with refused(status):
            call()
    assert not cuda.streamIsCapturing(stream)


def test_garbage_that_is_collected_while_a_stream_is_chosen_runs_nothing(cuda):
    stream, block, depth = new(cuda), cuda.malloc(64), []

    class Collecting(Work):
        def ready(self):
            if not depth:
                depth.append(1)
                gc.collect()
                cuda.free(block)  # as a finaliser does
                new(cuda)
                cuda.streamDestroy(new(cuda))
                depth.append(len(cuda._streams[stream].queue))
            return True

    cuda.mode = "random"
    cuda.issue("launch", stream, Collecting(int))
    cuda.issue("launch", stream, Work(int))
    cuda.streamSynchronize(stream)
    assert depth == [1, 2]  # both were still there behind the call


def test_what_is_destroyed_is_forgotten_and_its_work_still_runs(cuda):
    stream, event, ran = new(cuda), cuda.eventCreateWithFlags(2), []
    cuda.issue("launch", stream, Work(lambda: ran.append(1)))
    cuda.streamDestroy(stream)
    cuda.eventDestroy(event)
    with refused(errors.INVALID_HANDLE):
        cuda.streamSynchronize(stream)
    with refused(errors.INVALID_HANDLE):
        cuda.eventRecord(event, 0)
    cuda.deviceSynchronize()
    assert ran == [1]


def test_a_process_cannot_open_its_own_memory_and_shares_whole_allocations_only(cuda):
    small, large = cuda.malloc(512), cuda.malloc(BIG)
    handle = cuda.ipcGetMemHandle(large)
    with refused(errors.DEVICE_UNINITIALIZED):
        cuda.ipcOpenMemHandle(handle)
    for address in (small, large + 512):
        with refused(errors.INVALID_VALUE):
            cuda.ipcGetMemHandle(address)


# -- NCCL


def communicators(cuda, ranks, body):
    """`body(communicator, stream, memory)` on each rank."""
    key, cuda.visible = rooms.new_key(False), tuple(range(ranks))

    def rank():
        cuda.setDevice(world.current().rank)
        comm = nccl.NcclCommunicator(ranks, key, world.current().rank)
        return body(comm, new(cuda), cuda.malloc(256))

    return thread.run(ranks, rank)


def test_ranks_that_call_different_things_are_all_told(cuda):
    def rank(comm, stream, memory):
        if comm._rank:
            comm.allReduce(memory, memory, 4, INT32, ring.SUM, stream)
        else:
            comm.broadcast(memory, memory, 4, INT32, 0, stream)
        with pytest.raises(RuntimeError, match="ranks call different things"):
            cuda.streamSynchronize(stream)
        return "told"

    assert communicators(cuda, 2, rank) == ["told"] * 2


def test_a_communicator_serves_two_streams_only_if_events_order_them(cuda):
    def rank(comm, stream, memory):
        other, event = new(cuda), cuda.eventCreateWithFlags(2)
        comm.allReduce(memory, memory, 4, INT32, ring.SUM, stream)
        with pytest.raises(RuntimeError, match="two streams"):
            comm.allReduce(memory, memory, 4, INT32, ring.SUM, other)
        cuda.eventRecord(event, stream)
        cuda.streamWaitEvent(other, event)
        comm.allReduce(memory, memory, 4, INT32, ring.SUM, other)
        cuda.streamSynchronize(other)
        comm.allReduce(memory, memory, 4, INT32, ring.SUM, stream)

    communicators(cuda, 1, rank)


def test_a_rank_that_calls_nothing_is_a_deadlock(cuda):
    def rank(comm, stream, memory):
        if comm._rank == 0:
            comm.allReduce(memory, memory, 4, INT32, ring.SUM, stream)
            with pytest.raises(Deadlock):
                cuda.streamSynchronize(stream)

    communicators(cuda, 2, rank)


def test_nccl_takes_no_memory_of_the_host(cuda):
    host = np.zeros(4, np.int32)

    def rank(comm, stream, memory):
        with pytest.raises(AssertionError, match="memory of the host"):
            comm.broadcast(host.ctypes.data, host.ctypes.data, 4, INT32, 0, stream)

    communicators(cuda, 1, rank)


def test_each_hop_of_a_sum_rounds_to_the_type_of_the_buffer(cuda):
    """1 + 2**-11 is 1 in float16, and 1 + 3 * 2**-11 is 1 + 2**-9."""

    def rank(comm, stream, memory):
        ring.view(memory, 4, FLOAT16)[:] = 1 if comm._rank == 1 else 2.0**-11
        comm.reduceScatter(memory, memory + 128, 1, FLOAT16, ring.SUM, stream)
        cuda.streamSynchronize(stream)
        return float(ring.view(memory + 128, 1, FLOAT16)[0])

    # The slice of rank 0 begins at rank 1.
    assert communicators(cuda, 4, rank)[:2] == [1, 1 + 2.0**-9]


def test_two_ranks_on_one_gpu_are_refused(cuda, monkeypatch):
    monkeypatch.setattr(CUDA, "setDevice", lambda cuda, index: None)
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        communicators(cuda, 2, lambda *_: None)


def test_a_result_over_what_is_sent_is_refused(cuda):
    def rank(comm, stream, memory):
        comm.reduceScatter(memory, memory + 4, 8, INT32, ring.SUM, stream)

    with pytest.raises(AssertionError, match="overlap"):
        communicators(cuda, 2, rank)
