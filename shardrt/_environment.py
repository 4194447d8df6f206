"""Sets the thread counts of BLAS and Numba before anything that reads them is imported.

Two ranks on two cores whose BLAS starts two threads each run a training step 1.85 times slower, and the
libraries read their settings once, when they are loaded. So `shardrt/__init__.py` imports this file
before NumPy. What the user has set is left alone.
"""

import os
import sys


def local_size() -> int:
    """Number of ranks that the launcher started on this machine (1 without a launcher)."""
    for name in ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "PALS_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = os.environ.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1


def threads_per_rank() -> int:
    """Cores that this process may use, divided by the ranks that share them; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = local_size()
    # A launcher that binds (Open MPI) has already cut the cores to this rank's share.
    bound = cores < (os.cpu_count() or 1)
    return max(1, cores if bound else cores // ranks)


def prepare() -> None:
    """Set the variables that are not set yet; called once, on the import of shardrt."""
    threads = str(threads_per_rank())
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(name, threads)
    if "numpy" in sys.modules:  # too late for the variables; the count, at least, can still be changed
        from threadpoolctl import threadpool_limits

        threadpool_limits(int(os.environ["OPENBLAS_NUM_THREADS"]), user_api="blas")


prepare()
