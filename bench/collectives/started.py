"""Collectives that are started and finished apart, so that other work can run between. bench.overlap's.

Ours run in a stream of their own, as FSDP has them; mpi4py's are the non-blocking calls. In place where FSDP
is in place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shardrt.comm import Communicator
from shardrt.comm.protocol import aligned_zeros
from shardrt.device import Device

from .ops import NONE, OPS, Case, rounded

PLACES = {"all_gather": "in", "reduce_scatter": "out", "all_reduce": "in", "all_to_all": "out"}


def case_of(name: str, nbytes: int, ranks: int) -> Case:
    """A sum of float32 or what is no sum, of about so many bytes."""
    op = OPS[name]
    size = rounded(op, "float32", nbytes, ranks)
    return Case(op, "float32", PLACES[name], size, ranks, "sum" if op.reduces else NONE)


class Ours:
    """A collective of a communicator of shardrt in `stream`, next to the compute stream."""

    tests = 0

    def __init__(self, case: Case, communicator: Communicator, device: Device, stream: Any) -> None:
        allocate = partial(communicator.allocate, dtype=np.float32, shared=case.op.name == "all_gather")
        self.source, self.target = _arrays(case, communicator.rank, allocate)
        arrays = (self.target,) if case.place == "in" else (self.target, self.source)
        self._call = partial(getattr(communicator, case.op.name), *arrays, stream=stream)
        self._compute, self._stream = device.current_stream, stream
        self._ready, self._done = device.new_event(), device.new_event()

    def start(self) -> None:
        """Start it after the earlier work of the compute stream, which may write the source."""
        self._compute.record(self._ready)
        self._stream.wait(self._ready)
        self._call()
        self._stream.record(self._done)

    def test(self) -> None:
        """Nothing: a stream goes on by itself."""

    def finish(self) -> None:
        """Let the compute stream wait for it."""
        self._compute.wait(self._done)


class NonBlocking:
    """A non-blocking collective of mpi4py. MPI may go on in calls of MPI only: `tests` of them are due."""

    CALLS = {"all_gather": "Iallgather", "reduce_scatter": "Ireduce_scatter_block"}
    CALLS |= {"all_reduce": "Iallreduce", "all_to_all": "Ialltoall"}

    def __init__(self, case: Case, tests: int) -> None:
        from mpi4py import MPI

        world, self.tests = MPI.COMM_WORLD, tests
        self.source, self.target = _arrays(case, world.rank, partial(aligned_zeros, dtype=np.float32))
        given = MPI.IN_PLACE if case.place == "in" else self.source
        self._call = partial(getattr(world, self.CALLS[case.op.name]), given, self.target)

    def start(self) -> None:
        """Start it."""
        self._request = self._call()

    def test(self) -> None:
        """Let MPI go on."""
        self._request.Test()

    def finish(self) -> None:
        """Return when it is done."""
        self._request.Wait()


def _arrays(case: Case, rank: int, allocate: Callable) -> tuple[Any, Any]:
    """Source and target of zeros; in place the source is the target, or this rank's slice of it."""
    target = allocate(case.op.target_size(case.count, case.ranks))
    if case.place == "out":
        return allocate(case.op.source_size(case.count, case.ranks)), target
    own = slice(rank * case.count, (rank + 1) * case.count) if case.op.of_slices else slice(None)
    return target[own], target
