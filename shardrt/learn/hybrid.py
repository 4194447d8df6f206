"""Exercise: a mesh on which hybrid sharding beats full sharding. Run as a program, it is the training step."""

from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard, no_sync
from shardrt.learn.checking import Hint, constant
from shardrt.simulate.machine import Machine
from shardrt.simulate.step import simulated

TITLE = "Beat full sharding"
LEVEL = "hard"
TEACHES = "choosing a mesh in the simulator"
TAKEAWAY = (
    "Full sharding gathers among 64 nodes for every micro-batch. Hybrid sharding gathers among fewer, and sums "
    "copies once a step. That sum moves larger shards where a copy has fewer ranks, so the fewest bytes between "
    "nodes are not the fastest step."
)

START = '''"""Exercise 11: beat full sharding.

512 H100 in 64 nodes of 8 train three wide blocks in bfloat16, with 4 micro-batches a step under no_sync. Full
sharding takes about 88 ms a step. Hybrid sharding keeps `copies` copies of the model, and shards each over `shards` ranks:
copies x shards = 512. Neighbouring ranks shard a copy, so 64x8 shards inside a node.

No GPU is needed. The simulator records the program and prices it:

    shardrt simulate --ranks 512 --mesh 1x512 -- shardrt.learn.hybrid

Its report has the time of the step, the memory of a rank, and the bytes on links. 1x512 is full sharding. Find

    FAST     (copies, shards) of a step of at most 42 ms that takes at most 3.15 GB (10^9 bytes) on each rank
    FRUGAL   (copies, shards) with the fewest bytes between nodes, of meshes that take at most 4 GB

Before you try all of them, think: which bytes stay in a node? Which grow with `shards`, and which with the
number of micro-batches? Read more: docs/learn/strategies.md.
"""

FAST = (1, 512)
FRUGAL = (1, 512)
'''

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
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
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
    fast, frugal = (_mesh(constant(answer, name), name) for name in ("FAST", "FRUGAL"))
    step, full = simulate(fast), simulate((1, _RANKS))
    about = f"FAST: {fast[0]}x{fast[1]} takes {step.ms:.1f} ms and {step.gb:.2f} GB"
    if fast[0] == 1:
        raise Hint(f"{about}. That is full sharding. Make copies, so that fewer ranks gather together.")
    if step.gb > GB:
        raise Hint(f"{about}: too much memory. Shard a copy over more ranks.")
    if step.ms > MS:
        raise Hint(f"{about}: too slow. Each gather still crosses too many nodes. Shard over fewer ranks.")
    between, gb = simulate(frugal).between_nodes, simulate(frugal).gb
    if gb > FRUGAL_GB:
        raise Hint(f"FRUGAL: {frugal[0]}x{frugal[1]} takes {gb:.2f} GB. Fewer copies need less memory.")
    if between > simulate(LEAST).between_nodes:
        more = "Its gathers cross nodes for each micro-batch. Which mesh gathers inside a node?"
        raise Hint(f"FRUGAL: {frugal[0]}x{frugal[1]} sends {between / 1e6:.0f} MB between nodes. {more}")
    return (
        f"{fast[0]}x{fast[1]} takes {step.ms:.1f} ms and full sharding {full.ms:.1f} ms; {frugal[0]}x{frugal[1]} "
        f"sends {between / 1e6:.0f} MB between nodes and full sharding {full.between_nodes / 1e6:.0f} MB."
    )


def _mesh(value: Any, name: str) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise Hint(f"{name} must be two numbers: (copies, shards).")
    if tuple(value) not in MESHES:
        raise Hint(
            f"{name}: copies x shards must be {_RANKS}, and both powers of two. You have {tuple(value)}."
        )
    return tuple(value)


if __name__ == "__main__":
    train()
