"""Checks of the arguments of collectives. Each error names the call, the argument and its value."""

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from shardrt import dtypes

OPS = ("sum", "max", "min", "prod")
_FLOATS = frozenset((np.dtype(np.float32), np.dtype(np.float64)))
_BITS, _FLOAT32 = np.dtype(np.uint16), np.dtype(np.float32)


def check_call(call: str, stream: Any, tag: str = "") -> None:
    if not hasattr(stream, "submit"):
        raise TypeError(f"{call}: stream must be a stream of the device, got {stream!r}")
    if not isinstance(tag, str):
        raise TypeError(f"{call}: tag must be a string, got {tag!r}")


def check_array(call: str, name: str, array: Any) -> None:
    try:
        flat = array.ndim == 1 and array.flags.c_contiguous
        known = array.dtype in dtypes.CODES
    except AttributeError:
        raise TypeError(f"{call}: {name} must be an array, got {type(array).__name__}") from None
    if not flat:
        raise ValueError(
            f"{call}: {name} must be 1-D and contiguous, got shape {array.shape}, strides {array.strides}"
        )
    if not known:
        raise TypeError(f"{call}: {name} has dtype {array.dtype}; supported: {', '.join(dtypes.CARRIED)}")


def plain(output: Any, buffer: Any, parts: int, part: int | None) -> bool:
    """Whether `output` and `buffer` are host arrays of floats that pass all checks, the usual case.

    `buffer` must have `parts` times the elements of `output`; `output` may be part number `part` of it. This
    costs half as much as the single checks.
    """
    if type(output) is not np.ndarray or type(buffer) is not np.ndarray:
        return False
    dtype, size = output.dtype, output.size
    return (
        dtype in _FLOATS
        and dtype is buffer.dtype
        and output.ndim == 1
        and output.flags.c_contiguous
        and buffer.ndim == 1
        and buffer.flags.c_contiguous
        and buffer.size == size * parts
        and (
            not np.may_share_memory(output, buffer)
            or (part is not None and _begins_at(output, buffer, part * size))
        )
    )


def check_divisible(call: str, name: str, array: Any, size: int) -> None:
    if array.size % size:
        raise ValueError(f"{call}: {name} has {array.size} elements, not a multiple of the {size} ranks")


def check_same(call: str, output: Any, buffer: Any) -> None:
    if output.dtype != buffer.dtype:
        raise TypeError(f"{call}: output is {output.dtype}, buffer is {buffer.dtype}; they must be the same")


def check_bits(call: str, output: Any, buffer: Any, kind: str) -> None:
    if kind not in dtypes.LOW:
        raise ValueError(f"{call}: kind is {kind!r}; known are {', '.join(dtypes.LOW)}")
    if buffer.dtype != _BITS:
        raise TypeError(f"{call}: buffer must be uint16 with kind={kind!r}, got {buffer.dtype}")
    if output.dtype != _FLOAT32:
        raise TypeError(f"{call}: output must be float32 with kind={kind!r}, got {output.dtype}")


def check_count(call: str, output: Any, buffer: Any, count: int) -> None:
    if buffer.size != count:
        raise ValueError(
            f"{call}: output has {output.size} elements, so buffer needs {count}; it has {buffer.size}"
        )


def check_counts(
    call: str, output: Any, buffer: Any, received: Sequence[int], sent: Sequence[int], group: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The counts per peer as ints. Raises ValueError if they do not add up to the sizes of the arrays."""
    if received is None or sent is None:
        raise ValueError(f"{call}: pass both received and sent, or neither for equal parts")
    given = []
    for name, counts, of, array in (
        ("received", received, "output", output),
        ("sent", sent, "buffer", buffer),
    ):
        counts = tuple(map(index, counts))
        if len(counts) != group.size or min(counts) < 0 or sum(counts) != array.size:
            raise ValueError(
                f"{call}: {name} is {_shown(counts)}: it must be a count for each of the {group.size} ranks, "
                f"which add up to the {array.size} elements of {of}"
            )
        given.append(counts)
    received, sent = given
    if received[group.rank] != sent[group.rank]:
        raise ValueError(
            f"{call}: rank {group.rank} sends {sent[group.rank]} elements to itself, and receives "
            f"{received[group.rank]} of them"
        )
    return received, sent


def _shown(counts: tuple[int, ...]) -> str:
    return str(counts) if len(counts) <= 16 else f"{str(counts[:16])[:-1]}, ...)"


def check_sums(call: str, buffer: Any, op: str, scale: float) -> None:
    if op not in OPS:
        raise ValueError(f"{call}: op is {op!r}; known are {', '.join(OPS)}")
    if buffer.dtype == _BITS:
        raise TypeError(
            f"{call}: uint16 holds 16-bit floats, which can't be added; reduce in float32, or use "
            f"reduce_scatter with kind='bfloat16' or 'float16'"
        )
    if scale != 1.0 and buffer.dtype.kind != "f":
        raise TypeError(f"{call}: scale is {scale}, but {buffer.dtype} can only be summed with scale 1")


def check_overlap(call: str, output: Any, buffer: Any, allowed: int | None) -> None:
    """Raise ValueError if the arrays overlap, unless `output` begins at element `allowed` of `buffer`."""
    if not _apart(output, buffer, allowed):
        own = " other than as this rank's own slice" if allowed is not None else ""
        raise ValueError(f"{call}: output overlaps buffer{own}; give it memory of its own")


def _apart(output: Any, buffer: Any, allowed: int | None) -> bool:
    """Whether two arrays do not overlap, or the first begins at element `allowed` of the second."""
    if isinstance(output, np.ndarray):  # faster than to ask NumPy for addresses
        if not np.may_share_memory(output, buffer):
            return True
        return allowed is not None and _begins_at(output, buffer, allowed)
    start = address(output) - address(buffer)
    apart = start >= buffer.nbytes or start <= -output.nbytes
    return apart or (allowed is not None and start == allowed * buffer.itemsize)


def _begins_at(output: np.ndarray, buffer: np.ndarray, element: int) -> bool:
    return np.may_share_memory(output[:1], buffer[element : element + 1])


def address(array: Any) -> int:
    """The address of an array."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return interface["data"][0]


def check_rank(call: str, name: str, rank: int, size: int, own: int | None = None) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"{call}: {name} must be a rank of the group, 0 to {size - 1}, got {rank}")
    if rank == own:
        raise ValueError(f"{call}: {name} must be another rank than this one, got {rank}")
