"""The simulated device: what is submitted, recorded and waited for is in its program, with CUDA's meaning."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardrt import device
from shardrt.device import program
from shardrt.device.addresses import ranges_of
from shardrt.device.arena import Arena
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.memory import Pool
from shardrt.device.program import HOST, Free, HostRead, HostWait, Program, Record, Take, Wait, Work
from shardrt.device.simulated import SimulatedDevice


@dataclass
class Cost:
    reads: tuple = ()
    writes: tuple = ()
    flops: int = 0
    nbytes: int = 0
    launches: int = 1
    sizes: tuple = ()
    value: Any = None


def kernels():
    """A package with one module, as those of shardrt.kernels.costs are."""
    answer, new = SimpleNamespace(what="finite", usual=True), SimpleNamespace(shape=(2, 3), dtype=np.int64)
    return SimpleNamespace(
        sums=SimpleNamespace(
            ROWS=64,
            add=lambda x, y, out: Cost((x, y), (out,), x.size, 3 * x.nbytes, 2, (x.size,)),
            finite=lambda x: Cost((x,), value=answer),
            table=lambda x: Cost((x,), value=new),
            rows=lambda count: count // 64,
        )
    )


@pytest.fixture
def here():
    return SimulatedDevice(kernels=kernels())


def of_kind(here, *kinds):
    return [item for item in here.program.items if isinstance(item, kinds)]


def test_a_kernel_is_work_of_the_stream_that_runs_it(here):
    x, y = here.empty(100, np.float32), here.empty(100, np.float32)
    here.kernels.sums.add(x, x, y)
    gather = here.new_stream("gather")
    gather.submit(here.kernels.sums.add, x, y, y, label="unshard blocks.0")
    first, second = of_kind(here, Work)
    assert (first.stream, first.name, first.label) == ("compute", "sums.add", "")
    assert (second.stream, second.label) == ("gather", "unshard blocks.0")
    assert (first.flops, first.nbytes, first.launches, first.sizes) == (100, 1200, 2, (100,))
    assert first.writes == ranges_of(y) and first.reads == ranges_of(x)
    assert here.kernels.sums.ROWS == 64 and here.kernels.sums.rows(640) == 10


def test_a_kernel_that_answers_makes_the_host_wait_and_one_that_makes_an_array_takes_memory(here):
    x = here.empty(100, np.float32)
    assert here.kernels.sums.finite(x) is True
    record, wait, read = of_kind(here, Record, HostWait, HostRead)
    assert record.mark == wait.mark and read.why == "finite"
    table = here.kernels.sums.table(x)
    assert (table.shape, table.dtype) == ((2, 3), np.int64)
    assert of_kind(here, Work)[-1].writes == ranges_of(table)


@pytest.mark.parametrize("like, waits", [(CPUDevice, 0), (CUDADevice, 1)])
def test_the_host_waits_for_a_stream_that_asks_to_unless_that_is_a_thread_itself(like, waits):
    here = SimulatedDevice(like)
    here.new_stream("side").submit(here.wait_here)
    assert len(of_kind(here, HostWait)) == waits


def test_a_wait_refers_to_the_latest_record_before_it(here):
    gather, ready = here.new_stream("gather"), here.new_event()
    here.current_stream.wait(ready)  # never recorded: nothing to wait for
    gather.record(ready)
    here.current_stream.wait(ready)
    gather.record(ready)
    ready.synchronize()
    first, wait, second, host = of_kind(here, Record, Wait, HostWait)
    assert (first.stream, wait.stream) == ("gather", "compute")
    assert wait.mark == first.mark != second.mark == host.mark


def test_nobody_can_ask_how_far_a_stream_is(here):
    with pytest.raises(RuntimeError, match=r"Event\.done"):
        here.new_event().done()


def test_streams_of_one_name_are_two(here):
    streams = [here.new_stream("optimizer") for _ in range(3)] + [here.host.new_stream("optimizer")]
    assert len({stream.name for stream in streams}) == 4


def test_inside_of_a_stream_ops_and_copies_are_in_it_and_the_compute_stream_is_still_that(here):
    x, y, side = here.empty(10, np.float32), here.empty(10, np.float32), here.new_stream("side")

    def work():
        x.fill(1)
        here.copy(y, x)
        assert here.current_stream.name == "compute"

    side.submit(work)
    assert [(item.stream, item.name) for item in of_kind(here, Work)] == [
        ("side", "numpy.fill"),
        ("side", "copy"),
    ]


def test_what_the_host_does_with_its_memory_is_its_own_work(here):
    pinned, x = here.pinned(10, np.float32), here.empty(10, np.float32)
    side, written = here.new_stream("download"), here.new_event()
    side.submit(here.copy, pinned, x)
    side.record(written)
    there = device.of(pinned)
    assert there is here.host and device.of(x) is here
    there.current_stream.wait(written)  # the host itself
    there.kernels.sums.add(pinned, pinned, pinned)
    value = float(pinned[0])
    copy, wait, add, read = of_kind(here, Work, HostWait, HostRead)
    assert (copy.stream, add.stream) == ("download", HOST) and value == 1.0
    assert isinstance(wait, HostWait) and read.reads == ranges_of(pinned[:1])
    updates = here.host.new_stream("optimizer")
    updates.submit(there.kernels.sums.add, pinned, pinned, pinned)
    assert of_kind(here, Work)[-1].stream == "optimizer"
    assert {item.place for item in of_kind(here, Take)} == {"host", "device"}


def test_values_of_the_host_are_forgotten_on_the_way(here):
    ids = np.arange(6).reshape(2, 3)
    x = here.asarray(ids)
    assert (x.shape, x.dtype, device.of(x)) == (ids.shape, ids.dtype, here)
    assert here.asarray(x) is x and here.asarray(x, np.float32).dtype == np.float32
    assert here.to_numpy(ids) is ids and here.to_numpy(x).tolist() == [[1, 1, 1]] * 2
    assert here.read(x, planned=ids) is ids


def test_arenas_say_what_their_memory_is_for(here):
    arena = Arena(here, lambda: here.buffer(10, np.float32), 2, name="gathered parameters")
    taken = of_kind(here, Take)
    assert [item.category for item in taken] == ["gathered parameters"] * 2
    arena.drop()
    del arena
    assert len(of_kind(here, Free)) == 2


def test_the_pool_counts_and_rounds_as_that_of_the_device_it_stands_for():
    here, pool = SimulatedDevice(CPUDevice), Pool()
    kept = [(here.empty(n, np.uint8), pool.empty(n, np.dtype(np.uint8))) for n in (100, 40_000, 1_000_003)]
    assert here.peak_bytes() == pool.peak_bytes
    del kept
    again = here.empty(50_000, np.uint8), pool.empty(50_000, np.dtype(np.uint8))
    for counted in (here, pool):
        counted.reset_peak()
    assert here.peak_bytes() == pool.peak_bytes > 0
    del again
    gpu = SimulatedDevice(CUDADevice)
    _ = gpu.empty(100, np.uint8), gpu.empty(1, np.uint8) + gpu.empty(1, np.uint8)
    assert gpu.peak_bytes() == 4 * 512  # also what CuPy makes itself
    assert gpu.compute_dtype("bfloat16").itemsize == 2 and here.compute_dtype("bfloat16").itemsize == 4
    assert gpu.empty_rows(3, 50, np.float32).strides == (256, 4)


def test_programs_can_be_exchanged_and_arrays_live_on(here):
    before, event = here.empty(10, np.float32), here.new_event()
    here.current_stream.record(event)
    first, here.program = here.program, Program()
    del before
    here.current_stream.wait(event)
    here.host.new_stream("optimizer").submit(here.host.current_stream.synchronize)
    assert [type(item) for item in here.program.items] == [Free, Wait]
    assert here.host.program is here.program and program.Take in map(type, first.items)


def test_a_site_is_the_line_that_asked_not_one_of_numpy_or_of_the_device(here):
    here.empty((4, 4), np.float32).mean(axis=0)
    names = {item.name: item.site for item in of_kind(here, Work)}
    assert set(names) == {"numpy.add.reduce", "numpy.divide"} and len(set(names.values())) == 1
    assert "test_simulated.py:" in names["numpy.divide"]


def test_a_pool_lends_memory_again_in_the_stream_that_took_it():
    """As CuPy's. A CPU frees what no queue holds any more, the driver when all is done: nobody is early."""
    here = SimulatedDevice(CUDADevice)
    side, taken = here.new_stream("side"), []
    side.submit(lambda: taken.append(here.empty(100, np.float32)))
    (memory,) = ranges_of(taken.pop())
    assert of_kind(here, Free)[-1].stream == "side"
    assert ranges_of(here.empty(100, np.float32)) != (memory,)
    side.submit(lambda: taken.append(here.empty(100, np.float32)))
    assert ranges_of(taken.pop()) == (memory,)
    for of in (here.buffer, here.pinned, SimulatedDevice(CPUDevice).empty):
        first = ranges_of(array := of(100, np.float32))
        program = type(array).shardrt_device.program
        del array
        assert [item.stream for item in program.items if isinstance(item, Free)][-1] == ""
        assert ranges_of(of(100, np.float32)) != first


