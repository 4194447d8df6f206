"""AdamW's update with its arrays in five places: the device, the host (streamed or updated there), files.

All start from the same weights and gradients and alternate their steps, so their weights must be
bitwise identical at the end. A ceiling is what must move over the measured rate of what it moves through.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import DeviceMesh, init_device_mesh
from shardrt.device import Device
from shardrt.fsdp import CPUOffloadPolicy, fully_shard

from . import copies
from .lines import line

SECTION = "optimizer"
LAYERS = 4
UPDATE = 28  # bytes of memory per parameter: AdamW reads four arrays of float32 and writes three
FILES = 16  # bytes per parameter in files, of each contestant that has them there
UP, DOWN = 16, 12  # bytes per parameter on the link when all is on the host (docs/howto/fit_in_memory.md)


class Stack(nn.Module):
    """Square layers, whose matmul with one row is cheap next to their update."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(LAYERS)])

    def forward(self, x: np.ndarray) -> object:
        for layer in self.layers:
            x = layer(x)
        return x


class Contestant:
    """A model with gradients, and the optimizer whose steps are timed."""

    def __init__(self, name: str, policy: CPUOffloadPolicy | None, width: int, mesh: DeviceMesh) -> None:
        self.name = name
        shardrt.manual_seed(0)
        self.model = Stack(width)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, **({} if policy is None else {"offload_policy": policy}))
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-3)
        self.device = mesh.device
        x = np.random.default_rng(0).normal(size=(1, width)).astype(np.float32)
        y = self.model(shardrt.Tensor(self.device.asarray(x)))
        F.cross_entropy(y, self.device.asarray(np.zeros(1, np.int64))).backward()
        self.device.current_stream.synchronize()

    def step(self) -> None:
        """One update with the gradients that are there, to its end."""
        self.optimizer.step()
        self.device.current_stream.synchronize()

    def bits(self) -> str:
        """A hash of all weights."""
        digest = hashlib.blake2b()
        for piece in self.optimizer.slices:
            digest.update(self.device.to_numpy(piece.storage.shard))
        return digest.hexdigest()


def rows(
    device: Device, parameters: int, directory: Path, rounds: int, links: dict[str, float], disk: float
) -> Iterator[dict]:
    """A line each. `links`: of copies.rows. `disk`: bytes per second that the disk takes.

    Of the CPU, whose link is its memory, the ceiling is measured again in each round.
    """
    mesh = init_device_mesh(device.name)
    width = round((parameters / LAYERS) ** 0.5)
    contestants = [
        Contestant("on the device", None, width, mesh),
        Contestant("on the host, streamed through the device", CPUOffloadPolicy(), width, mesh),
        Contestant("on the host, updated there", CPUOffloadPolicy(step="host"), width, mesh),
        Contestant("in files, streamed", CPUOffloadPolicy(directory=directory), width, mesh),
        Contestant(
            "in files, updated on the host", CPUOffloadPolicy(step="host", directory=directory), width, mesh
        ),
    ]
    copied = 4 * parameters  # as long as one of the arrays
    copy = copies.memory(device, copied) if device.name == "cpu" else lambda: None
    copying, *steps = copies.by_turns([copy, *(each.step for each in contestants)], rounds)
    count = LAYERS * width**2
    bits = contestants[0].bits()
    ceilings = _ceilings(device, 4 * copied / copying, links, disk)
    for contestant, seconds, (moved, rate, ceiling) in zip(contestants, steps, ceilings, strict=True):
        same = contestant.bits() == bits
        check = f"same bits, {1e3 * seconds:.1f} ms" if same else "OTHER BITS"
        rates = [count * moved / seconds]
        yield line(
            SECTION,
            contestant.name,
            rates,
            wrong=int(not same),
            ceiling=ceiling,
            ceiling_rate=rate,
            check=check,
        )


def _ceilings(
    device: Device, memory: float, links: dict[str, float], disk: float
) -> list[tuple[int, float | None, str]]:
    """(bytes per parameter, bytes per second, of what) of each contestant. bench.gpu has a GPU's memory."""
    if device.name == "cpu":
        here = there = (UPDATE, memory, "memory")
        # A copy to this device and back reads and writes the same memory.
        streamed = (UPDATE + 2 * (UP + DOWN), memory, "memory")
    else:
        here = there = (UPDATE, None, "")
        ways = ((UP, links["host to device"]), (DOWN, links["device to host"]))
        streamed = (*max(ways, key=lambda way: way[0] / way[1]), "link")
    files = (DOWN, disk, "disk, writing")
    return [here, streamed, there, files, files]
