"""Ranks on several hosts: MPICH takes host names for hosts, though all processes start here."""

import subprocess
import sys

import pytest

from tests.ranks import clean_environment, mpirun_path, run_ranks

STEP = """
import numpy as np
import shardrt
from shardrt import nn
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard

def step():
    mesh = init_device_mesh("auto")
    shardrt.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = model(np.full((2, 8), mesh.rank + 1, np.float32)).mean()
    loss.backward()
    kind = type(mesh.communicator("gather")).__name__
    total = sum(float(abs(p.grad).sum()) for p in model.parameters())
    mesh.communicator("control").barrier(stream=mesh.device.current_stream)
    return mesh.rank, kind, total
"""
# In one write: whole, however output is buffered.
PROGRAM = STEP + "import os\nos.write(1, ' '.join(map(str, step())).encode() + b'\\n')"


@pytest.mark.mpi
def test_ranks_of_two_hosts_gather_through_shared_memory_within_each_and_compute_the_same(tmp_path):
    version = subprocess.run([mpirun_path(), "--version"], capture_output=True, text=True).stdout
    if "HYDRA" not in version:
        pytest.skip("only MPICH's launcher starts processes here under names of other hosts")
    hosts = tmp_path / "hosts"
    hosts.write_text("nodea:2\nnodeb:2\n")
    command = [mpirun_path(), "-n", "4", "-f", str(hosts), "-launcher", "fork", "-iface", "lo"]
    command += [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_environment())
    assert done.returncode == 0, done.stderr
    exec(STEP, names := {})
    expected = [f"{rank} HierarchicalCommunicator {total}" for rank, _, total in run_ranks(4, names["step"])]
    assert sorted(done.stdout.splitlines()) == expected
