"""Collectives as ops on the tape: each one's backward is its adjoint.

What ranks hold of a value, along an axis of the mesh, is of one of four kinds: the same on all (I), the same
with each rank using it in its own way (R), each its own part (V), or partial, to be summed (P). Gradients of
these are I, P, V and R. So there are two gathers, and two ways from a sum, named by what they do in both
directions (copy_to and reduce_from are f and g of Shoeybi et al., Megatron-LM, 2019):

    copy_to            I -> R   identity        / all-reduce
    reduce_from        P -> I   all-reduce      / identity
    gather             V -> R   all-gather      / reduce-scatter
    gather_same        V -> I   all-gather      / own slice
    scatter_to         I -> V   own slice       / all-gather
    reduce_scatter_to  P -> V   reduce-scatter  / all-gather
    all_to_all         V -> V   all-to-all      / all-to-all
    all_to_all_rows    V -> V   all-to-all      / all-to-all    (with counts per peer)
    exchange           V -> V   to and from     / from and to

The loss is the sum of the ranks' losses where values are R or V, and one loss, which all ranks have, where
they are I. With gather in the place of gather_same, gradients are too large by the number of ranks.

Traces, flight files and messages name the op, and the module whose forward called it, beside the collective.

Every rank of `communicator` calls an op, in the same order, with arrays of one shape and type, but for the
rows of all_to_all_rows; and `x` requires a gradient on all of them or on none, as backward is collective too.
"""

from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any

from shardrt import autograd, device, dtypes
from shardrt.autograd import Function
from shardrt.comm import Communicator
from shardrt.device import Stream
from shardrt.functional._again import Repeatable
from shardrt.functional._arrays import empty, empty_like, flat, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.waits import Waiting, filled

__all__ = [
    "all_to_all",
    "all_to_all_rows",
    "copy_to",
    "exchange",
    "gather",
    "gather_same",
    "reduce_from",
    "reduce_scatter_to",
    "scatter_to",
]


class CopyTo(Waiting):
    def forward(self, x: Array, communicator: Communicator, beside: Stream | None) -> Array:
        self.saved, self.beside = (communicator, x.dtype), beside
        return x

    def backward(self, dy: Array) -> tuple:
        communicator, dtype = self.saved  # dy may be float32 where x has 16 bits: a sum that goes on here
        total = summed(dy, communicator, named("copy_to", self.module), self.beside)
        return total.astype(dtype, copy=False), None, None


def copy_to(x: "Tensor", communicator: Communicator, beside: Stream | None = None) -> "Tensor":
    """`x`, which all ranks have, for each to use in its own way; its gradient is the sum of the ranks'.

    Args:
        beside: a stream for that sum, which then overlaps a matmul for a weight, if the preceding op has one.
            None: the sum runs in the stream of the ops, after the matmul.
    """
    return CopyTo.apply(tensor(x), communicator, beside)


class ReduceFrom(Function):
    def forward(self, x: Array, communicator: Communicator) -> Array:
        return summed(x, communicator, named("reduce_from"))

    def backward(self, dy: Array) -> tuple:
        return dy, None


def reduce_from(x: "Tensor", communicator: Communicator) -> "Tensor":
    """The sum of the ranks' `x`, for all to go on with alike; the gradient is that of the one result."""
    return ReduceFrom.apply(tensor(x), communicator)


class Gather(Waiting, Repeatable):
    @property
    def again_whole(self) -> tuple[int, ...]:
        *_, own = self.saved
        return () if own is None else (0,)

    def forward(
        self, x: Array, communicator: Communicator, axis: int, beside: Stream | None, again: bool
    ) -> Array:
        self.saved, self.beside = (communicator, axis, x.dtype, x if again else None), beside
        return gathered(x, communicator, axis, named("gather"))

    def again(self, index: int) -> Array:
        communicator, axis, _, own = self.saved
        return gathered(own, communicator, axis, named("gather_again", self.module))

    def backward(self, dy: Array) -> tuple:
        communicator, axis, dtype, _ = self.saved  # as in CopyTo
        total = sum_scattered(dy, communicator, axis, named("gather", self.module), self.beside)
        return total.astype(dtype, copy=False), None, None, None, None


