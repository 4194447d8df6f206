"""`mpirun -n N python -m tests.mpi [FILE.py]`: pytest on every rank. A rank whose test fails ends the job."""

import sys
from pathlib import Path

import pytest

from shardrt.comm import mpi_world

mpi_world.of_mpi()  # installs the hooks that end the job when this rank exits with an error
named = [word for word in sys.argv[1:] if word.endswith(".py")]
others = [word for word in sys.argv[1:] if word not in named]
files = named or ["test_backends.py", "test_nodes.py", "test_training.py", "test_quantised.py"]
tests = [str(Path(__file__).parent / name) for name in files]
# -s: output that pytest keeps back would be lost when another rank ends the job.
sys.exit(pytest.main(["-x", "-q", "-s", "-p", "no:cacheprovider", *tests, *others]))
