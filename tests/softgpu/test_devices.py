"""What the software GPUs of one process keep apart, asked without CuPy in between."""

import ctypes
import threading

import pytest

from tests.cuda.libraries import library_folder
from tests.softgpu import compiler, errors, nccl, products, rooms, start
from tests.softgpu.available import missing
from tests.softgpu.cuda import CUDA
from tests.softgpu.test_streams import refused

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
EMPTY = 'extern "C" __global__ void nothing() {}'


@pytest.fixture
def cuda(monkeypatch):
    made = CUDA("late")
    made.visible = (4, 6)
    monkeypatch.setattr(nccl.NcclCommunicator, "cuda", made, raising=False)
    return made


@pytest.fixture(scope="module")
def code():
    nvrtc = compiler.NVRTC(library_folder(start.ROOT / "build" / "softgpu"))
    program = nvrtc.createProgram(EMPTY, "nothing", (), ())
    nvrtc.compileProgram(program, ())
    return nvrtc.getCUBIN(program)


@pytest.mark.parametrize("function, stream, current", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_a_launch_takes_a_function_and_a_stream_of_the_current_device(cuda, code, function, stream, current):
    cuda.setDevice(function)
    kernel = cuda.moduleGetFunction(cuda.moduleLoadData(code), "nothing")
    cuda.setDevice(stream)
    handle = cuda.streamCreateWithPriority(1, 0)
    cuda.setDevice(current)

    def launch():
        cuda.launchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, handle, 0, 0)

    if function == stream == current:
        launch()
        cuda.streamSynchronize(handle)
    else:
        with refused(errors.INVALID_HANDLE):
            launch()


def test_an_event_is_recorded_on_its_device_and_waited_for_on_any(cuda):
    event, here = cuda.eventCreateWithFlags(2), cuda.streamCreateWithPriority(1, 0)
    cuda.setDevice(1)
    there = cuda.streamCreateWithPriority(1, 0)
    with refused(errors.INVALID_HANDLE):
        cuda.eventRecord(event, there)
    cuda.eventRecord(event, here)
    cuda.streamWaitEvent(there, event)
    cuda.streamSynchronize(there)


def test_a_communicator_takes_streams_of_its_device(cuda):
    communicator = nccl.NcclCommunicator(1, rooms.new_key(False), 0)
    cuda.setDevice(1)
    buffer, stream = cuda.malloc(8), cuda.streamCreateWithPriority(1, 0)
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        communicator.allReduce(buffer, buffer, 2, nccl.ring.TYPES.index("float32"), 0, stream)


def test_each_device_has_its_own_memory(cuda):
    cuda.capacity = 100
    first = cuda.malloc(60)
    with refused(errors.OUT_OF_MEMORY):
        cuda.malloc(60)
    assert cuda.memGetInfo() == (40, 100)
    cuda.setDevice(1)
    cuda.malloc(60)
    cuda.setDevice(0)
    cuda.free(first)
    cuda.malloc(60)


@pytest.mark.parametrize(
    "call", ["eventQuery", "eventSynchronize", "eventDestroy", "malloc", "hostAlloc", "streamSynchronize"]
)
def test_a_thread_that_has_chosen_no_device_makes_a_context_on_the_first(cuda, call):
    cuda.setDevice(1)
    event, stream = cuda.eventCreateWithFlags(2), cuda.streamCreateWithPriority(1, 0)
    cuda.contexts.clear()
    given = {"malloc": (8,), "hostAlloc": (8, 0), "streamSynchronize": (stream,)}.get(call, (event,))
    thread = threading.Thread(target=getattr(cuda, call), args=given)
    thread.start()
    thread.join()
    assert cuda.contexts == {0}


@pytest.mark.parametrize("name, create", [("cublasLt", "cublasLtCreate"), ("cublas", "cublasCreate_v2")])
def test_a_handle_of_a_library_is_of_one_device(cuda, name, create):
    folder = library_folder(start.ROOT / "build" / "softgpu")
    found = products.library(folder, cuda, name)
    handles = [ctypes.c_void_p() for _ in range(2)]
    for index, handle in enumerate(handles):
        cuda.setDevice(index)
        getattr(found, create)(ctypes.byref(handle))
    products.library(folder, start.plugged(0), name)  # that of all other tests
    assert handles[0].value != handles[1].value