def gather(
    x: "Tensor",
    communicator: Communicator,
    axis: int = 0,
    beside: Stream | None = None,
    *,
    again: bool = False,
) -> "Tensor":
    """The ranks' `x` one after the other along `axis`, for each rank to use in its own way.

    The gradient is this rank's slice of the sum of the ranks' gradients.

    Args:
        x: this rank's slice.
        communicator: the ranks.
        axis: the axis of `x`.
        beside: as in copy_to.
        again: a linear layer does not keep the result for its backward, but gathers `x` again there. Ranks
            run the same ops in the same order, so they gather together.
    """
    x = tensor(x)
    return Gather.apply(x, communicator, _axis("gather", x, axis), beside, again)


class GatherSame(Function):
    def forward(self, x: Array, communicator: Communicator, axis: int) -> Array:
        self.saved = (communicator, axis)
        return gathered(x, communicator, axis, named("gather_same"))

    def backward(self, dy: Array) -> tuple:
        return own_part(dy, *self.saved), None, None


def gather_same(x: "Tensor", communicator: Communicator, axis: int = 0) -> "Tensor":
    """The ranks' `x` one after the other along `axis`, for all to go on with alike.

    The gradient, which all ranks have, is split: each rank takes its slice.
    """
    x = tensor(x)
    return GatherSame.apply(x, communicator, _axis("gather_same", x, axis))


class ScatterTo(Function):
    def forward(self, x: Array, communicator: Communicator, axis: int) -> Array:
        self.saved = (communicator, axis)
        return own_part(x, communicator, axis)

    def backward(self, dy: Array) -> tuple:
        return gathered(dy, *self.saved, named("scatter_to", self.module)), None, None


def scatter_to(x: "Tensor", communicator: Communicator, axis: int = 0) -> "Tensor":
    """This rank's slice, along `axis`, of an `x` that all ranks have. ValueError if it can't be split."""
    x = tensor(x)
    return ScatterTo.apply(x, communicator, _divided("scatter_to", x, communicator, axis))


class ReduceScatterTo(Function):
    def forward(self, x: Array, communicator: Communicator, axis: int) -> Array:
        self.saved = (communicator, axis)
        return sum_scattered(x, communicator, axis, named("reduce_scatter_to"))

    def backward(self, dy: Array) -> tuple:
        return gathered(dy, *self.saved, named("reduce_scatter_to", self.module)), None, None


def reduce_scatter_to(x: "Tensor", communicator: Communicator, axis: int = 0) -> "Tensor":
    """This rank's slice, along `axis`, of the sum of the ranks' `x`. ValueError if it can't be split."""
    x = tensor(x)
    return ReduceScatterTo.apply(x, communicator, _divided("reduce_scatter_to", x, communicator, axis))


class AllToAll(Function):
    def forward(self, x: Array, communicator: Communicator, axis: int) -> Array:
        self.saved = (communicator, axis)
        return exchanged(x, communicator, axis, named("all_to_all"))

    def backward(self, dy: Array) -> tuple:
        return exchanged(dy, *self.saved, named("all_to_all", self.module)), None, None


def all_to_all(x: "Tensor", communicator: Communicator, axis: int = 0) -> "Tensor":
    """Chunk r of `x` along `axis` goes to rank r; chunk r of the result came from rank r.

    Raises:
        ValueError: if `x` can't be split into equal chunks for the ranks.
    """
    x = tensor(x)
    return AllToAll.apply(x, communicator, _divided("all_to_all", x, communicator, axis))


class AllToAllRows(Function):
    def forward(self, x: Array, communicator: Communicator, sent: tuple, received: tuple, rows: int) -> Array:
        self.saved = (communicator, received, sent, x.shape[0])
        return exchanged_rows(x, communicator, sent, received, rows, named("all_to_all_rows"))

    def backward(self, dy: Array) -> tuple:
        dx = exchanged_rows(dy, *self.saved, named("all_to_all_rows", self.module))
        return dx, None, None, None, None


