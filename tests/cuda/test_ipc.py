"""What the ipc communicator does with memory: exported once, mapped by the others, closed before it goes.

Ranks are threads, taken for processes. That its results are those of the contract: test_communicators.py.
"""

import threading

import numpy as np
import pytest

from shardrt.comm import CollectiveMismatch, ipc, thread
from shardrt.comm.staged import StagedCommunicator
from shardrt.comm.thread import ThreadCommunicator
from shardrt.device.cuda import CUDADevice
from tests import lab
from tests.cuda import small_gpt
from tests.cuda.test_communicators import on_ranks
from tests.mpi.contract import values

pytest.importorskip("cupy")
pytestmark = pytest.mark.usefixtures("processes")


@pytest.fixture
def never_staged(monkeypatch):
    for name in ("_all_gather", "_reduce_scatter", "_broadcast", "_all_to_all", "_all_reduce"):
        monkeypatch.delattr(StagedCommunicator, name)


def gather(comm, here, stream, buffer):
    """Fill this rank's slice, gather, and hold the result."""
    n = buffer.size // comm.size
    own = slice(comm.rank * n, (comm.rank + 1) * n)
    here.copy(buffer[own], values(comm.rank, n, "float32"))
    comm.all_gather(buffer, stream=stream)
    expected = np.concatenate([values(rank, n, "float32") for rank in range(comm.size)])
    np.testing.assert_array_equal(here.to_numpy(buffer), expected)


def test_a_buffer_is_exported_once_and_opened_once_by_each_peer(software):
    before = len(software.exported)

    def body(comm, here, stream):
        buffer = comm.allocate(30, "float32", shared=True)
        again = comm.duplicate()
        for each in (comm, again, comm):
            gather(each, here, stream, buffer)
            gather(each, here, stream, buffer[3:15])
        comm.barrier(stream=stream)
        assert len(software.exported) == before + 3
        assert len(software.mapped) == 3 * 2
        comm.barrier(stream=stream)

    on_ranks(3, "ipc", body)


def test_everything_is_unmapped_before_anyone_may_free_and_own_memory_stays_valid(software):
    before = software.exported

    def body(comm, here, stream):
        comm.allocate(5, "float64", shared=False)  # which nobody but the communicator refers to
        buffer = comm.allocate(12, "float32", shared=True)
        again = comm.duplicate()
        gather(comm, here, stream, buffer)
        comm.close()
        gather(again, here, stream, buffer)  # a duplicate knows the memory still
        again.close()
        assert software.mapped == []
        np.testing.assert_array_equal(here.to_numpy(buffer)[:3], values(0, 3, "float32"))

    on_ranks(4, "ipc", body)
    assert software.freed_while_mapped == []
    assert not [block for block in software.exported if block not in before]  # all freed


def test_ranks_of_one_process_open_nothing(software, monkeypatch):
    monkeypatch.setattr(ipc, "_process", lambda: bytes(16))

    def body(comm, here, stream):
        gather(comm, here, stream, comm.allocate(12, "float32", shared=True))
        assert software.mapped == []

    on_ranks(3, "ipc", body)


def test_what_was_allocated_here_goes_through_no_host_memory(gpu, never_staged):
    def body(comm, here, stream):
        gather(comm, here, stream, comm.allocate(120_000, "float32", shared=True))
        full = comm.allocate(120_000, "float32", shared=False)
        here.copy(full, values(comm.rank, full.size, "float32"))
        comm.all_reduce(full, stream=stream)
        comm.broadcast(full, root=1, stream=stream)
        comm.all_to_all(here.empty(full.shape, full.dtype), full, stream=stream)

    on_ranks(3, "ipc", body)


def test_a_sum_over_ranks_is_one_kernel(software, gpu):
    def body(comm, here, stream):
        full = comm.allocate(4000, "float32", shared=False)
        comm.reduce_scatter(here.zeros((1000,), np.float32), full, stream=stream, scale=0.5, accumulate=True)

    on_ranks(4, "ipc", body)
    assert [kernel for what, _, kernel in software.log if what == "launch"] == ["sum_parts"] * 4


