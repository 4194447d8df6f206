"""Ranks on several hosts: MPICH takes host names for hosts, though all processes start here."""

import subprocess
import sys

import pytest

from tests.ranks import clean_environment, mpirun_path

PROGRAM = """
import os
import numpy as np
from shardrt import nn
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard, full_parameters

mesh = init_device_mesh("auto")
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
loss = model(np.full((2, 8), mesh.rank + 1, np.float32)).mean()
loss.backward()
kind = type(mesh.communicator("gather")).__name__
total = sum(float(abs(p.grad).sum()) for p in model.parameters())
mesh.communicator("control").barrier(stream=mesh.device.current_stream)
os.write(1, f"{mesh.rank} {kind} {total}\\n".encode())  # whole, however output is buffered
"""


def _ranks(*options):
    """{rank: (communicator of gathers, sum of its gradients)} of four ranks."""
    command = [mpirun_path(), "-n", "4", *options, sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean_environment())
    assert done.returncode == 0, done.stderr
    return {int(line.split()[0]): tuple(line.split()[1:]) for line in done.stdout.splitlines()}


@pytest.mark.mpi
def test_ranks_of_two_hosts_gather_through_shared_memory_within_each_and_compute_the_same(tmp_path):
    version = subprocess.run([mpirun_path(), "--version"], capture_output=True, text=True).stdout
    if "HYDRA" not in version:
        pytest.skip("only MPICH's launcher starts processes here under names of other hosts")
    hosts = tmp_path / "hosts"
    hosts.write_text("nodea:2\nnodeb:2\n")
    one = _ranks()
    two = _ranks("-f", str(hosts), "-launcher", "fork", "-iface", "lo")
    assert {kind for kind, _ in one.values()} == {"ShmCommunicator"}
    assert {kind for kind, _ in two.values()} == {"HierarchicalCommunicator"}
    assert {rank: total for rank, (_, total) in one.items()} == {
        rank: total for rank, (_, total) in two.items()
    }