def all_to_all_rows(
    x: "Tensor",
    communicator: Communicator,
    sent: Sequence[int],
    received: Sequence[int],
    rows: int | None = None,
) -> "Tensor":
    """The first sent[0] rows of `x` go to rank 0, the next sent[1] to rank 1; received[r] come from rank r.

    Rows are along the first axis. Any count may be 0, and all of them: the result is then empty, and has a
    gradient all the same. It is PyTorch's `all_to_all_single` with splits. The gradient goes the opposite
    way. Where a rank sends another number than its peer expects, all ranks get a CollectiveMismatch; NCCL
    compares nothing.

    Args:
        rows: those of the result, so that its size need not depend on the counts: what lies after the last
            that comes is 0. `x` may then have more rows than are sent, whose gradient is 0. None: as many as
            come.

    Raises:
        ValueError: for what are not counts of the rows of `x` for each rank.
    """
    x = tensor(x)
    return AllToAllRows.apply(x, communicator, *_counted(x, communicator, sent, received, rows))


class Exchange(Function):
    def forward(self, x: Array, communicator: Communicator, to: int | None, source: int | None) -> Array:
        self.saved = (communicator, source, to)
        y, stream = empty_like(x), device.current().current_stream
        if to is not None and source is not None and communicator.rank not in (to, source):
            communicator.exchange(bits(y), bits(x), to=to, source=source, stream=stream)
        elif communicator.rank == source:
            y[...] = x
        elif source is not None:
            communicator.recv(bits(y), peer=source, stream=stream)
        else:
            y[...] = 0
            if to is not None:
                communicator.send(bits(x), peer=to, stream=stream)
        return y

    def backward(self, dy: Array) -> tuple:
        return self.forward(dy, *self.saved), None, None, None


def exchange(x: "Tensor", communicator: Communicator, *, to: int | None, source: int | None) -> "Tensor":
    """Send `x` to rank `to`; the result is the tensor that rank `source` sent, or zeros where that is None.

    A send alone has no `source`, and a receive alone no `to`, but an `x` of the shape that comes, whose
    values do not matter. The gradient goes the other way round.

    Raises:
        ValueError: for a rank that is none, or where only one of the two is this rank itself.
    """
    for name, rank in (("to", to), ("source", source)):
        if rank is not None and not 0 <= rank < communicator.size:
            raise ValueError(f"exchange: {name} must be a rank, 0 to {communicator.size - 1}, got {rank}")
    if (to == communicator.rank) != (source == communicator.rank):
        raise ValueError(
            f"exchange: to and source must both be this rank or both be others, got {to} and {source}"
        )
    return Exchange.apply(tensor(x), communicator, to, source)


# On arrays, for ops that have a collective inside


def named(op: str, module: Any = None) -> str:
    """What traces and messages call a collective of an op: by the module given, or the one that runs now."""
    running = autograd.modules()
    module = running[-1] if module is None and running else module
    return op if module is None else f"{op} {module.name}".rstrip()


def summed(x: Array, communicator: Communicator, tag: str = "", beside: Stream | None = None) -> Array:
    """The sum of the ranks' arrays; `x` stays as it is. 16-bit types are summed in float32."""
    total = _copy(x, dtypes.exact(x.dtype))
    with filled(beside) as stream:
        communicator.all_reduce(flat(total), stream=stream, tag=tag)
    return total.astype(x.dtype, copy=False)


def gathered(x: Array, communicator: Communicator, axis: int = 0, tag: str = "") -> Array:
    """The ranks' arrays one after the other along `axis`."""
    parts = empty((communicator.size, *x.shape), x.dtype)
    parts[communicator.rank] = x
    communicator.all_gather(bits(parts), stream=device.current().current_stream, tag=tag)
    return _joined(parts, axis)


def sum_scattered(
    x: Array, communicator: Communicator, axis: int = 0, tag: str = "", beside: Stream | None = None
) -> Array:
    """This rank's slice along `axis` of the sum of the ranks' arrays. 16-bit types are summed in float32."""
    parts = _parts(x.astype(dtypes.exact(x.dtype), copy=False), communicator.size, axis)
    total = empty(parts.shape[1:], parts.dtype)
    with filled(beside) as stream:
        communicator.reduce_scatter(flat(total), flat(parts), stream=stream, tag=tag)
    return total.astype(x.dtype, copy=False)


