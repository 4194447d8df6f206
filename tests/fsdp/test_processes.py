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


@pytest.mark.parametrize(("size", "backend"), [(2, "shm"), (4, "mpi")])
def test_training_holds_what_the_plan_said(size, backend):
    done = mpirun(size, ["-m", "tests.mpi.memory", backend])
    assert done.returncode == 0, done.stderr
    assert "as planned" in done.stdout


@pytest.mark.parametrize("backend", ["shm", "mpi"])
def test_late_readers_and_several_models_on_one_mesh(backend):
    done = mpirun(2, ["-m", "tests.mpi.readers", backend], timeout=60)
    assert done.returncode == 0, done.stderr
    assert "all right" in done.stdout
