"""Exercise: a mesh on which hybrid sharding beats full sharding. As a program, this file is the training."""

from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np

from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import MixedPrecisionPolicy, no_sync
from shardrt.learn.checking import need, shard
from shardrt.simulate.machine import Machine
from shardrt.simulate.step import simulated

TITLE = "Beat full sharding"
LEVEL = "hard"
TEACHES = "choosing a mesh in the simulator"
TAKEAWAY = (
    "Full sharding gathers among 64 nodes for every micro-batch. Hybrid sharding gathers among fewer, and "
    "sums the copies once a step. With fewer ranks for each copy that sum has more bytes, and the gathers "
    "have fewer. So the mesh with the fewest bytes between nodes is not the fastest."
)

_RANKS, _MICRO_BATCHES = 512, 4
_LAYERS, _WIDTH, _ROWS = 3, 4096, 2048
MESHES = [(_RANKS >> exponent, 1 << exponent) for exponent in range(10)]
LEAST = 64, 8  # the answer to FRUGAL; tests/learn compares all meshes
MS, GB, FRUGAL_GB = 42.0, 3.15, 4.0


class _Block(nn.Module):
    """The MLP of a transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def train() -> None:
    """Two optimizer steps on the mesh that the simulator gives."""
    mesh, policy = init_device_mesh("auto"), MixedPrecisionPolicy(param_dtype="bfloat16")
    model = nn.Sequential(*(_Block() for _ in range(_LAYERS)))
    shard(model, model, mesh, mp_policy=policy)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    x = np.zeros((_ROWS, _WIDTH), np.float32)
    for _ in range(2):
        for number in range(_MICRO_BATCHES):
            with nullcontext() if number == _MICRO_BATCHES - 1 else no_sync(model):
                model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class _Step(NamedTuple):
    ms: float
    gb: float
    between_nodes: int


@cache
def simulate(shape: tuple[int, int]) -> _Step:
    """What the simulator says of a mesh."""
    report = simulated(["shardrt.learn.hybrid"], _RANKS, Machine.load("h100-8"), shape=shape).report
    between = sum(report.links.get("between nodes", {}).values())
    return _Step(report.ms, max(report.device_bytes.values()) / 1e9, between)


def check(answer: ModuleType) -> str:
    """Simulate both meshes, and those that they are compared with."""
    fast, frugal = (_mesh(answer, name) for name in ("FAST", "FRUGAL"))
    (ms, gb, _), (copies, shards) = simulate(fast), fast
    about = f"{copies}x{shards} takes {ms:.1f} ms and {gb:.2f} GB"
    need(
        copies > 1, f"FAST: {about}. That is full sharding. Make copies, so that fewer ranks gather together."
    )
    need(gb <= GB, f"FAST: {about}: too much memory. Shard a copy over more ranks.")
    need(
        ms <= MS,
        f"FAST: {about}: too slow. Gathers go around a ring of {shards} ranks. Shard over fewer ranks.",
    )
    (_, gb, between), (copies, shards) = simulate(frugal), frugal
    need(gb <= FRUGAL_GB, f"FRUGAL: {copies}x{shards} takes {gb:.2f} GB. Fewer copies need less memory.")
    sends = f"{copies}x{shards} sends {between / 1e6:.0f} MB between nodes"
    need(
        between <= simulate(LEAST).between_nodes,
        f"FRUGAL: {sends}. Its gathers cross nodes for each micro-batch. Which mesh gathers inside a node?",
    )
    full = simulate((1, _RANKS))
    return f"{about}, {sends}. Full sharding: {full.ms:.1f} ms and {full.between_nodes / 1e6:.0f} MB."


def _mesh(answer: ModuleType, name: str) -> tuple[int, int]:
    value = getattr(answer, name, None)
    need(
        isinstance(value, tuple | list) and len(value) == 2, f"{name} must be two numbers: (copies, shards)."
    )
    fits = tuple(value) in MESHES
    need(fits, f"{name}: copies x shards must be {_RANKS}, and both powers of two. You have {tuple(value)}.")
    return tuple(value)


if __name__ == "__main__":
    train()