def exchanged(x: Array, communicator: Communicator, axis: int = 0, tag: str = "") -> Array:
    """The ranks' slices along `axis` that are for this rank, in order of ranks."""
    parts = _parts(x, communicator.size, axis)
    received = empty_like(parts)
    stream = device.current().current_stream
    communicator.all_to_all(bits(received), bits(parts), stream=stream, tag=tag)
    return _joined(received, axis)


def exchanged_rows(
    x: Array,
    communicator: Communicator,
    sent: Sequence[int],
    received: Sequence[int],
    rows: int,
    tag: str = "",
) -> Array:
    """The ranks' rows for this one: sent[r] of this rank's go to rank r, received[r] come from there.

    Rows after the received ones are 0.

    Args:
        rows: the count of rows of the result.
    """
    width, used = prod(x.shape[1:]), sum(received)
    y = empty((rows, *x.shape[1:]), x.dtype)
    y[used:] = 0
    communicator.all_to_all(
        bits(y[:used]),
        bits(autograd.contiguous(x)[: sum(sent)]),
        received=[rows * width for rows in received],
        sent=[rows * width for rows in sent],
        stream=device.current().current_stream,
        tag=tag,
    )
    return y


def own_part(x: Array, communicator: Communicator, axis: int = 0) -> Array:
    """A copy of this rank's slice of an array that all ranks have."""
    count = x.shape[axis] // communicator.size
    own = slice(communicator.rank * count, (communicator.rank + 1) * count)
    return x[(*(slice(None),) * axis, own)].copy()


def _parts(x: Array, ranks: int, axis: int) -> Array:
    """(ranks, part of x): equal slices along `axis`, contiguous each; no copy along the first."""
    cut = x.reshape(*x.shape[:axis], ranks, x.shape[axis] // ranks, *x.shape[axis + 1 :])
    order = (axis, *range(axis), *range(axis + 1, cut.ndim))
    moved = cut.transpose(order)
    return moved if moved.flags.c_contiguous else _copy(moved, moved.dtype)


def _joined(parts: Array, axis: int) -> Array:
    """The inverse of `_parts`."""
    order = (*range(1, axis + 1), 0, *range(axis + 1, parts.ndim))
    shape = list(parts.shape[1:])
    shape[axis] *= parts.shape[0]
    moved = parts.transpose(order)
    return (moved if moved.flags.c_contiguous else _copy(moved, moved.dtype)).reshape(shape)


def _copy(x: Array, dtype: Any) -> Array:
    """Contiguous, and from the device's pool, so that plans of memory count it."""
    y = empty(x.shape, dtype)
    y[...] = x
    return y


def bits(x: Array) -> Array:
    """An array in one dimension as communicators carry it: 16-bit floating-point numbers as their bits."""
    return flat(x).view("uint16") if dtypes.low(x.dtype) else flat(x)


def _axis(op: str, x: Any, axis: int) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{op}: axis {axis} does not exist in x {x.shape}")
    return axis % x.ndim


def _divided(op: str, x: Any, communicator: Communicator, axis: int) -> int:
    axis = _axis(op, x, axis)
    if x.shape[axis] % communicator.size:
        raise ValueError(
            f"{op}: axis {axis} of x {x.shape} must be divisible by the {communicator.size} ranks"
        )
    return axis


def _counted(
    x: Any, communicator: Communicator, sent: Sequence[int], received: Sequence[int], rows: int | None
) -> tuple:
    """Counts of rows as tuples, and the rows of the result."""
    sent, received = (tuple(map(index, counts)) for counts in (sent, received))
    of_x, of_y = x.shape[0] if x.ndim else -1, sum(received) if rows is None else index(rows)
    for name, counts, total in (("sent", sent, of_x), ("received", received, of_y)):
        fits = sum(counts) == total or (rows is not None and sum(counts) < total)
        if len(counts) != communicator.size or min(counts) < 0 or not fits:
            raise ValueError(
                f"all_to_all_rows: {name} is {counts}: it must be a count for each of the "
                f"{communicator.size} ranks; those of sent add up to the rows of x {x.shape}"
            )
    return sent, received, of_y
