"""For all tests: one thread for this process, and what `pytest -n` may run at the same time.

One thread, because ranks are threads here, and BLAS with two for each of two ranks mostly waits. (Tests of
threads ask for more themselves; processes under mpirun get their share.)
"""

import os

import pytest

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")


def pytest_collection_modifyitems(config, items):
    """Tests that start ranks as processes run one after the other; of the others those of a file."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            group = "processes" if item.get_closest_marker("mpi") else item.location[0]
            item.add_marker(pytest.mark.xdist_group(group))
