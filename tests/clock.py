"""How long things may take: so many times what this machine needs for something else now, never seconds.

Tests that measure time are marked `serial`: `make test` runs them with nothing beside them. Tests of jobs
that must end within some times whole_job are marked `timed`: they run two at a time, and so does whole_job.
"""

import time
from functools import cache

from tests.ranks import mpirun

_JOB = """
from shardrt.comm import init_device_mesh
mesh = init_device_mesh("cpu")
mesh.communicator("control").barrier(stream=mesh.device.current_stream)
"""


@cache
def whole_job(ranks: int) -> float:
    """Seconds of a job in which the ranks meet and end: what a rank that fails must be seen in."""
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        done = mpirun(ranks, ["-c", _JOB])
        assert done.returncode == 0, done.stderr
        seconds.append(time.perf_counter() - began)
    return max(seconds)


def soon(ranks: int, started: float) -> float:
    """Seconds in which the ranks see that one has failed, and end: those of two jobs.

    started: seconds that this job took until then, for the machine may be slower now than at `whole_job`.
    """
    return 2 * max(whole_job(ranks), started)
