"""Memory of a GPU: when it is full, what is pinned and what is not, what kernels share."""

import gc
import subprocess
import sys

import numpy as np
import pytest

from shardrt import device
from shardrt.comm import thread
from shardrt.faults import failure
from shardrt.kernels.cuda import _launch
from tests.ranks import BACKSTOP, clean_environment, mpirun
from tests.softgpu.available import missing
from tests.softgpu.kernels import STATIC

pytest.importorskip("cupy")
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
cross_entropy = pytest.importorskip("shardrt.kernels.cuda.cross_entropy")
MB = 1 << 20
TRAINS = """
import numpy as np
from models.gpt import GPT, GPTConfig
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.faults import failure
from tests.softgpu.nccl import NcclCommunicator
NcclCommunicator.cuda.capacity = 1 << 18
mesh = init_device_mesh("cuda")
failure.describe_memory(lambda: "the plan")
model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=128, vocab_size=2000, block_size=16))
fully_shard(model, mesh=mesh)(np.zeros((1, 16), int))
"""
PINNED = """
import cupy
from shardrt import device
free = cupy.cuda.runtime.freeHost
cupy.cuda.runtime.freeHost = lambda address: (print("freed", flush=True), free(address))
here = device.get("cuda")
kept = [here.pinned(8, "u1"), here.pinned(8, "u1")]
del kept[0]
print("end", flush=True)
"""


@pytest.fixture
def full(gpu, software, monkeypatch):
    """Of 64 MB, CuPy's pool keeps 40, which no array has; 8 belong to an array in a cycle."""
    gc.collect()
    gpu._cupy.get_default_memory_pool().free_all_blocks()
    monkeypatch.setattr(software, "capacity", software.used[0] + 64 * MB)
    gpu.empty(40 * MB, np.uint8)
    cycle = [gpu.buffer(8 * MB, np.uint8)]
    cycle.append(cycle)
    return gpu


def test_a_buffer_takes_what_the_pool_keeps_and_what_garbage_holds(full):
    assert full.buffer(60 * MB, np.uint8).size == 60 * MB


def test_a_buffer_for_which_there_is_no_room_is_a_memory_error(full):
    with pytest.raises(
        MemoryError, match=r"GPU 0 has no room for 99\d* bytes; \d+ bytes are free"
    ) as message:
        full.buffer(99 * 10**6, np.uint8)
    assert failure.code_of(message.value) == failure.OUT_OF_MEMORY


@pytest.mark.parametrize("status, kind", [(2, MemoryError), (700, RuntimeError)])
def test_pinned_memory_for_which_there_is_no_room_is_a_memory_error(gpu, software, monkeypatch, status, kind):
    def full(size, flags):
        raise gpu._cupy.cuda.runtime.CUDARuntimeError(status)

    monkeypatch.setattr(gpu._cupy.cuda.runtime, "hostAlloc", full)
    with pytest.raises(kind) as message:
        gpu.pinned(8, np.uint8)
    assert isinstance(message.value, MemoryError) == (kind is MemoryError)


def test_another_error_of_an_allocation_is_not_one_of_memory(gpu, software, monkeypatch):
    def broken(size):
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(gpu._cupy.cuda, "Memory", broken)
    with pytest.raises(RuntimeError, match="IllegalAddress"):
        gpu.buffer(8, np.uint8)


def test_a_copy_of_memory_that_is_not_pinned_is_made_when_it_returns(gpu, software, monkeypatch):
    """Also where the GPU reads the host's pages itself, and CUDA does not wait."""
    monkeypatch.setattr(software, "reads_pageable", True)
    monkeypatch.delitem(gpu.__dict__, "_reads_pageable", raising=False)
    there, back = gpu.buffer(1000, np.float32), np.zeros(1000, np.float32)
    source = np.ones(1000, np.float32)
    gpu.copy(there, source)
    source[:] = 2
    gpu.copy(back, there)
    assert back.tolist() == [1] * 1000
    pinned = gpu.pinned(1000, np.float32)
    gpu.copy(there, pinned)
    pinned[:] = 3
    assert gpu.to_numpy(there).tolist() == [3] * 1000, "one that is pinned is read when its turn comes"


def test_the_workspace_of_a_thread_that_has_ended_is_given_back(gpu):
    backend = _launch.backend()

    def multiplied():
        with device.use(device.get("cuda")) as here:
            a = here.zeros((64, 64), np.float32)
            here.kernels.matmul.matmul(a, a, here.zeros((64, 64), np.float32))
            return here.current_stream.handle.ptr

    first, second = (thread.run(1, multiplied)[0] for _ in range(2))
    assert first not in backend._workspaces and second in backend._workspaces


def test_pinned_memory_is_not_freed_at_exit():
    """Streams of the host end later than the functions of atexit, and may still write it."""
    job = [sys.executable, "-m", "tests.softgpu.run", "-c", PINNED]
    done = subprocess.run(job, capture_output=True, text=True, env=clean_environment(), timeout=BACKSTOP)
    assert (done.returncode, done.stdout.split()) == (0, ["freed", "end"]), done.stderr


@pytest.mark.parametrize(
    "kind, vocab", [("bfloat16", 24_500), ("float32", 12_250), ("bfloat16", 50_304), ("bfloat16", 50_660)]
)
def test_a_row_of_logits_is_held_where_static_shared_memory_leaves_room(
    gpu, software, gpu_kernels, kind, vocab, monkeypatch
):
    """48 KiB without asking, and 99 KiB in all on the smallest GPUs, are limits of both kinds together."""
    monkeypatch.setattr(gpu_kernels, "shared", 99 << 10)
    logits = gpu.zeros((2, vocab), gpu.compute_dtype(kind))
    losses, lse = (gpu.zeros(2, np.float32) for _ in range(2))
    cross_entropy.forward_in_place(logits, gpu.zeros(2, np.int64), losses, lse, -1)
    np.testing.assert_allclose(gpu.to_numpy(losses), np.log(vocab), rtol=1e-6)
    allowed = [kernel.shared for kernel in software._kernels.values() if "in_place" in kernel.name]
    assert max(allowed) + STATIC <= 99 << 10


@pytest.mark.mpi
def test_a_job_that_fills_its_gpus_ends_with_its_code_and_the_plan():
    """By arrays. test_nccl_life.py has the errors of NCCL that have the same code."""
    done = mpirun(2, ["-m", "tests.softgpu.run", "-c", TRAINS])
    assert done.returncode == failure.OUT_OF_MEMORY, done.stderr
    assert "is out of memory in its main thread:" in done.stderr and "the plan" in done.stderr
    assert "no room for" in done.stderr
