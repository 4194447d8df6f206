"""Draws one recorded training step as an SVG: what ran in which stream, and when. The README's picture.

    mpirun -n 2 python docs/draw_schedule.py docs/schedule.svg

The bars are spans that shardrt.device.timeline recorded on rank 0, of a model of six equal blocks. Ranks
talk through plain MPI here, which really copies; where they share memory a gather is too short to see.
"""

import sys

import numpy as np

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.device import timeline
from shardrt.fsdp import fully_shard

BLOCKS, WIDTH, ROWS = 6, 1024, 512
COLOURS = {"forward": "#4c78a8", "backward": "#72b7b2", "all_gather": "#f58518", "reduce_scatter": "#e45756"}
NAMES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}


class Block(nn.Module):
    """Two matrix products of WIDTH x 4 WIDTH."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: shardrt.Tensor) -> shardrt.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def record() -> tuple[int, list[timeline.Span]]:
    """(rank, spans of one step, after two to warm up)."""
    mesh = init_device_mesh("cpu", communicator="mpi")
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    x = shardrt.Tensor(np.random.default_rng(mesh.rank).standard_normal((ROWS, WIDTH), dtype=np.float32))
    for _ in range(3):
        with timeline.record() as spans:
            model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return mesh.rank, spans


def draw(spans: list[timeline.Span], path: str) -> None:
    """Three rows of bars: gather, compute, reduce."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "shardrt"
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(figsize=(11, 2.6), layout="constrained")
    rows = {"gather": 2, "compute": 1, "reduce": 0}
    start = min(span.start for span in spans)
    for span in spans:
        phase, _, unit = span.label.partition(" ")
        if phase not in COLOURS or unit == "(root)" or span.stream not in rows:
            continue
        left, width = 1e3 * (span.start - start), 1e3 * (span.stop - span.start)
        axes.barh(rows[span.stream], width, left=left, height=0.72, color=COLOURS[phase], edgecolor="white")
        if unit:
            axes.text(
                left + width / 2, rows[span.stream], unit, ha="center", va="center", color="white", fontsize=9
            )
    axes.set_yticks(list(rows.values()), [f"{name} stream" for name in rows])
    axes.set_xlabel("milliseconds of one step, rank 0 of 2")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour, label=NAMES.get(name, name)) for name, colour in COLOURS.items()]
    axes.legend(handles=handles, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: mpirun -n 2 python docs/draw_schedule.py FILE.svg")
    rank, recorded = record()
    if rank == 0:
        draw(recorded, sys.argv[1])
