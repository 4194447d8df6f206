"""The library support by collective and type: shardrt's communicators, MPI, NCCL. Calls none of them.

A reason why not is for a reader; "" is yes.
"""

from collections.abc import Callable

from shardrt.comm.backends import CARRIERS
from shardrt.dtypes import LOW

from ..harness.values import FLOAT8, NARROW
from .ops import Case

# A type that no communicator of ours names travels as the bits of another. Sums and products of whole numbers
# have the same bits with and without a sign; the largest and the least have not.
OUR_CARRIERS = {"int8": "uint8", "uint32": "int32", "uint64": "int64"}
OUR_CARRIERS |= dict.fromkeys(LOW, "uint16") | dict.fromkeys(FLOAT8, "uint8")
RAW_CARRIERS = dict.fromkeys(LOW, "uint16") | dict.fromkeys(FLOAT8, "uint8")
Why = Callable[[Case], str]


def why_not_ours(case: Case, on_gpu: bool = False) -> str:
    """What a communicator of ours, on arrays of the host or of a GPU, does not do."""
    name, reduction = case.op.name, case.reduction
    if name in ("sendrecv", "hypercube") and case.ranks == 1:
        return "one rank has no peer"
    if name == "hypercube" and case.ranks & (case.ranks - 1):
        return f"{case.ranks} ranks are no power of two"
    if not case.op.reduces:
        return ""
    if name == "reduce":
        return "shardrt has no reduce"
    if case.dtype in NARROW:
        if on_gpu and not widened(case):
            return "on a GPU shardrt only sums 16-bit types, in reduce_scatter out of place"
        return ""
    if reduction == "avg" and not case.dtype.startswith("float"):
        return "shardrt has no mean of integers"
    if name == "reduce_scatter" and reduction in ("prod", "min", "max"):
        return "shardrt's reduce_scatter sums"
    if reduction in ("min", "max") and case.dtype in OUR_CARRIERS:
        return f"a communicator carries {case.dtype} as {OUR_CARRIERS[case.dtype]}, which orders otherwise"
    return ""


def widened(case: Case) -> bool:
    """Whether it is FSDP's own sum of 16-bit types, which comes out as float32."""
    sums = case.op.name == "reduce_scatter" and case.reduction in ("sum", "avg") and case.place == "out"
    return sums and case.dtype in LOW


def why_not_mpi(case: Case) -> str:
    """MPI has no mean and no floats of 16 and 8 bits."""
    if case.op.name == "hypercube" and case.ranks & (case.ranks - 1):
        return f"{case.ranks} ranks are no power of two"
    if not case.op.reduces:
        return ""
    if case.dtype in NARROW:
        return f"MPI has no type {case.dtype} to reduce"
    return "MPI has no mean" if case.reduction == "avg" else ""


def why_not_nccl(case: Case) -> str:
    """All but what CuPy does not hand on."""
    if case.op.name == "hypercube" and case.ranks & (case.ranks - 1):
        return f"{case.ranks} ranks are no power of two"
    return "cupy.cuda.nccl has no ncclRedOpCreatePreMulSum" if case.reduction == "mulsum" else ""


def raw_of(kind: str, under_mpi: bool) -> Why | None:
    """Why the raw library next to a communicator of this kind does not offer a case; None: there is none."""
    if kind in CARRIERS:
        return why_not_nccl if kind == "nccl" else None
    return why_not_mpi if under_mpi else None
