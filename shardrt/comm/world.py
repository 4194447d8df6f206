"""The world of this rank: its thread's in a run of threads, else its launcher's, else a world of one.

A launcher such as mpirun enters by `launcher` (mpi_world.py). MPI is imported only when a launcher started
this process or the user asks for MPI by name, so a plain `python script.py` needs none.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from shardrt.device import Device


@dataclass(frozen=True, eq=False)  # one object per run: what is cached for it need not compare its root
class World:
    """All ranks of this run. `root` is what communicators are made from: MPI's, or one over all ranks.

    `device` and `transport` are those of a simulated world: what its ranks compute on, whatever device is
    named, and what takes the place of NCCL between them, made of (host communicator, device); None where the
    host's communicators carry its arrays. shape: of meshes for which nobody says one; None: one axis.
    """

    kind: str  # "single", "thread", "mpi" or "simulated"
    rank: int
    size: int
    local_rank: int  # among the ranks on this node
    local_size: int
    root: Any = None
    device: Device | None = None
    transport: Callable[[Any, Device], Any] | None = None
    shape: tuple[int, ...] | None = None


class Launcher(NamedTuple):
    """What starts the ranks of a run as processes. By default nothing does: this process is the only rank."""

    # The world of the processes that were started together; None for an only rank. May be collective.
    world: Callable[[], World | None] = lambda: None
    # A block that ends the job if the ranks do not all come to it within so many seconds; 0: no limit.
    meeting: Callable[[float], AbstractContextManager[None]] = lambda seconds: nullcontext()


launcher = Launcher()  # of this process
_here = threading.local()


def current() -> World:
    """The world of this thread (inside thread.run) or of this process."""
    return getattr(_here, "world", None) or _of_process()


def alone() -> bool:
    """Whether no other rank runs: for what belongs to no mesh, whose ranks nobody can ask."""
    return current().size == 1


def first() -> bool:
    """Whether this rank is the first of all that run, which speaks for what belongs to no mesh."""
    return current().rank == 0


@contextmanager
def use(world: World) -> Iterator[None]:
    """Make `world` this thread's world inside a with block."""
    before = getattr(_here, "world", None)
    _here.world = world
    try:
        yield
    finally:
        _here.world = before


@cache
def _of_process() -> World:
    return launcher.world() or World("single", 0, 1, 0, 1)
