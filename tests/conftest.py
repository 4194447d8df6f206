"""One thread for this process: ranks are threads here, and BLAS with two for each of two ranks mostly waits.

(Tests of threads ask for more themselves; processes under mpirun get their share.)
"""

import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(name, "1")
