"""The device itself: memory that is counted, copies that arrive, streams that wait for one another."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardrt import device
from tests.gpu.spin import spin

pytestmark = pytest.mark.gpu

MB = 1 << 20


def test_the_peak_is_the_most_that_was_held_at_once(gpu):
    gpu.reset_peak()
    before = gpu.peak_bytes()
    first, second = gpu.empty((8 * MB,), np.uint8), gpu.zeros((2 * MB,), np.float32)
    del first
    third = gpu.empty((4 * MB,), np.uint8)
    assert 16 * MB <= gpu.peak_bytes() - before < 17 * MB
    del second, third
    gpu.reset_peak()
    assert gpu.peak_bytes() - before < MB


def test_the_peak_counts_what_every_thread_takes_that_has_asked(gpu):
    """Ranks are threads in many tests, and CuPy tells of allocations only where it was asked to."""

    def rank():
        with device.use(gpu):
            gpu.peak_bytes()
            taken = gpu.empty((64 * MB,), np.uint8)
            return gpu.peak_bytes() - before, taken.nbytes

    with ThreadPoolExecutor(1) as pool:
        pool.submit(gpu.enter).result()  # what ended threads have left goes now, and not in between
        gc.collect()
        gpu.reset_peak()
        before = gpu.peak_bytes()
        peak, nbytes = pool.submit(rank).result()
    assert nbytes <= peak < nbytes + MB


def test_what_threads_that_have_ended_took_is_given_back(gpu):
    """CuPy keeps it by stream, and theirs nobody else will use: runs in threads would take ever more."""
    pool = pytest.importorskip("cupy").get_default_memory_pool()

    def rank():
        with device.use(gpu):
            gpu.zeros((8 * MB,), np.uint8)
            gpu.wait_here()

    held = []
    for _ in range(4):
        thread = threading.Thread(target=rank)
        thread.start()
        thread.join()
        held.append(pool.total_bytes())
    assert max(held) < held[0] + 8 * MB, held


def test_a_buffer_is_zero_and_outside_of_the_pool(gpu):
    gpu.reset_peak()
    before = gpu.peak_bytes()
    buffer = gpu.buffer(3 * MB + 1, np.float32)
    assert gpu.peak_bytes() == before
    assert not gpu.to_numpy(buffer).any()


@pytest.mark.parametrize("dtype", ["float32", "uint16", "int64"])
def test_copies_through_pinned_memory_arrive(gpu, dtype):
    host, back = gpu.pinned(100_003, dtype), gpu.pinned(100_003, dtype)
    host[...] = np.arange(host.size).astype(dtype)
    there = gpu.buffer(host.size, dtype)
    gpu.copy(there, host)
    gpu.copy(back, there)
    gpu.wait_here()
    np.testing.assert_array_equal(back, host)


def test_a_stream_waits_for_an_event_of_another(gpu):
    slow, fast = gpu.new_stream("slow"), gpu.new_stream("fast")
    event, there = gpu.new_event(), gpu.buffer(1000, np.float32)
    ones, back = gpu.pinned(1000, np.float32), gpu.pinned(1000, np.float32)
    ones.fill(1)
    slow.submit(spin, 20.0)
    slow.submit(gpu.copy, there, ones)
    slow.record(event)
    assert not event.done(), "the GPU was too fast: the test shows nothing"
    fast.wait(event)
    fast.submit(gpu.copy, back, there)
    fast.synchronize()
    assert event.done()
    np.testing.assert_array_equal(back, 1)


def test_16_bit_types_are_computed_in(gpu):
    assert gpu.compute_dtype("bfloat16").name == "bfloat16"
    x = gpu.asarray(np.ones(100, gpu.compute_dtype("bfloat16")))
    gpu.kernels.elementwise.scale_(x, 3.0)
    np.testing.assert_array_equal(gpu.to_numpy(x).astype(np.float32), 3)
