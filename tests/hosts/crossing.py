"""Bytes that one step's sums and gathers send between hosts, and what they take beside MPI's own.

`mpirun -n 4 python -m tests.hosts.crossing MEGABYTES ROUNDS`: rank 0 prints a JSON line per call and way.
"ours" are sums in each host first, "flat" sums of all ranks at once, "mpi" what MPI has.
"""

import json
import os
import sys
import time

import numpy as np
from mpi4py import MPI

from shardrt.comm import create
from shardrt.comm.hierarchical import HierarchicalCommunicator
from shardrt.device import get

INLINE = get("cpu").current_stream


def received() -> int:
    """Bytes that this host's cable has brought, with all headers."""
    with open("/proc/net/dev") as file:
        (found,) = (line.split(":")[1].split() for line in file if line.strip().startswith("eth0:"))
    return int(found[0])


def ways(megabytes: float):
    """(call, way, function, communicator) with buffers of so many megabytes."""
    world = MPI.COMM_WORLD
    n = int(megabytes * 1e6) // 4 // world.size
    ours, flat = create("auto"), create("mpi")
    assert type(ours) is HierarchicalCommunicator or world.size == 1
    output = np.empty(n, np.float32)
    for way, comm in (("ours", ours), ("flat", flat)):
        summed = comm.allocate(n * world.size, np.float32, shared=False)
        whole = comm.allocate(n * world.size, np.float32, shared=True)
        summed[:] = world.rank
        own = whole[world.rank * n : (world.rank + 1) * n]

        def reduce_scatter(comm=comm, summed=summed):
            comm.reduce_scatter(output, summed, stream=INLINE)
            assert output[0] == output[-1] == sum(range(world.size))

        def all_gather(comm=comm, whole=whole, own=own):
            own[:] = world.rank
            comm.all_gather(whole, stream=INLINE)
            assert whole[0] == 0 and whole[-1] == world.size - 1
            comm.barrier(stream=INLINE)

        yield "reduce_scatter", way, reduce_scatter, comm
        yield "all_gather", way, all_gather, comm
    plain = np.full(n * world.size, world.rank, np.float32)
    yield "reduce_scatter", "mpi", lambda: world.Reduce_scatter_block(plain, output), None
    yield "all_gather", "mpi", lambda: world.Allgather(output, plain), None


def main(megabytes: str, rounds: str) -> None:
    world = MPI.COMM_WORLD
    for call, way, function, comm in ways(float(megabytes)):
        function()  # connections, pages
        seconds = []
        world.Barrier()
        before, message = received(), getattr(comm, "bytes_across", 0)
        for _ in range(int(rounds)):
            world.Barrier()
            began = time.perf_counter()
            function()
            world.Barrier()
            seconds.append(time.perf_counter() - began)
        found = {
            "call": call,
            "way": way,
            "buffer": int(float(megabytes) * 1e6),
            "ms": round(sorted(seconds)[len(seconds) // 2] * 1e3, 2),
            "wire": (received() - before) / int(rounds),
            "across": (getattr(comm, "bytes_across", 0) - message) / int(rounds),  # of one rank
        }
        if world.rank == 0:
            os.write(1, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
