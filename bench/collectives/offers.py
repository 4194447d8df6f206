"""The library support by collective and type: shardrt's communicators, MPI, NCCL. Calls none of them."""

from collections.abc import Callable

from shardrt.comm.backends import CARRIERS
from shardrt.dtypes import LOW

from .ops import Case

# A type that no communicator of ours names travels as the bits of another. Sums and products of whole numbers
# have the same bits with and without a sign; the largest and the least have not.
OUR_CARRIERS = {"int8": "uint8", "uint32": "int32", "uint64": "int64"} | dict.fromkeys(LOW, "uint16")
RAW_CARRIERS = dict.fromkeys(LOW, "uint16")


def ours(case: Case) -> bool:
    """There is no reduce, reduce_scatter sums only, and 16-bit floats are added by reduce_scatter alone."""
    name, reduction = case.op.name, case.reduction
    if not case.op.reduces:
        return name != "sendrecv" or case.ranks > 1
    if name == "reduce" or (name == "reduce_scatter" and reduction not in ("sum", "avg")):
        return False
    if case.dtype in LOW:  # the float32 sums don't fit where the bits were
        return name == "reduce_scatter" and case.place == "out"
    if reduction == "avg":
        return case.dtype.startswith("float")
    return reduction in ("sum", "prod") or case.dtype not in OUR_CARRIERS


def raw(case: Case) -> bool:
    """MPI has no mean and adds no 16-bit floats; NCCL would sum those into themselves, not into float32."""
    return not case.op.reduces or (case.reduction != "avg" and case.dtype not in LOW)


def raw_nccl(case: Case) -> bool:
    """Not what this program does not build from its sends and receives."""
    return raw(case) and case.op.name != "all_to_all"


def raw_of(kind: str, under_mpi: bool) -> Callable[[Case], bool] | None:
    """What the raw library beside a communicator of this kind offers; None where there is none."""
    if kind in CARRIERS:
        return raw_nccl if kind == "nccl" else None
    return raw if under_mpi else None
