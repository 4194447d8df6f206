"""The contestants: our communicators, mpi4py's upper-case calls, cupy.cuda.nccl's. One method per collective.

A contestant also says where the arrays lie, as one who uses it would: an all_gather of ours goes to a buffer
that is shared where the communicator has such memory, a raw call to ordinary memory. A method gives a call
with all its arguments, so that what is timed holds nothing else.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import numpy as np

from shardrt.comm import Communicator
from shardrt.comm.protocol import aligned_zeros
from shardrt.device import Device
from shardrt.dtypes import LOW

from ..harness import timing
from ..harness.timing import Call, in_order
from ..harness.values import NARROW, count_wrong, decoded, encoded, fill, poison
from . import offers
from .ops import Case

Array = Any


class Contestant(ABC):
    """Collectives from a source to a target; a method, named as the op, gives the call for such arrays.

    `sources`, `targets`: bytes for the largest case. `carriers`: as what a type that it has no name for
    travels.
    """

    sources: Array
    targets: Array
    _scratch: Array  # as large, where there is a "mulsum" of two steps
    carriers = offers.RAW_CARRIERS

    def __init__(self, rank: int, device: Device) -> None:
        self.rank = rank
        self.device = device

    @abstractmethod
    def offers(self, case: Case) -> bool:
        """Whether it has such a call."""

    def bind(self, case: Case, control: Communicator) -> timing.Contestant:
        """Arrays of zeros, and what is done with them."""
        source, target = self.arrays(case)
        for array in (source, target):
            array.fill(0)  # sums of what was summed before would run out of their type
        call = getattr(self, case.op.name)(source, target, case)
        return timing.Contestant(call, partial(self.wrong, source, target, call, case, control))

    def wrong(
        self, source: Array, target: Array, call: Call, case: Case, control: Communicator, round_: int
    ) -> int:
        """Wrong elements of one call with the values of a round. Collective over the ranks of `control`."""
        device, rank = self.device, self.rank
        stream = device.current_stream
        stream.synchronize()
        control.barrier(stream=stream)  # a shared target is poisoned when no rank reads it
        poison(target)
        stream.synchronize()
        control.barrier(stream=stream)
        if case.gives(rank):
            fill(device, source, lambda indices: case.given(rank, indices, round_))
        stream.synchronize()
        call()
        stream.synchronize()
        if not case.gets(rank):
            return 0
        dtype = self.target_dtype(case)
        right = partial(case.expected, rank, round_=round_, dtype=dtype)
        return count_wrong(device, target, right, case.tolerance, dtype)

    def arrays(self, case: Case) -> tuple[Array, Array]:
        """(source, target) in this contestant's memory; in place, one is the other or a slice of it."""
        op, rank = case.op, self.rank
        source = self._as(self.sources, case.dtype)[: case.source_size(rank)]
        target = self._as(self._targets(case), self.target_dtype(case))[: case.target_size(rank)]
        if case.place == "in":
            own = self._own(case)
            if op.whole_target:
                source = target[own]
            elif not op.whole_source:
                source = target
            else:
                target = source[own]
        return source, target

    def target_dtype(self, case: Case) -> str:
        """Of what comes out."""
        return case.dtype

    def _as(self, memory: Array, dtype: str) -> Array:
        return memory.view(self.carriers.get(dtype, dtype))

    def _targets(self, case: Case) -> Array:
        return self.targets

    def _own(self, case: Case) -> slice:
        """This rank's slice of what all ranks give or get."""
        return slice(self.rank * case.count, (self.rank + 1) * case.count)

    def _pieces(self, array: Array, case: Case) -> list[Array]:
        """The slices of all ranks."""
        return [array[peer * case.count : (peer + 1) * case.count] for peer in range(case.ranks)]

    def _scaled(self, source: Array, case: Case) -> tuple[list[Call], Array]:
        """What multiplies a source by this rank's scalar, and where that is then."""
        if case.reduction != "mulsum":
            return [], source
        scaled = source if case.place == "in" else self._as(self._scratch, case.dtype)[: source.size]
        return [partial(np.multiply, source, source.dtype.type(case.scalar(self.rank)), scaled)], scaled

    def _doubling(self, target: Array, case: Case) -> list[tuple[Array, Array, int]]:
        """The exchanges of a hypercube's all-gather: (what is sent, what is received, with whom)."""
        found, width = [], 1
        while width < case.ranks:
            here = self.rank // width * width
            there = here ^ width
            mine, theirs = (
                target[first * case.count : (first + width) * case.count] for first in (here, there)
            )
            found.append((mine, theirs, self.rank ^ width))
            width *= 2
        return found


