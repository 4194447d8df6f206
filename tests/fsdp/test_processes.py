"""What tests/fsdp hold on rank threads holds for processes too: shared memory and plain MPI."""

import pytest

from tests.ranks import mpirun

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("backend", ["shm", "mpi"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_strategy_precision_and_offload_gives_the_same_bits(size, backend):
    done = mpirun(size, ["-m", "tests.mpi.strategies", backend])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "all equal"
