"""Records one training step and draws it: the README's picture.

    mpirun -n 2 python docs/figures/schedule.py docs/figures/schedule.svg

A model of six equal blocks. Ranks talk through plain MPI here, which really copies; where they share memory
a gather is too short to see. `shardrt trace` draws any step of a run in the same way (docs/howto/watch.md).
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.device import timeline
from shardrt.fsdp import fully_shard
from shardrt.tools.runs import read_trace
from shardrt.tools.trace import picture
from shardrt.train.trace import TRACE, Trace

BLOCKS, WIDTH, ROWS, STEPS = 6, 1024, 512, 4


class Block(nn.Module):
    """Two matmuls of WIDTH x 4 WIDTH."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: shardrt.Tensor) -> shardrt.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def train(folder: Path) -> None:
    """A few steps; the last one is traced."""
    mesh = init_device_mesh("cpu", communicator="mpi")
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    x = shardrt.Tensor(np.random.default_rng(mesh.rank).standard_normal((ROWS, WIDTH), dtype=np.float32))
    trace = Trace(mesh, folder if mesh.rank == 0 else None, range(STEPS, STEPS + 1))
    for step in range(1, STEPS + 1):
        with trace.step(step):
            model(x).mean().backward()
            with timeline.span("compute", "optimizer"):
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: mpirun -n 2 python docs/figures/schedule.py FILE.svg")
    with tempfile.TemporaryDirectory() as made:
        train(Path(made))
        if (path := Path(made) / TRACE).exists():  # on rank 0
            Path(sys.argv[1]).write_text(picture(read_trace(path), 0, STEPS), encoding="utf-8")