class Ours(Contestant):
    """A communicator of shardrt. What it offers in place only is out of place with a copy before it.

    It has no gather, no scatter and no hypercube: they are made of exchanges with one peer after another.
    Reductions of 16-bit and 8-bit floats in host memory, other than FSDP's own reduce_scatter, are made of an
    all_to_all, sums in float32 and, for all_reduce, an all_gather.
    """

    carriers = offers.OUR_CARRIERS

    def __init__(self, communicator: Communicator, device: Device, nbytes: int) -> None:
        super().__init__(communicator.rank, device)
        self._communicator = communicator
        self.sources = communicator.allocate(nbytes, np.uint8, shared=False)
        wider = 2 if communicator.size == 1 else 1  # the one rank's sums of bfloat16 are all float32
        self.targets = communicator.allocate(wider * nbytes, np.uint8, shared=False)
        self._scratch = communicator.allocate(nbytes, np.uint8, shared=False)
        self._gathered = communicator.allocate(nbytes, np.uint8, shared=True)
        self._token = device.buffer(2, np.uint8)  # what goes back in an exchange that carries one way

    def offers(self, case: Case) -> bool:
        return not offers.why_not_ours(case, not self.device.in_host_memory)

    def target_dtype(self, case: Case) -> str:
        return "float32" if offers.widened(case) else case.dtype

    def _targets(self, case: Case) -> Array:
        return self._gathered if case.op.name == "all_gather" else self.targets

    def _bound(self, name: str, *arrays: Array, **more: Any) -> Call:
        """One call of the communicator, in the current stream."""
        return partial(getattr(self._communicator, name), *arrays, stream=self.device.current_stream, **more)

    def _copy(self, target: Array, source: Array, needed: bool) -> list[Call]:
        return [partial(self.device.copy, target, source)] if needed else []

    def all_gather(self, source: Array, target: Array, case: Case) -> Call:
        copies = self._copy(target[self._own(case)], source, case.place == "out")
        if copies and self._communicator.shares_memory:
            copies.insert(0, self._bound("barrier"))  # peers may still read what was gathered before
        return in_order(*copies, self._bound("all_gather", target))

    def reduce_scatter(self, source: Array, target: Array, case: Case) -> Call:
        if case.dtype in NARROW and not offers.widened(case):
            return partial(self._reduce_narrow, source, target, case)
        kind = case.dtype if case.dtype in LOW else ""
        scale = 1 / case.ranks if case.reduction == "avg" else 1.0
        scaled, source = self._scaled(source, case)
        return in_order(*scaled, self._bound("reduce_scatter", target, source, scale=scale, kind=kind))

    def all_reduce(self, source: Array, target: Array, case: Case) -> Call:
        if case.dtype in NARROW:
            return partial(self._reduce_narrow, source, target, case)
        calls = self._copy(target, source, case.place == "out")
        if case.reduction == "mulsum":
            calls.append(partial(np.multiply, target, target.dtype.type(case.scalar(self.rank)), target))
        op = case.reduction if case.reduction in ("prod", "min", "max") else "sum"
        calls.append(self._bound("all_reduce", target, op=op))
        if case.reduction == "avg":
            calls.append(partial(np.multiply, target, target.dtype.type(1 / case.ranks), target))
        return in_order(*calls)

    def _reduce_narrow(self, source: Array, target: Array, case: Case) -> None:
        """Slices to their owners, sums in float32, one rounding; for all_reduce the slices to all."""
        even = -(-source.size // case.ranks)
        sent = np.zeros(even * case.ranks, source.dtype)
        sent[: source.size] = source
        if case.reduction == "mulsum":
            sent = encoded(decoded(sent, case.dtype) * case.scalar(self.rank), case.dtype)
        came, stream = np.empty_like(sent), self.device.current_stream
        self._communicator.all_to_all(came, sent, stream=stream)
        parts = decoded(came, case.dtype).reshape(case.ranks, even)
        pairwise = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}
        own = pairwise.get(case.reduction, np.add).reduce(parts, axis=0)
        own = encoded(own / case.ranks if case.reduction == "avg" else own, case.dtype)
        if case.op.name == "reduce_scatter":
            target[:] = own
            return
        came[self.rank * even : (self.rank + 1) * even] = own
        self._communicator.all_gather(came, stream=stream)
        target[:] = came[: target.size]

    def broadcast(self, source: Array, target: Array, case: Case) -> Call:
        copies = self._copy(target, source, case.place == "out" and self.rank == case.root)
        return in_order(*copies, self._bound("broadcast", target, root=case.root))

    def all_to_all(self, source: Array, target: Array, case: Case) -> Call:
        return self._bound("all_to_all", target, source)

    def alltoallv(self, source: Array, target: Array, case: Case) -> Call:
        counts = {"received": case.received(self.rank), "sent": case.sent(self.rank)}
        return self._bound("all_to_all", target, source, **counts)

    def gather(self, source: Array, target: Array, case: Case) -> Call:
        if self.rank != case.root:
            return self._swap(self._token[:1], source, case.root)
        copies = self._copy(target[self._own(case)], source, case.place == "out")
        swaps = [self._swap(piece, self._token[1:], peer) for peer, piece in self._others(target, case)]
        return in_order(*copies, *swaps)

    def scatter(self, source: Array, target: Array, case: Case) -> Call:
        if self.rank != case.root:
            return self._swap(target, self._token[1:], case.root)
        copies = self._copy(target, source[self._own(case)], case.place == "out")
        swaps = [self._swap(self._token[:1], piece, peer) for peer, piece in self._others(source, case)]
        return in_order(*copies, *swaps)

    def sendrecv(self, source: Array, target: Array, case: Case) -> Call:
        to, come_from = (self.rank + 1) % case.ranks, (self.rank - 1) % case.ranks
        return self._bound("exchange", target, source, to=to, source=come_from)

    def hypercube(self, source: Array, target: Array, case: Case) -> Call:
        copies = self._copy(target[self._own(case)], source, case.place == "out")
        return in_order(
            *copies, *(self._swap(theirs, mine, peer) for mine, theirs, peer in self._doubling(target, case))
        )

    def _others(self, array: Array, case: Case) -> list[tuple[int, Array]]:
        return [(peer, piece) for peer, piece in enumerate(self._pieces(array, case)) if peer != self.rank]

    def _swap(self, output: Array, buffer: Array, peer: int) -> Call:
        return self._bound("exchange", output, buffer, to=peer, source=peer)


