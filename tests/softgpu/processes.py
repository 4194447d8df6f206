"""What a test asks of ranks that are processes, each with a GPU of its own: rank 0 prints JSON.

mpirun -n 2 python -m tests.softgpu.run -m tests.softgpu.processes FOLDER
"""

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
from cupy.cuda import runtime

from models import train
from shardrt.comm import world
from shardrt.device import cuda
from tests.cuda import small_gpt
from tests.fsdp import paired
from tests.fsdp import test_pairs as pairs
from tests.softgpu.nccl import NcclCommunicator

SETTINGS = """
steps = 2
batch_size = 4
model = {n_layer = 1, n_head = 2, n_embd = 16, block_size = 16, vocab_size = 256}
report = {log_interval = 1, eval_interval = 2, eval_samples = 2}
sample = {length = 2}
"""


def trained(place: str) -> list[float]:
    """The losses that the training command logs, where there are as many GPUs as ranks, or none."""
    cuda.count = lambda: world.current().size if place == "cuda" else 0
    train.main(["--config", "tiny.toml", "--data", "text.txt", "--name", place])
    lines = Path("runs", place, "metrics.jsonl").read_text().splitlines() if world.first() else []
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "step"]


def features() -> dict[str, list[float]]:
    """How far losses and weights are from the CPU's, of each set that fits this number of ranks, in float32.

    pairs.py has the rest, on threads.
    """
    sets = [names for names in pairs.TOGETHER if not pairs.LOW & set(names)]
    fitting = [names for names in sets if pairs.ranks_for(names, 2) == world.current().size]
    return {pairs.readable(names): apart(names) for names in fitting}


def apart(names: tuple) -> list[float]:
    """How far losses of this rank are off, and weights."""
    options, runs = pairs.options_of(names), []
    for device in ("cpu", "cuda"):
        made = tempfile.mkdtemp(dir=".") if world.first() else ""
        shared = world.current().root.bcast(made)
        runs.append(paired.train(options, Path(shared), device))
    (losses, weights), (expected, others) = runs
    off = max((np.abs(weights[name] - others[name]).max() for name in weights or ()), default=0.0)
    return [float(np.abs(np.array(losses) - np.array(expected)).max()), float(off)]


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    os.chdir(folder)
    if world.first():
        Path("tiny.toml").write_text(SETTINGS)
        Path("text.txt").write_text(
            "All the world's a stage, and all the men and women merely players.\n" * 40
        )
    world.current().root.Barrier()
    message, opened = {"losses": {place: trained(place) for place in ("cpu", "cuda")}}, []
    message["by NCCL"] = sum(what == "nccl" for what, _, _ in NcclCommunicator.cuda.log)
    open_handle = runtime.ipcOpenMemHandle
    runtime.ipcOpenMemHandle = lambda *args: opened.append(open_handle(*args)) or opened[-1]
    message["steps"] = [
        small_gpt.train(place, communicator=kind)[0] for place, kind in (("cpu", "auto"), ("cuda", "ipc"))
    ]
    message["by IPC"] = len(opened)
    runtime.ipcOpenMemHandle = open_handle
    message["features"] = features()
    if world.first():
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
