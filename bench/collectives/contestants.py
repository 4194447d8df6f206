"""The contestants: our communicators, mpi4py's upper-case calls, cupy.cuda.nccl's. One method per collective.

A contestant also says where the arrays lie, as one who uses it would: an all_gather of ours goes to a buffer
that is shared where the communicator has such memory, a raw call to ordinary memory.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from shardrt.comm import Communicator
from shardrt.comm.protocol import aligned_zeros
from shardrt.device import Device
from shardrt.dtypes import LOW

from . import offers
from .ops import Case

Array = Any


class Contestant(ABC):
    """Collectives from a source to a target, each called as the op is named: (source, target, case).

    `sources`, `targets`: bytes for the largest case. `carriers`: as what a type
    that it has no name for travels.
    """

    sources: Array
    targets: Array
    carriers = offers.RAW_CARRIERS

    def __init__(self, rank: int, device: Device) -> None:
        self.rank = rank
        self.device = device

    @abstractmethod
    def offers(self, case: Case) -> bool:
        """Whether it has such a call."""

    def arrays(self, case: Case) -> tuple[Array, Array]:
        """(source, target) in this contestant's memory; in place, one is the other or a slice of it."""
        op, count = case.op, case.count
        source = self._as(self.sources, case.dtype)[: op.source_size(count, case.ranks)]
        targets = self._as(self._targets(case), case.target_dtype)
        target = targets[: op.target_size(count, case.ranks)]
        if case.place == "in":
            own = self._own(case)
            if op.whole_target:
                source = target[own]
            elif not op.whole_source:
                source = target
            else:
                target = source[own]
        return source, target

    def call(self, source: Array, target: Array, case: Case) -> None:
        """One collective, or on a GPU the launch of one."""
        getattr(self, case.op.name)(source, target, case)

    def _as(self, memory: Array, dtype: str) -> Array:
        return memory.view(self.carriers.get(dtype, dtype))

    def _targets(self, case: Case) -> Array:
        return self.targets

    def _own(self, case: Case) -> slice:
        """This rank's slice of what all ranks give or get."""
        return slice(self.rank * case.count, (self.rank + 1) * case.count)


class Ours(Contestant):
    """A communicator of shardrt. What it offers in place only is out of place with a copy before it.

    It has no gather and no scatter: they are made of one exchange with each peer, one after another.
    """

    carriers = offers.OUR_CARRIERS

    def __init__(self, communicator: Communicator, device: Device, nbytes: int) -> None:
        super().__init__(communicator.rank, device)
        self._communicator = communicator
        self.sources = communicator.allocate(nbytes, np.uint8, shared=False)
        wider = 2 if communicator.size == 1 else 1  # the one rank's sums of bfloat16 are all float32
        self.targets = communicator.allocate(wider * nbytes, np.uint8, shared=False)
        self._gathered = communicator.allocate(nbytes, np.uint8, shared=True)
        self._token = device.buffer(2, np.uint8)  # what goes back in an exchange that carries one way

    def offers(self, case: Case) -> bool:
        return offers.ours(case)

    def _targets(self, case: Case) -> Array:
        return self._gathered if case.op.name == "all_gather" else self.targets

    def all_gather(self, source: Array, target: Array, case: Case) -> None:
        stream = self.device.current_stream
        if case.place == "out":
            if self._communicator.shares_memory:
                self._communicator.barrier(stream=stream)  # peers may still read what was gathered before
            self.device.copy(target[self._own(case)], source)
        self._communicator.all_gather(target, stream=stream)

    def reduce_scatter(self, source: Array, target: Array, case: Case) -> None:
        kind = case.dtype if case.dtype in LOW else ""
        scale = 1 / case.ranks if case.reduction == "avg" else 1.0
        stream = self.device.current_stream
        self._communicator.reduce_scatter(target, source, scale=scale, kind=kind, stream=stream)

    def all_reduce(self, source: Array, target: Array, case: Case) -> None:
        if case.place == "out":
            self.device.copy(target, source)
        op = "sum" if case.reduction == "avg" else case.reduction
        self._communicator.all_reduce(target, op=op, stream=self.device.current_stream)
        if case.reduction == "avg":
            target *= 1 / case.ranks

    def broadcast(self, source: Array, target: Array, case: Case) -> None:
        if case.place == "out" and self.rank == case.root:
            self.device.copy(target, source)
        self._communicator.broadcast(target, root=case.root, stream=self.device.current_stream)

    def all_to_all(self, source: Array, target: Array, case: Case) -> None:
        self._communicator.all_to_all(target, source, stream=self.device.current_stream)

    def gather(self, source: Array, target: Array, case: Case) -> None:
        if self.rank != case.root:
            self._swap(self._token[:1], source, case.root)
            return
        if case.place == "out":
            self.device.copy(target[self._own(case)], source)
        for peer in range(case.ranks):
            if peer != self.rank:
                self._swap(target[peer * case.count : (peer + 1) * case.count], self._token[1:], peer)

    def scatter(self, source: Array, target: Array, case: Case) -> None:
        if self.rank != case.root:
            self._swap(target, self._token[1:], case.root)
            return
        if case.place == "out":
            self.device.copy(target, source[self._own(case)])
        for peer in range(case.ranks):
            if peer != self.rank:
                self._swap(self._token[:1], source[peer * case.count : (peer + 1) * case.count], peer)

    def sendrecv(self, source: Array, target: Array, case: Case) -> None:
        to, come_from = (self.rank + 1) % case.ranks, (self.rank - 1) % case.ranks
        stream = self.device.current_stream
        self._communicator.exchange(target, source, to=to, source=come_from, stream=stream)

    def _swap(self, output: Array, buffer: Array, peer: int) -> None:
        stream = self.device.current_stream
        self._communicator.exchange(output, buffer, to=peer, source=peer, stream=stream)


