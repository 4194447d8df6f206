"""One thread for this process: ranks are threads here, and BLAS with two for each of two ranks mostly waits.

(Tests of threads ask for more themselves; processes under mpirun get their share.)
"""

import gc
import os
import sys
from contextlib import suppress
from importlib.util import find_spec

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import pytest  # noqa: E402  after the threads are set

from shardrt.kernels import determinism  # noqa: E402

with suppress(ImportError):  # the tests for a GPU need none
    import hypothesis

    # On a loaded machine examples take long; that is no fault of what they test.
    hypothesis.settings.register_profile(
        "shardrt", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("shardrt")


def pytest_collection_finish():
    """All tests and modules stay: garbage collections, of which some tests ask for many, pass them over."""
    gc.freeze()


def pytest_runtest_setup(item):
    """Nothing is imported where tests are collected: each process does that, and few run these.

    PyTorch with transformers and PEFT takes seven seconds.
    """
    marks = item.iter_markers("torch")
    missing = [name for mark in marks for name in ("torch", *mark.args) if find_spec(name) is None]
    if missing:
        pytest.skip(f"no {missing[0]}")


@pytest.fixture(autouse=True)
def _as_it_was():
    """The process goes on with other tests.

    set_world_invariant leaves it deterministic, attention on several threads leaves BLAS as many: of ranks
    that are threads each product then takes 20 times as long.
    """
    yield
    determinism.use_deterministic_algorithms(False)
    if "shardrt.kernels.cpu.matmul" in sys.modules:
        sys.modules["shardrt.kernels.cpu._blas"].set_blas_threads(int(os.environ["OPENBLAS_NUM_THREADS"]))
