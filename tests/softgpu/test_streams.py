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
INT32 = 2
BIG = 5 << 20  # bytes


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


def test_what_a_rank_that_has_ended_has_left_is_freed_by_the_next_one(cuda):
    kept = thread.run(1, lambda: cuda.block(cuda.malloc(BIG), BIG))[0]
    cuda.free(kept.address)  # as the garbage collector does, from another thread
    cuda.free(cuda.malloc(8))
    assert kept.freed


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


def captured(cuda, stream, *works):
    """An executable graph of these, in one stream."""
    cuda.streamBeginCapture(stream)
    for work in works:
        cuda.issue("launch", stream, work)
    return cuda.graphInstantiate(cuda.streamEndCapture(stream))


@pytest.mark.parametrize("seed", range(4))
def test_launches_of_a_graph_follow_each_other_and_one_in_a_graph_runs_each_time(cuda, seed):
    cuda.choose("random", seed)
    first, second, seen = new(cuda), new(cuda), []
    graph = captured(cuda, first, *(Work(lambda i=i: seen.append(i)) for i in range(3)))
    for stream in (first, second, first):
        cuda.graphLaunch(graph, stream)
    cuda.deviceSynchronize()
    assert seen == [0, 1, 2] * 3
    cuda.streamBeginCapture(first)
    cuda.graphLaunch(graph, first)
    outer = cuda.graphInstantiate(cuda.streamEndCapture(first))
    seen.clear()
    for _ in range(2):
        cuda.graphLaunch(outer, second)
    cuda.deviceSynchronize()
    assert seen == [0, 1, 2] * 2


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


def test_each_rank_has_a_null_stream(cuda):
    def rank():
        cuda.memsetAsync(cuda.malloc(16), 0, 16, 0)
        return cuda.stream(0), len(cuda.stream(0).queue)

    (a, in_a), (b, in_b) = thread.run(2, rank)
    assert a is not b and in_a == in_b == 1


def test_who_polls_sees_an_end_and_a_time_needs_one(cuda):
    stream = new(cuda)
    start, stop = (cuda.eventCreateWithFlags(0) for _ in range(2))
    cuda.eventRecord(start, stream)
    cuda.eventRecord(stop, stream)
    with refused(errors.NOT_READY):
        cuda.eventElapsedTime(start, stop)
    polls = 1
    while cuda.eventQuery(stop):
        polls += 1
    assert 1 < polls < 50 and cuda.eventElapsedTime(start, stop) > 0
    cuda.issue("launch", stream, Work(int))
    while cuda.streamQuery(stream):
        polls += 1
    assert polls < 50


def test_a_copy_on_the_device_does_not_keep_the_host(cuda):
    target, source = cuda.malloc(16), cuda.malloc(16)
    cuda.memcpy(target, source, 16, 4)
    assert len(cuda.stream(0).queue) == 1
    host = np.zeros(4, np.int32)
    cuda.memcpy(host.ctypes.data, target, 16, 4)
    assert (host == -1).all() and not cuda.stream(0).queue


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


def test_messages_to_oneself_in_nested_groups_are_matched_in_order(cuda):
    def rank(comm, stream, memory):
        numbers(memory)[:] = [1, 2, 0, 0]
        nccl.group_start()
        for i in range(2):
            comm.send(memory + 4 * i, 1, INT32, 0, stream)
        nccl.group_start()
        for i in range(2):
            comm.recv(memory + 8 + 4 * i, 1, INT32, 0, stream)
        nccl.group_end()
        assert not cuda._streams[stream].queue
        nccl.group_end()
        cuda.streamSynchronize(stream)
        return numbers(memory).tolist()

    assert communicators(cuda, 1, rank) == [[1, 2, 1, 2]]


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


@pytest.mark.parametrize("mode", ["late", "random"])
def test_replays_in_another_stream_meet_those_of_the_other_rank(cuda, mode):
    """What a rank waits for is where its peer's call is now, not where it was captured."""
    cuda.choose(mode)

    def rank(comm, stream, memory):
        numbers(memory)[:] = 1
        cuda.streamBeginCapture(stream)
        comm.allReduce(memory, memory, 4, INT32, ring.SUM, stream)
        graph = cuda.graphInstantiate(cuda.streamEndCapture(stream))
        replayed = new(cuda)
        for _ in range(3):
            cuda.graphLaunch(graph, replayed)
        if comm._rank == 0:
            cuda.streamSynchronize(replayed)
            done.set()
        done.wait(10)
        return numbers(memory).tolist()

    done = threading.Event()
    assert communicators(cuda, 2, rank)[0] == [8] * 4


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
