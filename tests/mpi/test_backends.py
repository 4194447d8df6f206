"""The contract for the backends of MPI, under mpirun: tests/test_comm.py starts `python -m tests.mpi`."""

import gc
import sys
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

from shardrt import dtypes
from shardrt.comm import (
    CollectiveMismatch,
    PeerFailed,
    contexts,
    create,
    flags,
    futex,
    init_device_mesh,
    mailbox,
    mpi,
    mpi_world,
    notices,
    shm,
)
from shardrt.comm.hierarchical import HierarchicalCommunicator
from shardrt.comm.mpi import MPICommunicator
from shardrt.comm.shm import ShmCommunicator
from shardrt.comm.single import SingleCommunicator
from tests import links
from tests.mpi.contract import INLINE, LITTLE, Contract, digest, exchange, own, same, values
from tests.mpi.test_nodes import on_nodes

SIZE = mpi_world.of_mpi().size
ONE_HOST = mpi_world.of_mpi().local_size == SIZE
KINDS = ["mpi", "shm" if ONE_HOST else "auto"]


def mapped():
    """Bytes of this process's address space that are shared between ranks, of what is still in use."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as file:
        ranges = [line.split("-", 1) for line in file if "memfd:shardrt" in line]
    return sum(int(end.split()[0], 16) - int(start, 16) for start, end in ranges)


class Bits:
    """Every rank runs the same tests in the same order, each with a communicator of its own."""

    def run(self, body):
        made = self.make()
        body(made)
        made.close()

    def test_its_bits(self):
        made = self.make()
        sys.stdout.write(f"digest {made.rank} {digest(made)}\n")  # one write: ranks must not mix


class OverMPI(Bits, Contract):
    """The whole contract. Its bits are compared at all sizes, the rest where two or three ranks show it."""


class TestMPI(OverMPI if SIZE in (1, 2) else Bits):
    @staticmethod
    def make():
        made = create("mpi")
        assert type(made) is MPICommunicator
        return made

    def test_the_edges_of_what_goes_along_are_those_of_the_contract(self):
        assert (notices.LITTLE, flags.LITTLE) == (LITTLE, LITTLE // 4)

    @pytest.mark.skipif(SIZE < 2, reason="needs a peer")
    def test_what_is_sent_is_not_taken_for_what_ranks_tell_each_other(self):
        made, values = self.make(), np.zeros(8, np.float32)
        if made.rank == 1:
            barrier = threading.Thread(target=made.barrier, kwargs={"stream": INLINE})
            barrier.start()
            time.sleep(0.2)
            made.send(values + 7, peer=0, stream=INLINE)
            barrier.join()
        else:
            if made.rank == 0:
                made.recv(values, peer=1, stream=INLINE)
                assert (values == 7).all()
            made.barrier(stream=INLINE)
        made.close()

    @pytest.mark.skipif(SIZE < 2, reason="needs a peer")
    @pytest.mark.parametrize("few", [8, 0])
    def test_once_a_peer_has_failed_every_call_says_so(self, monkeypatch, few):
        monkeypatch.setattr(notices, "_FEW", few)
        made = self.make()

        def wait(request, doing):
            raise PeerFailed("rank 9 has ended")

        monkeypatch.setattr(made._patience, "wait", wait)
        for _ in range(2):
            with pytest.raises(PeerFailed, match="rank 9 has ended"):
                made.barrier(stream=INLINE)
        made.close()

    @pytest.mark.skipif(SIZE != 2, reason="messages between two")
    def test_an_ordinary_array_longer_than_a_message_is_sent_in_pieces(self, monkeypatch):
        monkeypatch.setattr(mpi, "_MESSAGE", 1000)
        monkeypatch.setattr(mpi, "_CHUNK", 512)
        made, n = self.make(), 2501
        everything = np.concatenate([values(rank, n, np.float32) for rank in range(2)])
        mine = everything[own(made, n)]
        buffer, output, exchanged = (np.zeros(size, np.float32) for size in (2 * n, n, 2 * n))
        buffer[own(made, n)] = mine
        made.all_gather(buffer, stream=INLINE)
        same(buffer, everything)
        made.reduce_scatter(output, buffer, stream=INLINE)
        same(output, 2 * mine)
        made.all_to_all(exchanged, buffer, stream=INLINE)
        same(exchanged, np.tile(mine, 2))
        exchange(made, lambda s, r: 2501 if (s, r) == (0, 1) else 1001 * s, np.float32)
        if made.rank == 0:
            made.send(everything, peer=1, stream=INLINE)
        else:
            made.recv(exchanged, peer=0, stream=INLINE)
            same(exchanged, everything)
        made.close()

    def test_calls_of_more_kinds_than_are_remembered(self, monkeypatch):
        monkeypatch.setattr(mpi, "_REMEMBERED", 3)
        made = self.make()
        for step in range(3):
            for count in range(10):
                buffer = np.full(count, made.rank + step, np.int64)
                made.all_reduce(buffer, stream=INLINE, tag=str(count))
                assert (buffer == sum(range(SIZE)) + SIZE * step).all()
        made.close()

    def test_ranks_too_many_to_write_to_each_gather_what_they_call(self, monkeypatch):
        few = self.make()
        monkeypatch.setattr(notices, "_FEW", 0)
        many = self.make()
        assert digest(many) == digest(few)
        exchange(many, lambda s, r: 5 * s + r, np.float32)
        if SIZE > 1:
            with pytest.raises(CollectiveMismatch, match="rank 1 called barrier"):
                many.barrier(stream=INLINE, tag="late" if many.rank == 1 else "")
        many.close()
        few.close()


@pytest.mark.skipif(not ONE_HOST, reason="hosts share no memory")
class TestShm(OverMPI if SIZE in (1, 3) else Bits):
    @staticmethod
    def make():
        made = create("shm")
        assert type(made) is ShmCommunicator
        return made

    def test_ranks_that_mean_different_memory_are_told_where(self):
        if SIZE == 1:
            return
        made = self.make()
        buffer = made.allocate(8 * SIZE, np.float32, shared=True)
        part = buffer[SIZE:] if made.rank == 1 else buffer[:-SIZE]
        with pytest.raises(CollectiveMismatch, match=r"rank 1 called all_gather\(.*, memory 0x\w+\)"):
            made.all_gather(part, stream=INLINE)
        made.close()

    @pytest.mark.parametrize("room", [shm._STAGED, 1 << 16])
    def test_arrays_that_are_not_shared_may_be_written_at_once_and_go_in_pieces(self, room, monkeypatch):
        monkeypatch.setattr(shm, "_STAGED", room)
        made, ranks = self.make(), np.arange(SIZE)
        for step in range(20):
            count = SIZE * (5_000 + 4_000 * step)
            summed = np.full(count, step + made.rank, np.float32)
            made.all_reduce(summed, stream=INLINE)
            assert (summed == (step + ranks).sum()).all()
            gathered = np.full((SIZE, count // SIZE), np.nan, np.float32)
            gathered[made.rank] = step + made.rank
            made.all_gather(gathered.reshape(-1), stream=INLINE)
            assert (gathered.T == step + ranks).all()
            part = np.empty(count // SIZE, np.float32)
            made.reduce_scatter(part, gathered.reshape(-1), stream=INLINE)
            gathered[:] = np.nan
            exchange(made, lambda s, r, step=step: 4_000 * (step % 5) * s + 7 * r, np.float32, salt=step)  # noqa: B023
            assert (part == SIZE * (step + made.rank)).all()
        made.close()

    @pytest.mark.parametrize("shared", [True, False])
    def test_memory_goes_with_the_last_array_in_it(self, shared):
        made = self.make()
        kept = made.allocate(SIZE << 10, np.float32, shared=shared)
        before = mapped()
        for _ in range(3):
            part = made.allocate(SIZE << 20, np.float32, shared=shared)[SIZE:]
            made.all_gather(part, stream=INLINE)
            made.barrier(stream=INLINE)
        assert mapped() - before == (4 << 20) * (1 if shared else SIZE) * SIZE
        del part
        assert mapped() == before
        kept[made.rank << 10 :][: 1 << 10] = made.rank
        made.all_gather(kept, stream=INLINE)
        assert np.array_equal(kept, np.repeat(np.arange(SIZE), 1 << 10))
        made.close()

    def test_meshes_that_are_dropped_leave_no_mapping(self):
        def cycle():
            mesh = init_device_mesh("cpu")
            for role in ("gather", "reduce", "control"):
                mesh.communicator(role).barrier(stream=INLINE)

        def mappings():
            gc.collect()
            with open("/proc/self/maps", encoding="utf-8") as file:
                return sum("memfd:shardrt" in line or "/dev/shm/" in line for line in file)

        cycle()
        before = mappings()
        for _ in range(4):
            cycle()
        assert mappings() == before

    def test_a_rank_that_sleeps_is_woken(self, monkeypatch):
        monkeypatch.setattr(flags, "_NAP", 100 * 10**9)  # without the nap, a wake that is lost takes long
        made = self.make()
        buffer = made.allocate(4096 * SIZE, np.float32, shared=False)
        output, late = np.zeros(4096, np.float32), np.random.default_rng(made.rank)
        start = time.monotonic()
        for step in range(200):
            buffer[:] = step + made.rank
            time.sleep(late.choice([0, 1e-5, 2e-4]))
            made.reduce_scatter(output, buffer, stream=INLINE)
            assert (output == SIZE * step + sum(range(SIZE))).all()
        assert time.monotonic() - start < flags._NAP / 1e9
        made.close()

    @pytest.mark.parametrize("call", ["reduce_scatter", "all_reduce", "all_to_all"])
    def test_one_memory_for_all_ranks_cannot_hold_a_value_of_each(self, call):
        made = self.make()
        buffer = made.allocate(SIZE, np.float32, shared=True)
        outputs = {"reduce_scatter": [np.zeros(1, "f4")], "all_to_all": [np.zeros(SIZE, "f4")]}.get(call, [])
        with pytest.raises(ValueError, match=f"{call}: .*shared=False"):
            getattr(made, call)(*outputs, buffer, stream=INLINE)
        made.close()

    def test_is_chosen_on_one_node(self):
        assert type(create("auto")) is (ShmCommunicator if SIZE > 1 else SingleCommunicator)


@pytest.mark.skipif(SIZE < 2, reason="needs a peer")
@pytest.mark.parametrize("kind", KINDS)
def test_communicators_of_a_mesh_are_freed_when_all_ranks_have_dropped_it(kind, monkeypatch):
    monkeypatch.setattr(contexts, "_MANY", -1000)  # ranks look whenever they meet

    def made():
        mesh = init_device_mesh("cpu", (2, 2) if SIZE == 4 else None, communicator=kind)
        for axis in (None, 0):
            mesh.communicator("gather", axis).barrier(stream=INLINE)
        return mesh

    def open_now():
        contexts.free_dropped(mpi_world.of_mpi().root)
        return contexts._count

    made()
    before = open_now()
    mesh = made()
    with_one = open_now()
    assert with_one > before
    mesh = mesh if mesh.rank == 0 else None  # rank 0 holds it, the others do not
    still_open = open_now()
    assert still_open == with_one if mesh is not None else still_open > before
    mesh = None
    assert open_now() == before


@pytest.mark.skipif(SIZE < 2, reason="needs a peer")
class TestLinks:
    """tests/test_links.py has what threads show as well."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("chunks", [1, 2])
    def test_the_bits_are_those_of_one_rank(self, kind, chunks):
        program = links.Program(init_device_mesh("cpu", communicator=kind), chunks=chunks)
        found = program.run()
        if program.mesh.rank == 0:
            links.check(found, chunks * SIZE)
        program.links.close()

    @pytest.mark.skipif(not ONE_HOST, reason="hosts share no memory")
    def test_a_rank_that_sleeps_is_woken_by_a_message_and_by_its_being_taken(self, monkeypatch):
        monkeypatch.setattr(mailbox, "_NAP", 100 * 10**9)  # without the nap, a wake that is lost takes long
        monkeypatch.setattr(mailbox, "PIECE", 4096)
        pair = init_device_mesh("cpu", communicator="shm").pair(0, 1)
        if pair is None:
            return
        made, start = pair[0], time.monotonic()
        late, received = np.random.default_rng(made.rank), np.zeros(3000, np.float32)
        for step in range(200):
            sent = np.full(3000, step + made.rank, np.float32)
            for turn in range(2):
                time.sleep(late.choice([0, 1e-5, 2e-4]))
                if made.rank == turn:
                    made.send(sent, peer=1 - turn, stream=INLINE, direct=True)
                else:
                    made.recv(received, peer=turn, stream=INLINE, direct=True)
                    assert (received == step + turn).all()
        assert time.monotonic() - start < mailbox._NAP / 1e9

    @pytest.mark.parametrize("kind", KINDS)
    def test_links_that_are_closed_in_the_middle_of_a_step_wait_no_more(self, kind):
        def fail(kind, stage, m):
            if (kind, m) == ("B", 1):
                raise ValueError("nan")

        mesh = init_device_mesh("cpu", communicator=kind)
        program = links.Program(mesh, before=fail)
        with pytest.raises(ValueError, match="nan"):
            program.run()
        mesh.communicator("control").barrier(stream=INLINE)  # until then others need what this rank has sent
        streams = [end._stream for end in (*program.links._in.values(), *program.links._out.values())]
        program.links.close()
        for stream in streams:
            stream._thread.join(20)
            assert not stream._thread.is_alive()
        found = links.Program(mesh).run()
        if mesh.rank == 0:
            links.check(found, SIZE)