class RawMPI(Contestant):
    """mpi4py's upper-case calls. color: the ranks with the same are one group."""

    def __init__(self, device: Device, nbytes: int, color: int = 0) -> None:
        from mpi4py import MPI

        self._mpi = MPI.COMM_WORLD.Split(color, MPI.COMM_WORLD.rank)
        super().__init__(self._mpi.rank, device)
        self._in_place = MPI.IN_PLACE
        self._ops = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX, "mulsum": MPI.SUM}
        self.sources = aligned_zeros(nbytes, np.uint8)
        self.targets = aligned_zeros(nbytes, np.uint8)
        self._scratch = aligned_zeros(nbytes, np.uint8)

    def offers(self, case: Case) -> bool:
        return not offers.why_not_mpi(case)

    def arrays(self, case: Case) -> tuple[Array, Array]:
        source, target = super().arrays(case)
        if case.place == "in" and case.op.name == "reduce_scatter":  # MPI's result comes first on each rank
            target = source[: case.count]
        return source, target

    def _from(self, source: Array, case: Case) -> Any:
        return self._in_place if case.place == "in" else source

    def all_gather(self, source: Array, target: Array, case: Case) -> Call:
        return partial(self._mpi.Allgather, self._from(source, case), target)

    def reduce_scatter(self, source: Array, target: Array, case: Case) -> Call:
        scaled, source = self._scaled(source, case)
        arrays = (source, target) if case.place == "out" else (self._in_place, source)
        return in_order(*scaled, partial(self._mpi.Reduce_scatter_block, *arrays, self._ops[case.reduction]))

    def all_reduce(self, source: Array, target: Array, case: Case) -> Call:
        scaled, source = self._scaled(source, case)
        arrays = self._from(source, case), target
        return in_order(*scaled, partial(self._mpi.Allreduce, *arrays, self._ops[case.reduction]))

    def broadcast(self, source: Array, target: Array, case: Case) -> Call:
        copied = case.place == "out" and self.rank == case.root  # MPI knows one buffer
        copies = [partial(np.copyto, target, source)] if copied else []
        return in_order(*copies, partial(self._mpi.Bcast, target, case.root))

    def all_to_all(self, source: Array, target: Array, case: Case) -> Call:
        return partial(self._mpi.Alltoall, source, target)

    def alltoallv(self, source: Array, target: Array, case: Case) -> Call:
        sent, received = case.sent(self.rank), case.received(self.rank)
        return partial(self._mpi.Alltoallv, [source, sent], [target, received])

    def reduce(self, source: Array, target: Array, case: Case) -> Call:
        scaled, source = self._scaled(source, case)
        at_root = self.rank == case.root
        arrays = (self._from(source, case), target) if at_root else (source, None)
        more = {"op": self._ops[case.reduction], "root": case.root}
        return in_order(*scaled, partial(self._mpi.Reduce, *arrays, **more))

    def gather(self, source: Array, target: Array, case: Case) -> Call:
        at_root = self.rank == case.root
        arrays = (self._from(source, case), target) if at_root else (source, None)
        return partial(self._mpi.Gather, *arrays, root=case.root)

    def scatter(self, source: Array, target: Array, case: Case) -> Call:
        if self.rank != case.root:
            return partial(self._mpi.Scatter, None, target, root=case.root)
        into = self._in_place if case.place == "in" else target
        return partial(self._mpi.Scatter, source, into, root=case.root)

    def sendrecv(self, source: Array, target: Array, case: Case) -> Call:
        to, come_from = (self.rank + 1) % case.ranks, (self.rank - 1) % case.ranks
        return partial(self._mpi.Sendrecv, source, to, recvbuf=target, source=come_from)

    def hypercube(self, source: Array, target: Array, case: Case) -> Call:
        calls = [] if case.place == "in" else [partial(np.copyto, target[self._own(case)], source)]
        for mine, theirs, peer in self._doubling(target, case):
            calls.append(partial(self._mpi.Sendrecv, mine, peer, recvbuf=theirs, source=peer))
        return in_order(*calls)