@pytest.mark.parametrize("strange", [0, 2])
def test_all_ranks_stage_where_one_rank_has_memory_of_its_own(gpu, strange):
    def body(comm, here, stream):
        buffer = comm.allocate(12, "float32", shared=True)
        if comm.rank == strange:
            buffer = here.buffer(12, np.float32)
        gather(comm, here, stream, buffer)

    on_ranks(3, "ipc", body)


def test_ranks_may_use_different_places(gpu, never_staged):
    def body(comm, here, stream):
        slots = [comm.allocate(40, "float32", shared=True) for _ in range(comm.size)]
        gather(comm, here, stream, slots[comm.rank][4 * comm.rank :][:12])

    on_ranks(3, "ipc", body)


def test_peers_read_between_the_end_of_a_stream_and_a_barrier(gpu, monkeypatch):
    seen = {}

    def record(owner, name, label):
        before = getattr(owner, name)

        def call(*args):
            seen.setdefault(threading.get_ident(), []).append(label)
            return before(*args)

        monkeypatch.setattr(owner, name, call)

    record(CUDADevice, "wait_here", "wait")
    record(CUDADevice, "copy", "copy")
    record(ThreadCommunicator, "_all_gather", "meet")
    record(ThreadCommunicator, "_barrier", "barrier")

    def body(comm, here, stream):
        gathered, full = (comm.allocate(12, "float32", shared=True) for _ in range(2))
        output = here.zeros((4,), np.float32)
        mine = seen[threading.get_ident()]
        mine.clear()
        comm.all_gather(gathered, stream=stream)
        assert mine == ["wait", "meet", "copy", "copy", "wait", "barrier"]
        mine.clear()
        comm.reduce_scatter(output, full, stream=stream)
        assert mine == ["wait", "meet", "wait", "barrier"]

    on_ranks(3, "ipc", body)


def test_ranks_in_different_calls_are_told_so(gpu):
    def body(comm, here, stream):
        buffer = comm.allocate(12, "float32", shared=True)
        comm.all_gather(buffer, stream=stream, tag=f"blocks.{comm.rank}")

    with pytest.raises(CollectiveMismatch, match=r"all_gather\(12 of float32, unit blocks\.[01]\)"):
        on_ranks(2, "ipc", body)


def test_ranks_of_several_nodes_are_refused(gpu, monkeypatch):
    monkeypatch.setattr(ipc, "_node", lambda: threading.get_ident().to_bytes(16, "big"))
    with pytest.raises(ValueError, match="'ipc' needs all ranks on one node"):
        on_ranks(2, "ipc", lambda *given: None)


@pytest.mark.parametrize("call", ["export_memory", "open_memory"])
def test_every_rank_raises_where_memory_of_one_cannot_be_shared(gpu, monkeypatch, call):
    first, errors = [], []

    def refuse(self, *given):
        first.append(threading.get_ident())
        if first[0] == threading.get_ident():
            raise RuntimeError("cudaErrorNotSupported")
        return before(self, *given)

    before = getattr(CUDADevice, call)
    monkeypatch.setattr(CUDADevice, call, refuse)

    def body(comm, here, stream):
        with pytest.raises(RuntimeError, match="'ipc' can't share GPU memory") as caught:
            comm.allocate(8, "float32", shared=True)
        errors.append(str(caught.value))

    on_ranks(3, "ipc", body)
    assert len(errors) == 3
    assert sum("cudaErrorNotSupported" in error for error in errors) == 1


def test_a_model_trains_as_with_staged_communicators_to_the_bit(gpu):
    how = (2, small_gpt.train, "cuda")
    found, expected = (
        thread.run(*how, communicator=kind, **small_gpt.VARIANTS["bfloat16"]) for kind in ("ipc", "staged")
    )
    lab.assert_equal(found, expected)
