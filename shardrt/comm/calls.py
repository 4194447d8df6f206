"""Encodes a rank's call as a few integers. Ranks exchange them at the cost of a barrier, to compare calls.

Two ranks are in the same call if all words agree. One word is a hash of the call's tag; `Names` finds the tag
again for messages. Nothing here communicates: flags.py, mpi.py and thread.py exchange the words.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import Struct

import numpy as np

from shardrt import dtypes
from shardrt.comm import supervision
from shardrt.comm.checks import OPS
from shardrt.comm.errors import CollectiveMismatch, PeerFailed

Call = tuple[int, int, int, int, int]  # collective and element type, count, op or root, memory, tag
WORDS = 5
PACKED = 8 * WORDS  # bytes of a packed call
HEAD = 64  # bytes from a packed call to its data, so that data begin on a cache line

_PACKED = Struct(f"={WORDS}q")
_MESSAGE = Struct("=qq112s")  # count, element type, tag
MESSAGE = _MESSAGE.size  # bytes of the header of a message
_COLLECTIVES = ("barrier", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "split")
_ELEMENTS = (*dtypes.CARRIED, *dtypes.LOW)
_COLLECTIVE_CODES = {name: code << 8 for code, name in enumerate(_COLLECTIVES)}
_KIND_CODES = {kind: _ELEMENTS.index(kind) for kind in dtypes.LOW}
_OP_CODES = {op: code for code, op in enumerate(OPS)}
_SHOWN = 6  # ranks, or different calls, that a message lists one by one


class Names:
    """Tags of calls, and a hash of 63 bits for each, equal in every process."""

    def __init__(self) -> None:
        self._codes = {"": 0}
        self._names = {0: ""}

    def register(self, names: Iterable[str]) -> None:
        """Add names, so that a message can print them if a peer's call has one."""
        for name in names:
            self.code(name)

    def code(self, name: str) -> int:
        """The hash of a name. Adds the name."""
        code = self._codes.get(name)
        if code is None:
            code = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
            self._codes[name], self._names[code] = code, name
        return code

    def text(self, code: int) -> str:
        """The name for this code, as a message prints it."""
        return f"unit {self._names[code]}" if code in self._names else "another unit"


def encode(
    names: Names,
    collective: str,
    array: np.ndarray | None = None,
    detail: int | str = 0,
    tag: str = "",
    kind: str = "",
    memory: int = 0,
) -> Call:
    """A call as words.

    Ranks exchange such counts separately (counts.py), and `array` is empty.

    Args:
        detail: an op, a root, or whether an all_to_all has counts per peer.
        kind: the 16-bit type in a uint16 array that ranks sum.
        memory: place of an array in shared memory (segments.SharedOffset.word).
    """
    first, name = _COLLECTIVE_CODES[collective], names.code(tag)
    if array is None:
        return first, 0, 0, 0, name
    element = _KIND_CODES[kind] if kind else dtypes.CODES[array.dtype]
    word = _OP_CODES[detail] if isinstance(detail, str) else detail
    return first | element, array.size, word, memory, name


def pack(names: Names, collective: str, array: np.ndarray | None = None, *facts: int | str) -> bytes:
    """`encode`, as bytes."""
    return _PACKED.pack(*encode(names, collective, array, *facts))


def unpack(packed: bytes) -> Call:
    """The words of a packed call."""
    return _PACKED.unpack(packed)


def describe(call: Call, names: Names, memory: bool = False) -> str:
    """A call as its caller would write it: all_gather(1024 of float32, unit blocks.3)."""
    collective = _COLLECTIVES[call[0] >> 8]
    facts = []
    if collective == "all_to_all" and call[2]:
        facts.append(f"counts per peer of {_ELEMENTS[call[0] & 255]}")
    elif collective not in ("barrier", "split"):
        facts.append(f"{call[1]} of {_ELEMENTS[call[0] & 255]}")
    if collective in ("reduce_scatter", "all_reduce"):
        facts.append(OPS[call[2]])
    elif collective == "broadcast":
        facts.append(f"root {call[2]}")
    if memory:
        facts.append(f"memory {call[3]:#x}")
    if call[4]:
        facts.append(names.text(call[4]))
    return f"{collective}({', '.join(facts)})"


def mismatch(
    number: int, calls: Sequence[Call], names: Names, own: int = 0, world: Sequence[int] = ()
) -> CollectiveMismatch:
    """The error for ranks whose `calls` differ.

    It lists every rank's call, with the same text on every rank.

    Args:
        own: the rank that raises it.
        world: world ranks of the group, to name their hosts.
    """
    callers: dict[Call, list[int]] = {}
    for rank, call in enumerate(calls):
        callers.setdefault(call, []).append(rank)
    alike = len({call[:3] + call[4:] for call in callers}) < len(callers)  # differ only in memory
    said = []
    for call, ranks in callers.items():
        where = supervision.supervisor.at([world[rank] for rank in ranks]) if world else ""
        said.append(f"{_ranks(ranks)} called {describe(call, names, alike)}{where}")
    more = [f"and {len(said) - _SHOWN} other calls"] if len(said) > _SHOWN else []
    return CollectiveMismatch(
        f"ranks differ in collective {number} of this communicator: {', '.join(said[:_SHOWN] + more)}",
        is_leader=own == 0,
    )


def pack_message(array: np.ndarray, tag: str) -> bytes:
    """The header of a message between two ranks."""
    return _MESSAGE.pack(array.size, dtypes.CODES[array.dtype], tag.encode()[-112:])


def array_of(packed: bytes) -> np.ndarray:
    """An empty array of the size and dtype in a header."""
    count, code, _ = _MESSAGE.unpack(packed)
    return np.empty(count, dtypes.CARRIED[code])


def unlike(sent: bytes, expected: bytes, source: int, rank: int) -> CollectiveMismatch:
    """The error of `rank` for an unexpected message from rank `source`.

    Args:
        sent, expected: headers.
    """
    return CollectiveMismatch(
        f"rank {source} sent {_message(sent)}; rank {rank} receives {_message(expected)}"
    )


def _message(packed: bytes) -> str:
    count, code, tag = _MESSAGE.unpack(packed)
    name = tag.rstrip(b"\0").decode(errors="replace")
    return f"{name}, {count} of {dtypes.CARRIED[code]}".removeprefix(", ")


def abandoned(rank: int) -> PeerFailed:
    """The error of a wait for a message after rank `rank` has closed its links."""
    return PeerFailed(f"rank {rank} receives no more messages: its links were closed")


def left(gone: int, rank: int, collective: str) -> PeerFailed:
    """The error of `rank`, which waits in `collective` for rank `gone` whose program has ended."""
    return PeerFailed(
        f"rank {gone} has ended, but rank {rank} waits for it in {collective}: all ranks must make "
        "the same collective calls, such as the forward of a sharded model or a save"
    )


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:_SHOWN]))}{more}"
