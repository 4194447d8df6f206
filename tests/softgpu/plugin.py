"""`pytest -p tests.softgpu.plugin tests/gpu`: the tests for a GPU, on the GPU emulator.

Processes that they start by mpirun have it as well.
"""

import os
import sys

from tests import ranks
from tests.softgpu.start import start

_mpirun = ranks.mpirun
ranks.mpirun = lambda size, args, *more, **kwargs: _mpirun(
    size, ["-m", "tests.softgpu.run", *args], *more, **kwargs
)
CUDA = start()
_status = [0]


def pytest_runtest_setup(item):
    CUDA.rank.error = None  # a real GPU would stay broken, and tell of no other test


def pytest_sessionfinish(session, exitstatus):
    _status[0] = int(exitstatus)


def pytest_unconfigure(config):
    """End at once: CuPy's clean-up would call CUDA when Python is half gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status[0])
