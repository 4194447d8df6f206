"""Contestants whose collectives start and finish apart, so that other work can run between.

A method named as the op gives the call, as in contestants.py; `start` makes it, `finish` waits for it.
Between the two, `tests` calls of `test` let it go on.
"""

from functools import partial
from typing import Any

from shardrt.comm import Communicator
from shardrt.device import Device

from ..harness.timing import Call
from .contestants import Array, Ours, RawMPI
from .ops import Case


class InStream(Ours):
    """A communicator of shardrt in a stream next to the compute stream, as in FSDP. What needs no copy."""

    tests = 0  # a stream goes on by itself

    def __init__(self, communicator: Communicator, device: Device, nbytes: int) -> None:
        super().__init__(communicator, device, nbytes)
        self._stream = device.new_stream("collectives")
        self._ready, self._done = device.new_event(), device.new_event()

    def _bound(self, name: str, *arrays: Array, **more: Any) -> Call:
        return partial(getattr(self._communicator, name), *arrays, stream=self._stream, **more)

    def start(self, call: Call) -> None:
        """Start it after the earlier work of the compute stream, which may write the source."""
        self.device.current_stream.record(self._ready)
        self._stream.wait(self._ready)
        call()
        self._stream.record(self._done)

    def test(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Let the compute stream wait for it."""
        self.device.current_stream.wait(self._done)


class NonBlocking(RawMPI):
    """mpi4py's non-blocking calls. MPI may go on in its own calls only, such as `test`."""

    def __init__(self, device: Device, nbytes: int, tests: int) -> None:
        super().__init__(device, nbytes)
        self.tests = tests

    def all_gather(self, source: Array, target: Array, case: Case) -> Call:
        return partial(self._mpi.Iallgather, self._from(source, case), target)

    def reduce_scatter(self, source: Array, target: Array, case: Case) -> Call:
        return partial(self._mpi.Ireduce_scatter_block, source, target, op=self._ops[case.reduction])

    def all_reduce(self, source: Array, target: Array, case: Case) -> Call:
        return partial(self._mpi.Iallreduce, self._from(source, case), target, op=self._ops[case.reduction])

    def all_to_all(self, source: Array, target: Array, case: Case) -> Call:
        return partial(self._mpi.Ialltoall, source, target)

    def start(self, call: Call) -> None:
        """Start it."""
        self._request = call()

    def test(self) -> None:
        """Let MPI go on."""
        self._request.Test()

    def finish(self) -> None:
        """Return when it is done."""
        self._request.Wait()
