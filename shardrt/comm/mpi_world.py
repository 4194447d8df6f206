"""Reads what a launcher (mpirun, mpiexec, srun) says about this process, and makes the world of MPI's ranks.

Only `of_mpi` loads MPI, and only `of_mpi` communicates, once. shardrt/_backends.py registers `LAUNCHER`.
"""

import os
import resource
import shutil
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from glob import glob
from typing import Any

from shardrt._environment import local_size as _ranks_of_host
from shardrt.comm import supervision
from shardrt.comm.world import Launcher, World

__all__ = ["LAUNCHER", "Launch", "NoRoom", "launch", "of_mpi"]


@dataclass(frozen=True)
class Launch:
    """What a launcher's environment says about this process.

    Attributes:
        variable: name of the variable with `size`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    variable: str


# Launchers that MPI starts under: the variables for rank, size, local rank and local size.
_LAUNCHERS = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),  # srun
)

_SHM = "/dev/shm"
_MPICH_BYTES = 1_100_000  # of shared memory per rank of a host, measured
_UCX_BYTES, _UCX_BYTES_EACH = 30 << 20, 7 << 20  # more for UCX: per host, per rank
_FILES = 56  # open files of a rank that trains a small model on 2 ranks, measured


def launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """What the launcher of this process says; None without a launcher. Does not load MPI."""
    for rank, size, local_rank, local_size in _LAUNCHERS:
        if rank in environment and size in environment:
            ranks = int(environment[size])
            if local_rank not in environment:  # srun --mpi=pmi2 sets only Slurm's variables
                local_rank, local_size = _LAUNCHERS[-1][2:]
            return Launch(
                int(environment[rank]),
                ranks,
                int(environment.get(local_rank, 0)),
                _ranks_of_host(environment.get(local_size, ""), environment.get("SLURM_NODEID", "0"))
                or ranks,
                size,
            )
    return None


def of_launcher() -> World | None:
    """The world that a launcher started; None for one rank.

    The first call is collective.

    Raises:
        RuntimeError: if WORLD_SIZE is more than 1, but no launcher started this process.
    """
    launched = launch()
    if launched is not None:
        supervision.supervisor.launched(launched.rank, launched.variable)
        return of_mpi() if launched.size > 1 else None
    asked = os.environ.get("WORLD_SIZE", "1")
    if asked.isdigit() and int(asked) > 1:
        raise RuntimeError(
            f"WORLD_SIZE={asked} says {asked} ranks, but this process was not started by mpirun: "
            f"launch with `mpirun -n {asked} python ...`, or unset WORLD_SIZE for one rank"
        )
    return None


def meeting(seconds: float) -> AbstractContextManager[None]:
    """A with block that ends the job with exit code 124 if not all launched ranks enter it in time."""
    launched = launch()
    if launched is None:
        return nullcontext()
    missing = (
        f"hang: rank {launched.rank} of {launched.size} has waited {seconds:g} s for all ranks to come "
        f"to init_device_mesh; those that have not still import, are stopped, or gone"
    )
    return supervision.supervisor.within(seconds, missing)


LAUNCHER = Launcher(of_launcher, meeting)


@cache
def of_mpi() -> World:
    """The world of MPI.COMM_WORLD. Collective over all ranks at its first call."""
    launched = launch()
    if launched is not None:
        supervision.supervisor.launched(launched.rank, launched.variable)
        _check_room(launched)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError where no MPI library is found
        raise RuntimeError(
            f"MPI cannot be loaded ({error}): `pip install mpi4py mpich` in this environment"
        ) from error
    if launched is not None and launched.size != MPI.COMM_WORLD.size:
        raise RuntimeError(
            f"{launched.variable}={launched.size}, but MPI here sees {MPI.COMM_WORLD.size} rank(s): the "
            f"launcher belongs to another MPI than the one mpi4py loaded ({_library(MPI)}); "
            f"use the mpirun next to this python, or srun with --mpi=pmi2 for MPICH, --mpi=pmix for Open MPI"
        )
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            f"MPI was started without THREAD_MULTIPLE, which streams need ({_library(MPI)}): "
            f"leave mpi4py.rc.thread_level at its default, or use an MPI built with thread support"
        )
    from shardrt.comm.contexts import Droppable

    root = Droppable(MPI.COMM_WORLD.Dup())
    node = root.Split_type(MPI.COMM_TYPE_SHARED, key=root.rank)
    supervision.supervisor.met(MPI.COMM_WORLD, node)
    return World("mpi", root.rank, root.size, node.rank, node.size, root)


class NoRoom(RuntimeError):
    """MPI's shared memory does not fit into /dev/shm of this host, or too few open files are allowed."""


def _check_room(launched: Launch) -> None:
    """Raise NoRoom if /dev/shm is too small or too few open files are allowed.

    A write to a segment without room would end MPICH by SIGBUS. If only the segments of UCX, below MPICH, do
    not fit, turn them off: UCX crashes if some of them fit and others do not.
    """
    if launched.size == 1:
        return
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FILES:
        raise NoRoom(
            f"{files} open files are allowed on host {socket.gethostname()}, and a rank needs {_FILES} at "
            f"least: allow more (`ulimit -n 1024`)"
        )
    if not os.path.isdir(_SHM):
        return
    room, needed = shutil.disk_usage(_SHM).free + _taken(), _MPICH_BYTES * launched.local_size
    if room < _UCX_BYTES + _UCX_BYTES_EACH * launched.local_size:
        os.environ.setdefault("UCX_TLS", "^posix")
    if room < needed:
        raise NoRoom(
            f"{_SHM} has {room >> 10} KiB free, and MPI needs {needed >> 10} KiB for {launched.local_size} "
            f"ranks of host {socket.gethostname()}, of which rank {launched.rank} is one: make it larger "
            f"(`docker run --shm-size 1g`), or start fewer ranks"
        )


def _taken() -> int:
    """Bytes of the segments that ranks of this host have made so far."""
    taken = 0
    for path in glob(f"{_SHM}/mpich_shm_*"):
        with suppress(OSError):  # it has just gone
            taken += os.stat(path).st_blocks * 512
    return taken


def _library(mpi: Any) -> str:
    return mpi.Get_library_version().splitlines()[0].strip(" \0")
