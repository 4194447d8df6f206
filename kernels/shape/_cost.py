"""What a call of a kernel costs, and how the costs that are alike are made."""

from collections.abc import Iterable
from typing import Any, NamedTuple

Array = Any


class Cost(NamedTuple):
    """What one call does to memory, and how much of it.

    reads, writes: arguments, or views of them; what is changed or added to is in both. flops: operations,
    about; an exponential counts as ten. nbytes: that move to and from memory, with those of scratch.
    launches: how often the CUDA twin's host calls the driver, or a library. sizes: (m, n, k) of a product,
    and how many there are if several; else what decides how fast the kernel is. value: what the call gives
    back: None, a number, True or False, an argument, New or Answer. scratch: the bytes of nbytes that are
    those of memory of the kernel's own, written and read once each.
    """

    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    flops: int
    nbytes: int
    launches: int = 1
    sizes: tuple[int, ...] = ()
    value: Any = None
    scratch: int = 0


class New(NamedTuple):
    """A value that is an array which the kernel makes, and writes; it is in no `writes`."""

    shape: tuple[int, ...]
    dtype: type


class Answer(NamedTuple):
    """A value that the kernel computes and the host waits for: which it is, and what it usually is."""

    what: str
    usual: Any


def cost(
    reads: Iterable[Array | None],
    writes: Iterable[Array | None],
    flops: int,
    *,
    launches: int = 1,
    sizes: tuple[int, ...] = (),
    scratch: int = 0,
    value: Any = None,
) -> Cost:
    """Each array is read or written once; None is one that is not there.

    scratch: bytes of the kernel's own memory.
    """
    reads = tuple([x for x in reads if x is not None])
    writes = tuple([x for x in writes if x is not None])
    nbytes = 2 * scratch
    for x in reads:
        nbytes += x.nbytes
    for x in writes:
        nbytes += x.nbytes
    return Cost(reads, writes, flops, nbytes, launches, sizes, value, 2 * scratch)


def flat(reads: Iterable[Array | None], writes: tuple[Array, ...], each: int) -> Cost:
    """One launch over all elements of writes[0], with `each` operations for one."""
    count = writes[0].size
    return cost(reads, writes, each * count, launches=min(count, 1), sizes=(count,))


def by_rows(reads: tuple[Array, ...], writes: tuple[Array, ...], each: int) -> Cost:
    """One launch over the rows of reads[0], (rows, width), with `each` operations for an element."""
    rows, width = reads[0].shape
    return cost(reads, writes, each * rows * width, launches=min(rows, 1), sizes=(rows, width))


def real(x: Array) -> int:
    """Bytes of a number that sums over x are made in."""
    return max(4, x.dtype.itemsize)


def upto(count: int, each: int) -> int:
    """How many of `each` cover `count`."""
    return -(-count // each)
