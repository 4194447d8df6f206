"""Sets the thread counts of BLAS and Numba before anything that reads them is imported.

Two ranks on two cores whose BLAS starts two threads each run a training step 1.85 times slower, and the
libraries read their settings once, when they are loaded. So `shardrt/__init__.py` imports this file
before NumPy. Variables that the user has set stay.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["launcher", "local_size"]

_LOCAL_SIZE = (
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PALS_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
)
_MOST_HOSTS = 1 << 16


def threads_per_rank() -> int:
    """This rank's share of the cores that the launcher may use on this machine; at least 1.

    No more than this process may use itself: Open MPI and srun bind ranks to cores.
    """
    variable, ranks = _local_ranks()
    share = min(_cores_of_launcher(variable), _quota()) // ranks
    return max(1, min(share, _cores(0)))


def _local_ranks() -> tuple[str, int]:
    """(the variable that says so, how many ranks the launcher started on this machine); ("", 1) without."""
    for name in _LOCAL_SIZE:
        if ranks := local_size(os.environ.get(name, ""), os.environ.get("SLURM_NODEID", "0")):
            return name, ranks
    return "", 1


def local_size(message: str, node: str) -> int:
    """Ranks of this host: "4", or as Slurm says it of all hosts, "4(x2),3" for 4, 4 and 3; 0 if not said."""
    counts: list[int] = []
    for part in message.split(","):
        each, _, times = part.rstrip(")").partition("(x")
        if not each.isdigit() or not (times or "1").isdigit():
            return 0
        counts += [int(each)] * min(int(times or 1), _MOST_HOSTS)
    number = int(node) if node.isdigit() else 0
    return counts[number] if number < len(counts) else counts[0]


def launcher(variable: str) -> int:
    """The nearest ancestor without `variable`, which is set for ranks; a shell before it has it as well."""
    process = os.getppid()
    with suppress(OSError, ValueError):  # another user's, as slurmstepd is; it has just gone; or no /proc
        while f"\0{variable}=".encode() in b"\0" + Path(f"/proc/{process}/environ").read_bytes():
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process


def _cores_of_launcher(variable: str) -> int:
    try:
        return _cores(launcher(variable) if variable else 0)
    except OSError:  # the system does not say
        return _cores(0)


def _cores(process: int) -> int:
    """Cores in the affinity of a process (0: this one)."""
    return len(os.sched_getaffinity(process)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quota() -> int:
    """Whole cores whose time the container has, at least 1; a great number without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, round(int(limit) / int(period)))
    except (OSError, ValueError):  # no cgroups of version 2, or "max"
        return 1 << 30


def prepare() -> None:
    """Set the variables that are not set yet; called once, on the import of shardrt."""
    threads = str(threads_per_rank())
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(name, threads)
    if "numpy" in sys.modules:  # too late for the variables; the count, at least, can still be changed
        from threadpoolctl import threadpool_limits

        threadpool_limits(int(os.environ["OPENBLAS_NUM_THREADS"]), user_api="blas")


prepare()
