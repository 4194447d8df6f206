"""Ranks that are processes with the GPU emulator each: the training command, NCCL, CUDA IPC."""

import json

import numpy as np
import pytest

from tests import lab
from tests.softgpu.available import missing

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.rest)])
def found(request, tmp_path_factory):
    job = "-m", "tests.softgpu.run", "-m", "tests.softgpu.processes"
    return json.loads(lab.printed(request.param, *job, str(tmp_path_factory.mktemp("trained")))[-1])


def test_the_training_command_on_two_gpus_has_the_losses_of_the_cpu(found):
    losses = found["losses"]
    assert len(losses["cuda"]) == 2 and found["by NCCL"] > 10
    np.testing.assert_allclose(losses["cuda"], losses["cpu"], rtol=1e-5)


def test_so_has_training_over_memory_that_processes_map(found):
    cpu, ipc = found["steps"]
    assert found["by IPC"] > 1
    np.testing.assert_allclose(ipc, cpu, rtol=1e-5)


def test_features_meet_on_processes_with_a_gpu_each(found):
    features = found["features"]
    assert len(features) >= 2 and max(max(apart) for apart in features.values()) < 1e-5, features