@pytest.mark.skipif(SIZE != 4, reason="two nodes of two")
class TestNodes(OverMPI):
    """Sums are made in each node first. MPI's calls at four ranks, too."""

    @staticmethod
    def make():
        made = on_nodes(0, 0, 1, 1) if ONE_HOST else create("auto")
        assert type(made) is HierarchicalCommunicator
        return made

    @pytest.mark.parametrize("kind", ["", *dtypes.LOW])
    @pytest.mark.parametrize("owner", ["caller", "communicator"])
    def test_what_crosses_is_one_sum_of_each_node(self, kind, owner):
        made, n = self.make(), 300_001
        dtype = np.uint16 if kind else np.float32
        reduced, output = np.zeros(SIZE * n, dtype), np.zeros(n, np.float32)
        gathered = np.zeros(SIZE * n, np.float32)
        if owner == "communicator":
            reduced = made.allocate(SIZE * n, dtype, shared=False)
            gathered = made.allocate(SIZE * n, np.float32, shared=True)
        made.reduce_scatter(output, reduced, kind=kind, stream=INLINE)
        assert made.bytes_across == output.nbytes  # by two ranks, for two of the other node
        made.all_gather(gathered, stream=INLINE)
        assert made.bytes_across == 2 * output.nbytes
        made.close()


@pytest.mark.skipif(SIZE != 4 or not ONE_HOST, reason="two nodes of two, as they are told")
class TestNodesInTurn(Bits):
    """No node is a part of the tree over ranks, so sums go through MPI alone."""

    test_all_gather_collects_every_slice = Contract.test_all_gather_collects_every_slice
    test_all_gather_reuses_a_part_of_an_allocation = Contract.test_all_gather_reuses_a_part_of_an_allocation
    test_reduce_scatter_into_its_own_slice = Contract.test_reduce_scatter_into_its_own_slice
    test_broadcast_on_shared_memory = Contract.test_broadcast_on_shared_memory_is_what_root_wrote

    @staticmethod
    def make():
        made = on_nodes(1, 0, 0, 1)
        assert type(made) is HierarchicalCommunicator
        return made


def test_what_orders_memory_is_a_window_of_shared_memory():
    """Whose Sync has to be a barrier; on other windows Open MPI's is none."""
    assert futex.fence().flavor == MPI.WIN_FLAVOR_SHARED
