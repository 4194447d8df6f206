"""Bytes between hosts and milliseconds of a training step, by strategy: measured, by formula and simulated.

`mpirun -n 4 python -m tests.hosts.steps WIDTH LAYERS STEPS STRATEGY...`: rank 0 prints a JSON line for each.
A row of the mesh for hybrids is a host. "cpu_ms" is the processor time of all ranks, with their waits in MPI.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

import shardrt
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.device.cpu import CPUDevice
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from shardrt.fsdp.options.quantisation import Quantisation
from shardrt.simulate.clock import price
from shardrt.simulate.machine import Link, Machine
from shardrt.simulate.script import record_of

QUANTISED = {
    "bits": Quantisation(gather_bits=4, reduce_bits=8),
    "secondary": Quantisation(gather_bits=4, reduce_bits=8, secondary=True),
    "eight": Quantisation(gather_bits=8, reduce_bits=8, secondary=True),
}


def expected(strategy: str, nbytes: int, hosts: int) -> float:
    """Bytes that a host receives in a step: docs/howto/clusters.md. nbytes: of parameters in float32."""
    name, _, kind = strategy.partition("-")
    if kind in QUANTISED:
        how, count = QUANTISED[kind], nbytes // 4
        if name == "HYBRID_SHARD":  # gradients to the ranks that add them up, and the sums back
            return 2 * how.reduced_bytes(count) * (hosts - 1) / hosts
        gathers = 1 if how.secondary else 2
        return (gathers * how.gathered_bytes(count) + how.reduced_bytes(count)) * (hosts - 1) / hosts
    if name == "HYBRID_SHARD":  # a sum and a gather of what each rank of a host has
        return 2 * nbytes * (hosts - 1) / hosts
    gathered = nbytes / 2 if kind else nbytes  # twice
    return (2 * gathered + nbytes) * (hosts - 1) / hosts


def step_of(
    strategy: str, width: int, layers: int, device: str, hosts: int, slots: int
) -> tuple[Callable[[], None], int]:
    """(a training step, bytes of parameters). strategy: FULL_SHARD, or with a kind, as FULL_SHARD-bits."""
    strategy, _, kind = strategy.partition("-")
    policy = None
    if kind in QUANTISED:
        policy = MixedPrecisionPolicy(quantised=QUANTISED[kind])
    elif kind:
        policy = MixedPrecisionPolicy(kind)
    mesh = init_device_mesh(device, (hosts, slots) if strategy.startswith("HYBRID") else None)
    shardrt.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    nbytes = 4 * sum(parameter.size for parameter in model.parameters())
    for layer in model:
        fully_shard(layer, mesh=mesh, strategy=strategy, mp_policy=policy)
    fully_shard(model, mesh=mesh, strategy=strategy, mp_policy=policy)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    x = np.random.default_rng(mesh.rank).standard_normal((4, width), np.float32)

    def step() -> None:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, nbytes


def simulated(strategy: str, width: int, layers: int, network: Link, hosts: int, slots: int) -> float:
    """Seconds of a step where hosts of these cores have such a link. bandwidth: of a rank."""
    here, count = Machine.load("cpu-2"), hosts * slots
    share = os.cpu_count() / count  # of its own core
    device = replace(
        here.device,
        flops={kind: share * peak for kind, peak in here.device.flops.items()},
        bandwidth=share * here.device.bandwidth,
    )
    machine = replace(here, device=device, network=network, ranks_per_node=slots)

    def train() -> None:
        step, _ = step_of(strategy, width, layers, "auto", hosts, slots)
        step()
        step()

    how = {"like": CPUDevice, "local_size": slots, "shared": True, "stands_for": {0: range(count)}}
    return price(record_of(train, count, steps=2, **how), machine).steps[0][-1]


def main(width: str, layers: str, steps: str, *strategies: str) -> None:
    from mpi4py import MPI

    from tests.hosts.crossing import received

    everyone = MPI.COMM_WORLD
    slots = everyone.Split_type(MPI.COMM_TYPE_SHARED).size
    hosts = everyone.size // slots
    for strategy in strategies:
        step, nbytes = step_of(strategy, int(width), int(layers), "cpu", hosts, slots)
        seconds = []
        for number in range(int(steps) + 2):
            everyone.Barrier()
            if number == 2:
                before, worked = received(), time.process_time()
            began = time.perf_counter()
            step()
            everyone.Barrier()
            seconds.append(time.perf_counter() - began)
        found = {
            "strategy": strategy,
            "parameters": nbytes,
            "wire": (received() - before) / int(steps),
            "expected": expected(strategy, nbytes, hosts),
            "cpu_ms": round(everyone.allreduce(time.process_time() - worked) / int(steps) * 1e3, 2),
            "ms": round(sorted(seconds[2:])[int(steps) // 2] * 1e3, 2),
        }
        if everyone.rank == 0:
            os.write(1, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
