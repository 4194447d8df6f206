"""What a test asks of ranks that are processes, each with a GPU of its own: rank 0 prints JSON.

mpirun -n 2 python -m tests.softgpu.run -m tests.softgpu.processes FOLDER
"""

import json
import os
import sys
import warnings
from pathlib import Path

from cupy.cuda import runtime

from models import train
from shardrt.comm import world
from shardrt.device import cuda
from tests.cuda import small_gpt
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
    if world.first():
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
