"""World: all ranks of the run. In a run of threads each thread has its world, else the process has one.

A launcher such as mpirun sets `launcher` (mpi_world.py); without one the world has one rank. MPI is imported
only if a launcher started this process or the user names MPI. A plain `python script.py` needs no MPI.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from shardrt.device import Device

__all__ = ["World", "alone", "current", "first", "launcher"]


@dataclass(frozen=True, eq=False)  # one object per run, compared by identity in caches
class World:
    """All ranks of this run.

    root: the source of all communicators: MPI's communicator, or one of ours over all ranks.
    device: where simulated ranks compute, whatever device the program names; None in a real world.
    transport: makes the replacement for NCCL from (host communicator, device) in a simulated world.
    shape: shape of meshes by default; None: one axis.
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
    """How the ranks of a run start as processes. By default this process is the only rank."""

    # Gives the world of the processes that started together; None for one rank. May be collective.
    world: Callable[[], World | None] = lambda: None
    # Gives a with block that ends the job if not all ranks enter it within so many seconds; 0: no limit.
    meeting: Callable[[float], AbstractContextManager[None]] = lambda seconds: nullcontext()


launcher = Launcher()  # of this process
_here = threading.local()


def current() -> World:
    """The world of this thread (inside thread.run) or of this process."""
    return getattr(_here, "world", None) or _of_process()


def alone() -> bool:
    """Whether this is the only rank. For code without a mesh."""
    return current().size == 1


def first() -> bool:
    """Whether this is rank 0 of the world. For code without a mesh, of which one rank reports."""
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
