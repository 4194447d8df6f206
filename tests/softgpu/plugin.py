"""`pytest -p tests.softgpu.plugin tests/gpu`: the tests for a GPU, on the one in software.

SOFTGPU_MODE and SOFTGPU_SEED say in which order streams take turns (see cuda.py).
"""

import os
import sys

from tests.softgpu.start import start

CUDA = start(os.environ.get("SOFTGPU_MODE", "late"), int(os.environ.get("SOFTGPU_SEED", "0")))
_status = [0]


def pytest_sessionfinish(session, exitstatus):
    _status[0] = int(exitstatus)


def pytest_unconfigure(config):
    """End at once: CuPy's clean-up would call CUDA when Python is half gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status[0])
