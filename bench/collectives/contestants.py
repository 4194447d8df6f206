"""Who is timed: our communicators, mpi4py's upper-case calls, cupy.cuda.nccl's. One method per collective.

A contestant also says where the arrays lie, as one who uses it would: an all_gather of ours goes to a buffer
that is shared where the communicator has such memory, a raw call to ordinary memory.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from bench.collectives.ops import ROOT, Case
from shardrt.comm import Communicator
from shardrt.comm.protocol import aligned_zeros
from shardrt.device import Device

Array = Any


class Contestant(ABC):
    """Collectives from a source to a target, each called as the op is named: (source, target, case).

    `sources`, `targets`: bytes for the largest case.
    """

    sources: Array
    targets: Array

    def __init__(self, rank: int, device: Device) -> None:
        self.rank = rank
        self.device = device

    def offers(self, case: Case) -> bool:
        """Whether it has such a call."""
        return True

    def arrays(self, case: Case) -> tuple[Array, Array]:
        """(source, target) in this contestant's memory; in place, one is the other or a slice of it."""
        op, count = case.op, case.count
        sources, targets = self.sources.view(case.source_dtype), self._targets(case).view(case.target_dtype)
        source = sources[: op.source_size(count, case.ranks)]
        target = targets[: op.target_size(count, case.ranks)]
        if case.place == "in":
            own = slice(self.rank * count, (self.rank + 1) * count)
            if op.whole_target:
                source = target[own]
            elif not op.whole_source:
                source = target
            else:
                target = source[own]
        return source, target

    def _targets(self, case: Case) -> Array:
        return self.targets

    def call(self, source: Array, target: Array, case: Case) -> None:
        """One collective, or on a GPU the launch of one."""
        getattr(self, case.op.name)(source, target, case)

    @abstractmethod
    def all_gather(self, source: Array, target: Array, case: Case) -> None: ...

    @abstractmethod
    def reduce_scatter(self, source: Array, target: Array, case: Case) -> None: ...

    @abstractmethod
    def all_reduce(self, source: Array, target: Array, case: Case) -> None: ...

    @abstractmethod
    def broadcast(self, source: Array, target: Array, case: Case) -> None: ...

    @abstractmethod
    def all_to_all(self, source: Array, target: Array, case: Case) -> None: ...


class Ours(Contestant):
    """A communicator of shardrt. What it offers in place only is out of place with a copy before it."""

    def __init__(self, communicator: Communicator, device: Device, nbytes: int) -> None:
        super().__init__(communicator.rank, device)
        self._communicator = communicator
        self.sources = communicator.allocate(nbytes, np.uint8, shared=False)
        wider = 2 if communicator.size == 1 else 1  # the one rank's sums of bfloat16 are all float32
        self.targets = communicator.allocate(wider * nbytes, np.uint8, shared=False)
        self._gathered = communicator.allocate(nbytes, np.uint8, shared=True)

    def _targets(self, case: Case) -> Array:
        return self._gathered if case.op.name == "all_gather" else self.targets

    def all_gather(self, source: Array, target: Array, case: Case) -> None:
        stream = self.device.current_stream
        if case.place == "out":
            if self._communicator.shares_memory:
                self._communicator.barrier(stream=stream)  # peers may still read what was gathered before
            self.device.copy(target[self.rank * case.count : (self.rank + 1) * case.count], source)
        self._communicator.all_gather(target, stream=stream)

    def reduce_scatter(self, source: Array, target: Array, case: Case) -> None:
        kind = "bfloat16" if case.dtype == "bfloat16" else ""
        self._communicator.reduce_scatter(target, source, kind=kind, stream=self.device.current_stream)

    def all_reduce(self, source: Array, target: Array, case: Case) -> None:
        if case.place == "out":
            self.device.copy(target, source)
        self._communicator.all_reduce(target, stream=self.device.current_stream)

    def broadcast(self, source: Array, target: Array, case: Case) -> None:
        if case.place == "out" and self.rank == ROOT:
            self.device.copy(target, source)
        self._communicator.broadcast(target, root=ROOT, stream=self.device.current_stream)

    def all_to_all(self, source: Array, target: Array, case: Case) -> None:
        self._communicator.all_to_all(target, source, stream=self.device.current_stream)