class RawMPI(Contestant):
    """mpi4py's upper-case calls."""

    def __init__(self, device: Device, nbytes: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI.COMM_WORLD.Dup()
        super().__init__(self._mpi.rank, device)
        self._in_place = MPI.IN_PLACE
        self._ops = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
        self.sources = aligned_zeros(nbytes, np.uint8)
        self.targets = aligned_zeros(nbytes, np.uint8)

    def offers(self, case: Case) -> bool:
        return offers.raw(case)

    def arrays(self, case: Case) -> tuple[Array, Array]:
        source, target = super().arrays(case)
        if (
            case.place == "in" and case.op.name == "reduce_scatter"
        ):  # MPI puts the result first, on every rank
            target = source[: case.count]
        return source, target

    def _from(self, source: Array, case: Case) -> Any:
        return self._in_place if case.place == "in" else source

    def all_gather(self, source: Array, target: Array, case: Case) -> None:
        self._mpi.Allgather(self._from(source, case), target)

    def reduce_scatter(self, source: Array, target: Array, case: Case) -> None:
        if case.place == "out":
            self._mpi.Reduce_scatter_block(source, target, op=self._ops[case.reduction])
        else:
            self._mpi.Reduce_scatter_block(self._in_place, source, op=self._ops[case.reduction])

    def all_reduce(self, source: Array, target: Array, case: Case) -> None:
        self._mpi.Allreduce(self._from(source, case), target, op=self._ops[case.reduction])

    def broadcast(self, source: Array, target: Array, case: Case) -> None:
        if case.place == "out" and self.rank == case.root:  # MPI knows one buffer
            np.copyto(target, source)
        self._mpi.Bcast(target, case.root)

    def all_to_all(self, source: Array, target: Array, case: Case) -> None:
        self._mpi.Alltoall(source, target)

    def reduce(self, source: Array, target: Array, case: Case) -> None:
        op = self._ops[case.reduction]
        if self.rank == case.root:
            self._mpi.Reduce(self._from(source, case), target, op=op, root=case.root)
        else:
            self._mpi.Reduce(source, None, op=op, root=case.root)

    def gather(self, source: Array, target: Array, case: Case) -> None:
        if self.rank == case.root:
            self._mpi.Gather(self._from(source, case), target, root=case.root)
        else:
            self._mpi.Gather(source, None, root=case.root)

    def scatter(self, source: Array, target: Array, case: Case) -> None:
        if self.rank == case.root:
            self._mpi.Scatter(source, self._in_place if case.place == "in" else target, root=case.root)
        else:
            self._mpi.Scatter(None, target, root=case.root)

    def sendrecv(self, source: Array, target: Array, case: Case) -> None:
        to, come_from = (self.rank + 1) % case.ranks, (self.rank - 1) % case.ranks
        self._mpi.Sendrecv(source, to, recvbuf=target, source=come_from)


class RawNCCL(Contestant):
    """The calls of cupy.cuda.nccl, on the NCCL communicator of ours.

    Never run on a GPU yet (docs/reference/limits.md). gather, scatter and sendrecv are sends and receives in
    one group, as in nccl-tests.
    """

    def __init__(self, communicator: Any, nbytes: int) -> None:
        from shardrt.comm.nccl import TYPES

        super().__init__(communicator.rank, communicator._device)
        self._comm, self._nccl = communicator._transport.comm, communicator._transport.nccl
        names = {"sum": "NCCL_SUM", "prod": "NCCL_PROD", "min": "NCCL_MIN", "max": "NCCL_MAX"}
        self._ops = {reduction: getattr(self._nccl, name) for reduction, name in names.items()}
        self._types = TYPES | {"int8": 0, "uint32": 3, "uint64": 5}  # nccl.h
        self.sources = self.device.buffer(nbytes, np.uint8)
        self.targets = self.device.buffer(nbytes, np.uint8)

    def offers(self, case: Case) -> bool:
        return offers.raw_nccl(case)

    def all_gather(self, source: Array, target: Array, case: Case) -> None:
        self._collective("allGather", source, target, case)

    def reduce_scatter(self, source: Array, target: Array, case: Case) -> None:
        self._collective("reduceScatter", source, target, case, self._ops[case.reduction])

    def all_reduce(self, source: Array, target: Array, case: Case) -> None:
        self._collective("allReduce", source, target, case, self._ops[case.reduction])

    def broadcast(self, source: Array, target: Array, case: Case) -> None:
        self._collective("broadcast", source, target, case, case.root)

    def reduce(self, source: Array, target: Array, case: Case) -> None:
        self._collective("reduce", source, target, case, self._ops[case.reduction], case.root)

    def _collective(self, name: str, source: Array, target: Array, case: Case, *more: int) -> None:
        """One call. more: what it takes between the type and the stream."""
        arguments = source.data.ptr, target.data.ptr, case.count, self._types[source.dtype.name], *more
        getattr(self._comm, name)(*arguments, self.device.stream_here())

    def gather(self, source: Array, target: Array, case: Case) -> None:
        pieces = self._pieces(target, case) if self.rank == case.root else []
        self._messages([(source, case.root)], pieces)

    def scatter(self, source: Array, target: Array, case: Case) -> None:
        pieces = self._pieces(source, case) if self.rank == case.root else []
        self._messages(pieces, [(target, case.root)])

    def sendrecv(self, source: Array, target: Array, case: Case) -> None:
        to, come_from = (self.rank + 1) % case.ranks, (self.rank - 1) % case.ranks
        self._messages([(source, to)], [(target, come_from)])

    def _pieces(self, array: Array, case: Case) -> list[tuple[Array, int]]:
        return [(array[peer * case.count : (peer + 1) * case.count], peer) for peer in range(case.ranks)]

    def _messages(self, sent: list[tuple[Array, int]], received: list[tuple[Array, int]]) -> None:
        """All of them at once, each an array and the rank that it goes to or comes from."""
        self._nccl.groupStart()
        try:
            for call, messages in ((self._comm.send, sent), (self._comm.recv, received)):
                for array, peer in messages:
                    kind = self._types[array.dtype.name]
                    call(array.data.ptr, array.size, kind, peer, self.device.stream_here())
        finally:
            self._nccl.groupEnd()