def test_work_says_what_it_computes_in_and_for_which_part_of_a_step(here):
    x, numbers = here.empty(100, np.float32), here.empty(500, np.int64)
    here.set_phase("forward blocks.0")
    here.kernels.sums.add(x, numbers, x)
    gather = here.new_stream("gather")
    gather.submit(here.kernels.sums.add, numbers, numbers, numbers)
    here.set_phase("")
    here.kernels.sums.add(x, x, x)
    message = [(work.dtype, work.label) for work in of_kind(here, Work)]
    assert message == [("float32", "forward blocks.0"), ("", ""), ("float32", "")]


def test_a_product_of_bits_computes_in_bfloat16_whatever_it_adds_to():
    here = SimulatedDevice(like=CPUDevice)
    x, weight = here.empty((64, 32), np.uint16), here.empty((16, 32), np.uint16)
    y, wide = here.empty((64, 16), np.float32), here.empty((64, 32), np.float32)
    linear = here.kernels.linear
    linear.forward(x, weight, None, y)
    linear.backward_weight(x, here.empty((64, 16), np.uint16), here.empty((16, 32), np.float32), True)
    linear.forward(wide, here.empty((16, 32), np.float32), None, y)
    assert [work.dtype for work in of_kind(here, Work)] == ["bfloat16", "bfloat16", "float32"]


def test_a_gradient_that_is_added_to_is_computed_in_the_type_of_what_is_multiplied():
    here = SimulatedDevice(like=CUDADevice)
    low = here.compute_dtype("bfloat16")
    x, dy = here.empty((64, 320), low), here.empty((64, 160), low)
    here.kernels.linear.backward_weight(x, dy, here.empty((160, 320), np.float32), True)  # larger than both
    assert [work.dtype for work in of_kind(here, Work)] == ["bfloat16"]


class OnTheGPU:
    """What CuPy's arrays are like to who does not know CuPy."""

    shape, dtype = (3, 4), np.dtype(np.int64)
    __cuda_array_interface__: dict = {}

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


def test_an_array_that_is_on_the_gpu_already_is_neither_read_nor_copied(here):
    array = here.asarray(OnTheGPU())
    assert (array.shape, array.dtype) == ((3, 4), np.int64)
    assert [type(item) for item in here.program.items] == [Take]
    assert here.peak_bytes() == 0  # not the pool's
