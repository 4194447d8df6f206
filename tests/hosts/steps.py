"""Bytes between hosts and milliseconds of a training step, by strategy.

`mpirun -n 4 python -m tests.hosts.steps WIDTH LAYERS STEPS STRATEGY...`: rank 0 prints a JSON line for each.
A row of the mesh for hybrids is a host.
"""

import json
import os
import sys
import time

import numpy as np
from mpi4py import MPI

import shardrt
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from tests.hosts.crossing import received


def expected(strategy: str, nbytes: int, root: int, hosts: int, slots: int) -> float:
    """Bytes that a host receives in a step: docs/clusters.md."""
    if strategy == "HYBRID_SHARD":  # a sum and a gather of what each rank of a host has
        return 2 * nbytes * (hosts - 1) / hosts
    return (3 * nbytes - root) * (hosts - 1) / hosts  # parameters are gathered twice, but the outermost unit


def main(width: str, layers: str, steps: str, *strategies: str) -> None:
    everyone = MPI.COMM_WORLD
    slots = everyone.Split_type(MPI.COMM_TYPE_SHARED).size
    hosts = everyone.size // slots
    x = np.random.default_rng(everyone.rank).standard_normal((4, int(width)), np.float32)
    for strategy in strategies:
        shape = (hosts, slots) if strategy.startswith("HYBRID") else None
        mesh = init_device_mesh("cpu", shape)
        shardrt.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(int(width), int(width), bias=False) for _ in range(int(layers))))
        nbytes = 4 * sum(parameter.size for parameter in model.parameters())
        for layer in model:
            fully_shard(layer, mesh=mesh, strategy=strategy)
        fully_shard(model, mesh=mesh, strategy=strategy)
        optimizer = optim.SGD(model.parameters(), lr=1e-3)
        seconds = []
        for step in range(int(steps) + 2):
            everyone.Barrier()
            if step == 2:
                before = received()
            began = time.perf_counter()
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            everyone.Barrier()
            seconds.append(time.perf_counter() - began)
        found = {
            "strategy": strategy,
            "parameters": nbytes,
            "wire": (received() - before) / int(steps),
            "expected": expected(strategy, nbytes, 0, hosts, slots),
            "ms": round(sorted(seconds[2:])[int(steps) // 2] * 1e3, 2),
        }
        if everyone.rank == 0:
            os.write(1, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
