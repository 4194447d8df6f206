"""Communicators of device arrays: the results of the contract, to the bit, on the GPU emulator."""

from itertools import product

import numpy as np
import pytest

from bench.collectives.contestants import Ours, RawNCCL
from bench.collectives.ops import OPS as BENCH_OPS
from bench.collectives.ops import Case, rounded
from bench.collectives.traffic import spread
from shardrt import device
from shardrt.comm import CollectiveMismatch, create, init_device_mesh, thread
from tests.mpi.contract import PATTERNS, added, packed, tree, unpacked, values

pytestmark = pytest.mark.usefixtures("processes")

COUNTS = (1, 7, 1000)
OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
PATTERN = pytest.mark.parametrize("kind", ["staged", "nccl", "ipc"])
SIZES = pytest.mark.parametrize("size", [1, 3, 4])


def on_ranks(size, kind, body):
    """Run `body(communicator, device, stream)` on every rank; the communicator is that for gathers.

    With sums by the tree; of NCCL's own tests/softgpu has the tests.
    """

    def rank():
        mesh = init_device_mesh("cuda", communicator=kind, reduction="tree")
        body(mesh.communicator("gather"), mesh.device, mesh.stream("gather"))

    thread.run(size, rank)


@SIZES
@PATTERN
def test_all_gather(gpu, kind, size):
    def body(comm, here, stream):
        dtypes = "float32", "float64", "int32", "int64", "uint8", "uint16"
        for count, dtype in product(COUNTS, dtypes):
            buffer = comm.allocate(size * count, dtype, shared=True)
            own = slice(comm.rank * count, (comm.rank + 1) * count)
            here.copy(buffer[own], values(comm.rank, count, dtype))
            comm.all_gather(buffer, stream=stream)
            expected = np.concatenate([values(rank, count, dtype) for rank in range(size)])
            np.testing.assert_array_equal(here.to_numpy(buffer), expected)

    on_ranks(size, kind, body)


@SIZES
@PATTERN
def test_reduce_scatter_adds_by_the_tree(gpu, kind, size):
    def body(comm, here, stream):
        for count, bits, accumulate in product(COUNTS, ("", "bfloat16", "float16"), (False, True)):
            own = slice(comm.rank * count, (comm.rank + 1) * count)
            given = [values(rank, size * count, "float32") for rank in range(size)]
            buffer, output = here.asarray(given[comm.rank]), here.asarray(np.full(count, 3, np.float32))
            if bits:
                buffer = here.asarray(packed(given[comm.rank], bits))
                given = [unpacked(packed(part, bits), bits) for part in given]
            comm.reduce_scatter(output, buffer, stream=stream, scale=0.5, accumulate=accumulate, kind=bits)
            before = np.full(count, 3, np.float32) if accumulate else None
            expected = added(tree([part[own] for part in given]), 0.5, before)
            np.testing.assert_array_equal(here.to_numpy(output), expected)

    on_ranks(size, kind, body)


@SIZES
@PATTERN
def test_all_reduce(gpu, kind, size):
    def body(comm, here, stream):
        for count, (op, pairwise) in product((1, 7, 60_000), OPS.items()):
            buffer = here.asarray(values(comm.rank, count, "float32"))
            comm.all_reduce(buffer, op=op, stream=stream)
            expected = tree([values(rank, count, "float32") for rank in range(size)], pairwise)
            np.testing.assert_array_equal(here.to_numpy(buffer), expected)

    on_ranks(size, kind, body)


@SIZES
@PATTERN
def test_broadcast_all_to_all_and_messages(gpu, kind, size):
    def body(comm, here, stream):
        buffer = here.asarray(values(comm.rank, 5, "float32"))
        comm.broadcast(buffer, root=size - 1, stream=stream)
        np.testing.assert_array_equal(here.to_numpy(buffer), values(size - 1, 5, "float32"))
        buffer = here.asarray(values(comm.rank, 3 * size, "int64"))
        output = here.empty((3 * size,), np.int64)
        comm.all_to_all(output, buffer, stream=stream)
        own = slice(3 * comm.rank, 3 * comm.rank + 3)
        expected = np.concatenate([values(rank, 3 * size, "int64")[own] for rank in range(size)])
        np.testing.assert_array_equal(here.to_numpy(output), expected)
        if size > 1 and comm.rank < 2:
            peer, theirs = 1 - comm.rank, here.empty((3 * size,), np.int64)
            comm.exchange(theirs, buffer, to=peer, source=peer, stream=stream)
            np.testing.assert_array_equal(here.to_numpy(theirs), values(peer, 3 * size, "int64"))
            if comm.rank == 0:
                comm.send(buffer, peer=1, stream=stream)
            else:
                comm.recv(buffer, peer=0, stream=stream)
                np.testing.assert_array_equal(here.to_numpy(buffer), values(0, 3 * size, "int64"))
        comm.barrier(stream=stream)

    on_ranks(size, kind, body)


