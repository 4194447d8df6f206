"""The process that started this rank and would end it: mpirun's helper on this host (hydra_pmi_proxy, prted).

Read from /proc alone, so that a look costs microseconds and needs no MPI.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardrt._environment import launcher

__all__ = ["end_job"]

_FORWARDING = 0.1  # seconds in which MPICH's helper forwards output


class Launcher(NamedTuple):
    """A process and its start time, since the system reuses process ids."""

    pid: int
    started: str

    def trouble(self) -> str:
        """The state "gone" or "stopped", or "" while it can look after its ranks."""
        state, _, started = _stat(self.pid)
        if state in "ZX" or started != self.started:  # "" is in it
            return "gone"
        return "stopped" if state in "Tt" else ""


def find(variable: str) -> Launcher | None:
    """The launcher of this process, which sets `variable` for its ranks; None without /proc."""
    pid = launcher(variable)
    started = _stat(pid)[2]
    return Launcher(pid, started) if started else None


def end_job(code: int) -> None:
    """Make MPICH end all ranks, from a rank on which MPI has not started and never will.

    The message to its helper is in PMI 1: otherwise started ranks would wait for this rank. Open MPI's
    mpirun ends a job by itself when a rank ends with a code other than 0. So does srun with
    --kill-on-bad-exit=1; without that option, the watchdog of the other ranks ends the job.
    """
    if "PMI_FD" in os.environ and "MPI_LOCALNRANKS" in os.environ:  # only MPICH sets both
        time.sleep(_FORWARDING)
        with suppress(OSError, ValueError):
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())


def _stat(pid: int) -> tuple[str, str, str]:
    """State, parent and start time of a process; empty strings if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", "", ""
    return fields[0], fields[1], fields[19]