class RawMPI(Contestant):
    """mpi4py's upper-case calls. MPI adds no bfloat16, so of that there is no reduce_scatter."""

    def __init__(self, device: Device, nbytes: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI.COMM_WORLD.Dup()
        super().__init__(self._mpi.rank, device)
        self._in_place = MPI.IN_PLACE
        self.sources = aligned_zeros(nbytes, np.uint8)
        self.targets = aligned_zeros(nbytes, np.uint8)

    def offers(self, case: Case) -> bool:
        return not (case.op.sums and case.dtype == "bfloat16")

    def arrays(self, case: Case) -> tuple[Array, Array]:
        source, target = super().arrays(case)
        if case.place == "in" and case.op.sums:  # MPI puts the result first, whoever the rank is
            target = source[: case.count]
        return source, target

    def _from(self, source: Array, case: Case) -> Any:
        return self._in_place if case.place == "in" else source

    def all_gather(self, source: Array, target: Array, case: Case) -> None:
        self._mpi.Allgather(self._from(source, case), target)

    def reduce_scatter(self, source: Array, target: Array, case: Case) -> None:
        if case.place == "out":
            self._mpi.Reduce_scatter_block(source, target)
        else:
            self._mpi.Reduce_scatter_block(self._in_place, source)

    def all_reduce(self, source: Array, target: Array, case: Case) -> None:
        self._mpi.Allreduce(self._from(source, case), target)

    def broadcast(self, source: Array, target: Array, case: Case) -> None:
        if case.place == "out" and self.rank == ROOT:  # MPI knows one buffer
            np.copyto(target, source)
        self._mpi.Bcast(target, ROOT)

    def all_to_all(self, source: Array, target: Array, case: Case) -> None:
        self._mpi.Alltoall(source, target)


class RawNCCL(Contestant):
    """cupy.cuda.nccl's calls, on the NCCL communicator of ours. Never run on a GPU yet (docs/status.md).

    NCCL sums bfloat16 into bfloat16, which is another operation than ours, so of that there is no
    reduce_scatter; and it has no all_to_all.
    """

    def __init__(self, communicator: Any, nbytes: int) -> None:
        from shardrt.comm.nccl import _TYPES

        super().__init__(communicator.rank, communicator._device)
        self._comm, self._sum = communicator._comm, communicator._nccl.NCCL_SUM
        self._types = _TYPES
        self.sources = self.device.buffer(nbytes, np.uint8)
        self.targets = self.device.buffer(nbytes, np.uint8)

    def offers(self, case: Case) -> bool:
        return case.op.name != "all_to_all" and not (case.op.sums and case.dtype == "bfloat16")

    def _places(self, source: Array, target: Array) -> tuple[int, int]:
        return source.data.ptr, target.data.ptr

    def _how(self, source: Array) -> tuple[int, int]:
        return self._types[source.dtype.name], self.device.stream_here()

    def all_gather(self, source: Array, target: Array, case: Case) -> None:
        self._comm.allGather(*self._places(source, target), case.count, *self._how(source))

    def reduce_scatter(self, source: Array, target: Array, case: Case) -> None:
        kind, stream = self._how(source)
        self._comm.reduceScatter(*self._places(source, target), case.count, kind, self._sum, stream)

    def all_reduce(self, source: Array, target: Array, case: Case) -> None:
        kind, stream = self._how(source)
        self._comm.allReduce(*self._places(source, target), case.count, kind, self._sum, stream)

    def broadcast(self, source: Array, target: Array, case: Case) -> None:
        kind, stream = self._how(source)
        self._comm.broadcast(*self._places(source, target), case.count, kind, ROOT, stream)

    def all_to_all(self, source: Array, target: Array, case: Case) -> None:
        raise NotImplementedError("NCCL has no all_to_all of its own")
