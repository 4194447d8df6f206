"""Tests in this folder need mpirun: a plain `pytest` leaves them to tests/test_comm.py, which starts it."""

from shardrt.comm import mpi_world

launched = mpi_world.launch()
collect_ignore = [] if launched is not None else ["test_backends.py", "test_nodes.py", "test_training.py"]
