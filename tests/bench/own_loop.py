"""Times mpi4py's calls by bench.collectives and by a loop of its own, alternating.

    mpirun -n 2 python -m tests.bench.own_loop [ROUNDS CALLS]

Prints JSON: by op and bytes, the medians over rounds of p50 and p99 over the loop's; and the processor time
in microseconds that the harness adds to a call.
"""

import json
import statistics
import sys
import time

import numpy as np
from mpi4py import MPI

from bench.collectives.contestants import RawMPI
from bench.collectives.ops import OPS, Case
from bench.harness.stats import stats
from bench.harness.timing import HostReadings, one_by_one
from shardrt import device
from shardrt.comm import create


def plain(call, calls):
    """As OSU's loops, and mpi4py's demos of them, time a call."""
    times = []
    for _ in range(calls):
        start = MPI.Wtime()
        call()
        times.append(MPI.Wtime() - start)
    return times


def compared(op, nbytes, rounds, calls):
    control, here = create("auto"), device.get("cpu")
    raw = RawMPI(here, nbytes)
    case = Case(OPS[op], "float32", "out", nbytes, control.size, "sum" if OPS[op].reduces else "none")
    ours = raw.bind(case, control).call
    source, target = (array.copy() for array in raw.arrays(case))
    world = MPI.COMM_WORLD.Dup()
    theirs = {
        "all_reduce": lambda: world.Allreduce(source, target),
        "all_gather": lambda: world.Allgather(source, target),
    }[op]
    ratios = []
    for _ in range(rounds + 1):
        world.Barrier()
        one = stats(one_by_one(ours, calls, HostReadings()))
        world.Barrier()
        other = stats(plain(theirs, calls))
        ratios.append((one.p50 / other.p50, one.p99 / other.p99))
    p50, p99 = (statistics.median(column) for column in zip(*ratios[1:], strict=True))
    return {"op": op, "bytes": nbytes, "p50": round(p50, 4), "p99": round(p99, 4)}


def cost(calls=20_000):
    """Microseconds of processor time that a call costs in the harness, beside the call."""

    def nothing():
        pass

    read = HostReadings()
    best = np.inf
    for _ in range(5):
        start = time.thread_time()
        one_by_one(nothing, calls, read)
        best = min(best, time.thread_time() - start)
    return round(1e6 * best / calls, 3)


def main(rounds=21, calls=500):
    cases = [
        compared(op, nbytes, rounds, calls)
        for op in ("all_reduce", "all_gather")
        for nbytes in (64, 4096, 1 << 20)
    ]
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"cost_us": cost(), "cases": cases}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
