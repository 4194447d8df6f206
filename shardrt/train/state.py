"""Job: the parts of a training run, for the files that run it (job.py, loop.py)."""

from dataclasses import dataclass
from typing import Any

from shardrt import nn, optim
from shardrt.checkpoint import CheckpointManager
from shardrt.comm.mesh import DeviceMesh
from shardrt.faults.watchdog import Watch
from shardrt.parallel import DiLoCo
from shardrt.train.metrics import RunLog
from shardrt.train.progress import Ranks
from shardrt.train.recipe import Recipe
from shardrt.train.tasks import Task


@dataclass(frozen=True)
class Job:
    """All parts of a run. Only rank 0's `run` prints and writes."""

    recipe: Recipe
    mesh: DeviceMesh
    task: Task
    model: nn.Module
    optimizer: optim.Optimizer
    scaler: optim.GradScaler
    checkpoints: CheckpointManager
    run: RunLog
    watch: Watch
    ranks: Ranks
    origin: dict[str, Any]  # settings, data and code, for checkpoints and the log
    outer: DiLoCo | None  # what hosts do together, where they train apart
    ideal: float  # seconds of a step's matmuls alone, as fast as they can be here; 0: not known
