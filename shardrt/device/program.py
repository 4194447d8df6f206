"""What one rank issued, in the order in which its host did: the recording that a simulated device makes.

Nothing here has a time. A clock prices a program on a machine, a checker proves its waits, both from the
same items. Addresses are those of a simulated device: nothing is ever stored there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

HOST = "host"  # the thread that issues; every other thread of a program is a stream


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes from address `start` up to `stop`."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Work:
    """A kernel or a copy in `stream`, issued by the host at this place of the program.

    name: of the kernel ("linear.forward", "copy", "numpy.add"). label: what it is for (a unit, as in traces).
    site: "file:line" outside of shardrt/device and kernels. launches: how often the host called the driver.
    nbytes: that move to and from memory, which may be less or more than the ranges' sizes.
    dtype: that its flops are in, which decides how fast they are; "" if nobody says.
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
    sizes: tuple[int, ...] = ()  # of a product: m, n, k; what else decides how fast it is
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """A call of the communicator `group` (Program.groups) in `stream`; its `number` there says which it is.

    nbytes: of the whole buffer on this rank. peer: the other rank, within the group, of a message ("send" or
    "recv"), else -1; messages are numbered by themselves, for each sender and receiver. A collective begins
    when all of the group have come to it; a message leaves when its sender has, and waits for its receiver.
    grouped: a message goes with the next one of its stream, at once, so that neither waits for the other.
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


@dataclass(frozen=True, slots=True)
class Record:
    """The point `mark` is here in `stream`. Every record has a mark of its own, whatever the `event`."""

    stream: str
    mark: int
    label: str = ""
    site: str = ""
    event: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """`stream` runs nothing of what follows before the point `mark` is reached."""

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
    """The host reads these bytes itself. why: which value it is, where it stands for one ("loss", "norm")."""

    reads: tuple[Range, ...]
    why: str = ""
    site: str = ""


@dataclass(frozen=True, slots=True)
class Take:
    """Memory is lent. place: "device" or "host". category: as in a memory plan.

    owner: the module, or unit, that it is for; "" where it is nobody's own, as slots that units have in turn.
    """

    memory: Range
    place: str
    category: str = ""
    label: str = ""
    site: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that was lent from address `start` is given back, and may be lent again at once.

    stream: whose work may be lent it next, in the order of that stream and without a wait: pools lend by
    stream. HOST: of memory that the host may be lent and write at once. "": nobody will be.
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
    """The ranks of a communicator, by their numbers in the world. role: what its mesh asked it for."""

    ranks: tuple[int, ...] | range
    role: str = ""


@dataclass
class Program:
    """All that rank `rank` of `world_size` issued. alike: the ranks that do the same, itself among them.

    by_host: streams whose work the host does itself, before it goes on: ops on a CPU.
    """

    rank: int = 0
    world_size: int = 1
    items: list[Item] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    alike: Sequence[int] = ()  # nobody says
    by_host: tuple[str, ...] = ()

    @property
    def streams(self) -> list[str]:
        """In the order of their first item."""
        return list(dict.fromkeys(item.stream for item in self.items if getattr(item, "stream", "")))
