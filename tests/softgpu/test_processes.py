"""Ranks that are processes with a GPU in software each: the training command, NCCL, CUDA IPC."""

import json

import numpy as np
import pytest

from tests import lab
from tests.softgpu.available import missing

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(bool(missing()), reason=missing())]


def of_processes(ranks, module, folder):
    """What rank 0 prints."""
    return json.loads(lab.printed(ranks, "-m", "tests.softgpu.run", "-m", module, str(folder))[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return of_processes(2, "tests.softgpu.processes", tmp_path_factory.mktemp("trained"))


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
    found = of_processes(ranks, "tests.softgpu.pairs_of_processes", tmp_path)
    assert len(found) >= 2 and max(max(apart) for apart in found.values()) < 1e-5, found
