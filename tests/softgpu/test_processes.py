"""Ranks that are processes with a GPU in software each: the training command, NCCL, CUDA IPC."""

import json

import numpy as np
import pytest

from tests.ranks import mpirun
from tests.softgpu.available import missing

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if missing():
        pytest.skip(missing())
    job = [
        "-m",
        "tests.softgpu.run",
        "-m",
        "tests.softgpu.processes",
        str(tmp_path_factory.mktemp("trained")),
    ]
    done = mpirun(2, job, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_training_command_on_two_gpus_has_the_losses_of_the_cpu(found):
    losses = found["losses"]
    assert len(losses["cuda"]) == 2 and found["by NCCL"] > 10
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=1e-5)


def test_so_has_training_over_memory_that_processes_map(found):
    cpu, ipc = found["steps"]
    assert found["by IPC"] > 1
    np.testing.assert_allclose(ipc, cpu, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.rest)])
def test_features_meet_on_processes_with_a_gpu_each(tmp_path, ranks):
    if missing():
        pytest.skip(missing())
    job = ["-m", "tests.softgpu.run", "-m", "tests.softgpu.pairs_of_processes", str(tmp_path)]
    done = mpirun(ranks, job)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) >= 2 and max(max(apart) for apart in found.values()) < 1e-5, found
