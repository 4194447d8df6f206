"""Program: all work that one rank's host issued, in order. A simulated device records it.

Items have no times. A clock computes the times of a program on a machine; a checker proves its waits. Both
read the same items. Addresses belong to a simulated device: no data is stored there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = [
    "Collective",
    "Free",
    "Group",
    "HOST",
    "HostRead",
    "HostWait",
    "Item",
    "Program",
    "Range",
    "Record",
    "Step",
    "Take",
    "Wait",
    "Work",
]

HOST = "host"  # the thread that issues work; every other thread of a program is a stream


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes from address `start` up to `stop`."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel or a copy in `stream`, issued by the host at this place of the program.

    Attributes:
        name: the kernel ("linear.forward", "copy", "numpy.add").
        label: the unit, as in traces.
        site: "file:line" outside of shardrt/device and kernels.
        launches: number of driver calls of the host.
        nbytes: bytes moved to and from memory; may be less or more than the sizes of the ranges.
        dtype: dtype of its flops, for their speed; "" if unknown.
    """

    stream: str
    name: str
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    flops: int = 0
    nbytes: int = 0
    launches: int = 1
    label: str = ""
    site: str = ""
    sizes: tuple[int, ...] = ()  # for the speed; of a matmul: m, n, k
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """Call number `number` of the communicator `group` (Program.groups), in `stream`.

    Messages have separate numbers for each sender and receiver. A collective begins when all ranks of the
    group have come to it. A message leaves when its sender has come to it, and waits for its receiver.

    Attributes:
        nbytes: bytes of the whole buffer on this rank.
        peer: rank in the group at the other end of a message ("send" or "recv"), else -1.
        grouped: a message runs with the next message of its stream, at the same time.
        dtype: of the elements; "uint16" for 16-bit floats that are only moved, "" for bytes of the host and
            for a barrier.
        root: rank in the group that a broadcast begins with, else -1.
        parts: bytes to and from each rank of an all-to-all with counts that differ; (): equal parts.
        op: of a reduction ("sum").
        tag: the unit or array that the call is for, the same on all ranks; "" if none is known.
        waits: a send ends only when its receiver takes it: NCCL's, and direct ones.
    """

    stream: str
    call: str
    group: str
    number: int
    nbytes: int
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    peer: int = -1
    launches: int = 1
    label: str = ""
    site: str = ""
    grouped: bool = False
    dtype: str = ""
    root: int = -1
    parts: tuple[tuple[int, int], ...] = ()
    op: str = ""
    tag: str = ""
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """The point `mark` of `stream`. Every record has a unique mark, also records of the same `event`."""

    stream: str
    mark: int
    label: str = ""
    site: str = ""
    event: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """`stream` runs no later work before the point `mark` is reached."""

    stream: str
    mark: int
    site: str = ""


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host goes on when the point `mark` is reached."""

    mark: int
    site: str = ""


@dataclass(frozen=True, slots=True)
class HostRead:
    """The host reads these bytes itself.

    Attributes:
        why: the name of the value ("loss", "norm"), if known.
    """

    reads: tuple[Range, ...]
    why: str = ""
    site: str = ""


@dataclass(frozen=True, slots=True)
class Take:
    """Memory is allocated.

    Attributes:
        place: "device" or "host".
        category: as in a memory plan.
        owner: the module or unit that uses it; "" if units share it, such as slots.
    """

    memory: Range
    place: str
    category: str = ""
    label: str = ""
    site: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Free:
    """Memory at address `start` is freed, and may be allocated again at once.

    Attributes:
        stream: pools allocate by stream: work of this stream may get the memory next, without a wait. HOST:
            the host may get it and write at once. "": the memory is not used again.
    """

    start: int
    site: str = ""
    stream: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step has ended; steps count from 0."""

    number: int


Item = Work | Collective | Record | Wait | HostWait | HostRead | Take | Free | Step


@dataclass(frozen=True)
class Group:
    """The world ranks of a communicator, and its role in its mesh."""

    ranks: tuple[int, ...] | range
    role: str = ""


@dataclass
class Program:
    """All work that rank `rank` of `world_size` issued.

    Attributes:
        alike: the ranks that issue the same, itself too.
        by_host: streams whose work the host does itself before it goes on: ops on a CPU.
        exact: counts of rows, on which shapes depend, are the exchanged ones; else the planned ones.
    """

    rank: int = 0
    world_size: int = 1
    items: list[Item] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    alike: Sequence[int] = ()  # (): unknown
    by_host: tuple[str, ...] = ()
    exact: bool = False

    @property
    def streams(self) -> list[str]:
        """All streams, in the order of their first item."""
        return list(dict.fromkeys(item.stream for item in self.items if getattr(item, "stream", "")))

    def thread_of(self, item: Item) -> str:
        """The stream that an item is in, or HOST."""
        stream = getattr(item, "stream", HOST)
        return HOST if stream in self.by_host else stream
