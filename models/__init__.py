"""Models written with shardrt, each a file that reads top to bottom."""

import shardrt  # noqa: F401  before NumPy: it sets the threads of BLAS
