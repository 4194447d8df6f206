"""Reports an error in the user's input as one line on stderr and an exit code, once for all ranks.

This is for input that is checked before training, and for losses that are not finite. Any other error inside
the loop keeps its traceback.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from shardrt.comm import mpi_world
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.objects import all_gather_object
from shardrt.faults import launcher
from shardrt.faults.failure import refusal
from shardrt.untrusted import say

__all__ = [
    "DATA",
    "DIFFERS",
    "NONFINITE",
    "USAGE",
    "describe_error",
    "launched_rank",
    "one_line",
    "plain_warnings",
]

USAGE = 2  # a setting or the command line
DATA = 65  # a data file, or a checkpoint; EX_DATAERR of sysexits.h
DIFFERS = 78  # ranks have other settings, code or data than each other; EX_CONFIG
_LONGEST = 4000  # characters of a message, which may quote a file
NONFINITE = 80  # the loss, its gradients or the weights are nan or infinite
COPIES = 82  # ranks that hold copies of a shard differ


@contextmanager
def one_line(
    code: int, mesh: DeviceMesh | None = None, kinds: tuple = (ValueError, OSError)
) -> Iterator[None]:
    """A block in which an exception of `kinds` ends the run with its message and exit code `code`.

    An exception with an `exit_code` ends the process with that code.

    Without a mesh (MPI has not started), every rank is taken to fail alike, and rank 0 speaks. With one, the
    block is collective: all ranks learn at its end whether one failed, the lowest of those speaks, all exit.
    So nothing that can fail on one rank alone may come before a collective inside the block.
    SHARDRT_DEBUG also shows the traceback.
    """
    failure = None
    try:
        yield
    except kinds as error:
        failure = error
    refused = None if failure is None else refusal(failure)
    failure = refused or failure
    speaker, code = _speaker(0 if failure is None else getattr(failure, "exit_code", code), mesh)
    if not code:
        return
    rank = launched_rank() if mesh is None else mesh.rank
    no_room = isinstance(failure, mpi_world.NoRoom)  # on this host, and maybe on no other
    if rank == speaker or (no_room and mpi_world.launch().local_rank == 0):
        if os.environ.get("SHARDRT_DEBUG"):
            traceback.print_exception(failure)
        say(f"error: {' '.join(describe_error(failure).split())}", file=sys.stderr)
        if no_room:
            launcher.end_job(code)
    sys.exit(code)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """A block in which Python shows each warning as one line, without the place in the source."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"warning: {' '.join(str(message).split())}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def launched_rank() -> int:
    """This process's rank by the launcher's environment, without MPI; 0 where there is no launcher."""
    launch = mpi_world.launch()
    return launch.rank if launch is not None else 0


def _speaker(code: int, mesh: DeviceMesh | None) -> tuple[int, int]:
    """The lowest rank that failed, and its code; 0 if none did."""
    if mesh is None or mesh.size == 1:
        return 0, code
    codes = all_gather_object(mesh.communicator("control"), code)
    return next(((rank, code) for rank, code in enumerate(codes) if code), (0, 0))


def describe_error(error: BaseException | None) -> str:
    """An error in the words for one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = str(error)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