@SIZES
@PATTERN
def test_all_to_all_by_counts_per_peer(gpu, kind, size):
    def body(comm, here, stream):
        memory = comm.allocate(5000, "float32", shared=False)
        for pattern in (PATTERNS[name] for name in ("uneven", "empty", "all to one", "one to all")):
            sent = [pattern(comm.rank, r, size) for r in range(size)]
            received = [pattern(s, comm.rank, size) for s in range(size)]
            mine = values(comm.rank, sum(sent), "float32")
            parts = []
            for s in range(size):
                start = sum(pattern(s, r, size) for r in range(comm.rank))
                parts.append(values(s, start + received[s], "float32", part=slice(start, None)))
            for buffer in (here.asarray(mine), memory[comm.rank :][: mine.size]):
                here.copy(buffer, mine)
                output = here.asarray(np.full(sum(received), 7, np.float32))
                comm.all_to_all(output, buffer, received=received, sent=sent, stream=stream)
                np.testing.assert_array_equal(here.to_numpy(output), np.concatenate(parts))

    on_ranks(size, kind, body)


@pytest.mark.parametrize("kind", ["staged", "ipc"])
@pytest.mark.parametrize("allocated", [False, True])
def test_counts_that_ranks_do_not_agree_on_are_reported(gpu, kind, allocated):
    def body(comm, here, stream):
        memory = comm.allocate(9, "float32", shared=False)
        sent = [4, 3 + comm.rank]
        buffer = memory[: sum(sent)] if allocated else here.zeros((sum(sent),), np.float32)
        output = here.zeros((8,), np.float32)
        with pytest.raises(CollectiveMismatch, match="rank 0 sends 3 elements to rank 1, which expects 4$"):
            comm.all_to_all(output, buffer, received=[4, 4], sent=sent, stream=stream)
            stream.synchronize()

    on_ranks(2, kind, body)


@PATTERN
def test_groups_of_ranks(gpu, kind):
    def body(comm, here, stream):
        group = comm.split(comm.rank % 2, comm.rank)
        buffer = here.asarray(values(comm.rank, 4, "float32"))
        group.all_reduce(buffer, stream=stream)
        expected = values(comm.rank % 2, 4, "float32") + values(comm.rank % 2 + 2, 4, "float32")
        np.testing.assert_array_equal(here.to_numpy(buffer), expected)
        group.close()

    on_ranks(4, kind, body)


@PATTERN
def test_control_carries_host_arrays(gpu, kind):
    def rank():
        mesh = init_device_mesh("cuda", communicator=kind)
        numbers = np.array([mesh.rank], np.int64)
        control = mesh.communicator("control")
        control.all_reduce(numbers, stream=device.current().current_stream)
        assert numbers[0] == 3

    thread.run(3, rank)


@pytest.mark.parametrize("kind", ["nccl"])  # tests/gpu, with one GPU for all threads, leaves it out
def test_the_benchmarks_own_calls_and_raw_nccls_are_right(gpu, kind):
    size = 4
    reductions = {True: ("sum", "avg", "max", "mulsum"), False: ("none",)}

    def body(comm, here, stream):
        control, asked = create("auto"), set()
        contestants = (Ours(comm, here, 1 << 10), RawNCCL(comm, 1 << 10))
        for op, dtype, place in product(BENCH_OPS.values(), ("bfloat16", "float32", "int8"), ("out", "in")):
            for reduction in reductions[op.reduces] if place in op.places else ():
                nbytes = rounded(op, dtype, 1 << 10, size)
                uneven = spread(size, 1.0, 1 << 10) if op.name == "alltoallv" else None
                root = size - 1 if op.rooted else -1
                case = Case(op, dtype, place, nbytes, size, reduction, root, uneven)
                for contestant in contestants:
                    if contestant.offers(case):
                        asked.add((type(contestant), op.name))
                        assert contestant.bind(case, control).check(2) == 0, case
        assert {name for who, name in asked if who is RawNCCL} == set(BENCH_OPS)
        assert {name for who, name in asked if who is Ours} == set(BENCH_OPS) - {"reduce"}

    on_ranks(size, kind, body)