class RawNCCL(Contestant):
    """The calls of cupy.cuda.nccl, on the NCCL communicator of ours.

    Never run on a GPU yet (docs/reference/limits.md). What NCCL has no call for is made of sends and receives
    in one group, as in nccl-tests.
    """

    def __init__(self, communicator: Any, nbytes: int) -> None:
        super().__init__(communicator.rank, communicator._device)
        self._comm, self._nccl = communicator._transport.comm, communicator._transport.nccl
        self.sources = self.device.buffer(nbytes, np.uint8)
        self.targets = self.device.buffer(nbytes, np.uint8)

    def offers(self, case: Case) -> bool:
        return not offers.why_not_nccl(case)

    def all_gather(self, source: Array, target: Array, case: Case) -> Call:
        return self._collective("allGather", source, target, case)

    def reduce_scatter(self, source: Array, target: Array, case: Case) -> Call:
        return self._collective("reduceScatter", source, target, case, _OPS[case.reduction])

    def all_reduce(self, source: Array, target: Array, case: Case) -> Call:
        return self._collective("allReduce", source, target, case, _OPS[case.reduction])

    def broadcast(self, source: Array, target: Array, case: Case) -> Call:
        return self._collective("broadcast", source, target, case, case.root)

    def reduce(self, source: Array, target: Array, case: Case) -> Call:
        return self._collective("reduce", source, target, case, _OPS[case.reduction], case.root)

    def _collective(self, name: str, source: Array, target: Array, case: Case, *more: int) -> Call:
        """One call. more: what it takes between the type and the stream."""
        arguments = source.data.ptr, target.data.ptr, case.count, _TYPES[case.dtype], *more
        return partial(getattr(self._comm, name), *arguments, self.device.stream_here())

    def all_to_all(self, source: Array, target: Array, case: Case) -> Call:
        sent, received = (enumerate(self._pieces(array, case)) for array in (source, target))
        return self._messages(sent, received, case)

    def alltoallv(self, source: Array, target: Array, case: Case) -> Call:
        sent = enumerate(np.split(source, np.cumsum(case.sent(self.rank))[:-1].tolist()))
        received = enumerate(np.split(target, np.cumsum(case.received(self.rank))[:-1].tolist()))
        return self._messages(sent, received, case)

    def gather(self, source: Array, target: Array, case: Case) -> Call:
        pieces = enumerate(self._pieces(target, case)) if self.rank == case.root else ()
        return self._messages([(case.root, source)], pieces, case)

    def scatter(self, source: Array, target: Array, case: Case) -> Call:
        pieces = enumerate(self._pieces(source, case)) if self.rank == case.root else ()
        return self._messages(pieces, [(case.root, target)], case)

    def sendrecv(self, source: Array, target: Array, case: Case) -> Call:
        to, come_from = (self.rank + 1) % case.ranks, (self.rank - 1) % case.ranks
        return self._messages([(to, source)], [(come_from, target)], case)

    def hypercube(self, source: Array, target: Array, case: Case) -> Call:
        own = target[self._own(case)]
        copies = [partial(self.device.copy, own, source)] if case.place == "out" else []
        swaps = [
            self._messages([(peer, mine)], [(peer, theirs)], case)
            for mine, theirs, peer in self._doubling(target, case)
        ]
        return in_order(*copies, *swaps)

    def _messages(self, sent: Any, received: Any, case: Case) -> Call:
        """All of them at once, each the rank that it goes to or comes from and an array."""
        kind, stream = _TYPES[case.dtype], self.device.stream_here()
        calls = [
            partial(call, array.data.ptr, array.size, kind, peer, stream)
            for call, messages in ((self._comm.send, sent), (self._comm.recv, received))
            for peer, array in messages
            if array.size
        ]

        def call() -> None:
            self._nccl.groupStart()
            try:
                for each in calls:
                    each()
            finally:
                self._nccl.groupEnd()

        return call


# NCCL's numbers (nccl.h): ncclDataType_t, ncclRedOp_t. CuPy has names for some.
_TYPES = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6, "float32": 7}
_TYPES |= {"float64": 8, "bfloat16": 9, "float8_e4m3fn": 10, "float8_e5m2": 11}
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
