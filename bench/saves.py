"""What a save costs training: how long it holds up the thread that trains, beside a copy of the same bytes.

Three kinds of round by turns: no save, one in the background, one that training waits for. Ranks meet before
whatever is timed, so that no rank's figure holds the wait for a slower one. A copy is timed in every round:
of the very flat arrays that are saved, into memory that was written before. Beside the time by the clock
there is the thread's own processor time, which other work on the machine moves less; it holds no wait for the
disk. A meeting is one all-reduce of two numbers: what a tick does, at the least.

    mpirun -n 2 python -m bench.saves --config models/configs/default.toml --rounds 20 --every 10
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.training import gathered
from models import train
from shardrt import device, optim
from shardrt.checkpoint import CheckpointManager
from shardrt.checkpoint.disk import Disk
from shardrt.checkpoint.pieces import pieces_of
from shardrt.comm import DeviceMesh, init_device_mesh
from shardrt.comm.talk import from_first
from shardrt.train.job import optimizer_of, sharded_model
from shardrt.train.loop import backward, batches_of
from shardrt.train.recipe import Recipe

KINDS = ("none", "background", "waiting")
WARM = 5  # steps before the first round


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.saves", description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=train.DEFAULT, metavar="TOML", help="what is trained")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="of each kind (20)")
    parser.add_argument("--every", type=int, default=10, metavar="STEPS", help="steps of a round (10)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where to save (a temporary one)")
    options = parser.parse_args()
    mesh = init_device_mesh("cpu")
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        folder = Path(from_first(mesh.communicator("control"), own))
        load = os.getloadavg()[0]
        result = measured(train.load(options.config), mesh, folder, options.rounds, options.every)
    if mesh.rank == 0:
        about = {"config": options.config.name, "ranks": mesh.size, "rounds": options.rounds}
        about |= {"steps_of_a_round": options.every, "cores": os.cpu_count()}
        about["load_average"] = [round(load, 2), round(os.getloadavg()[0], 2)]
        print(json.dumps(about | result))


class Timed(Disk):
    """Notes how long a rank's file takes from its first byte until it is on the disk."""

    def __init__(self) -> None:
        self.began, self.bytes = {}, {}
        self.rates: list[float] = []  # bytes per second

    def create(self, path: Path, direct: bool = False) -> int:
        file = super().create(path, direct)
        if path.name.startswith("rank-"):
            self.began[file], self.bytes[file] = time.perf_counter(), 0
        return file

    def write(self, file: int, data: memoryview) -> None:
        if file in self.bytes:
            self.bytes[file] += len(data)
        super().write(file, data)

    def sync(self, file: int) -> None:
        super().sync(file)
        if file in self.began:
            self.rates.append(self.bytes.pop(file) / (time.perf_counter() - self.began.pop(file)))


class Rounds:
    """One rank's job and what was timed of it: by the clock and of the processor, in seconds."""

    def __init__(self, recipe: Recipe, mesh: DeviceMesh, folder: Path) -> None:
        self.recipe, self.mesh, self.disk = recipe, mesh, Timed()
        self.task = recipe.task()
        self.model = sharded_model(recipe, mesh, self.task)
        self.optimizer = optimizer_of(recipe, self.model)
        self.scaler = optim.GradScaler(enabled=False)
        self.checkpoints = CheckpointManager(
            folder / "c", self.model, self.optimizer, mesh, keep_last=1, disk=self.disk
        )
        self.done = 0
        self.steps: dict[str, list[np.ndarray]] = {kind: [] for kind in (*KINDS, "beside")}
        self.stalls: dict[str, list[np.ndarray]] = {
            name: [] for name in ("start", "ticks", "background", "waiting")
        }
        self.copies: list[np.ndarray] = []
        self.meetings: list[np.ndarray] = []
        self.ticks: list[int] = []  # of each save

    def step(self, kind: str) -> None:
        """Train one. beside: a save is being written meanwhile."""
        recipe, step = self.recipe, self.done
        batches = batches_of(recipe, self.mesh, self.task, step)

        def train() -> None:
            shardrt.manual_seed(recipe.seed, step)
            backward(recipe, self.task, self.model, batches, self.scaler, step)
            shardrt.nn.utils.clip_grad_norm_(list(self.model.parameters()), recipe.optimizer.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()

        self.steps[kind].append(self.timed(train))
        self.done += 1

    def timed(self, function: Callable[[], Any]) -> np.ndarray:
        """Seconds by the clock and of the processor, from when all ranks are here."""
        self.mesh.communicator("control").barrier(stream=device.current().current_stream)
        began = np.array([time.perf_counter(), time.thread_time()])
        function()
        return np.array([time.perf_counter(), time.thread_time()]) - began

    def round(self, kind: str, steps: int) -> None:
        """Some steps, of which a save is made after the first."""
        self.copy()
        self.step(kind)
        if kind == "waiting":
            self.stalls["waiting"].append(self.timed(lambda: self.checkpoints.save(self.done)))
        elif kind == "background":
            self.stalls["start"].append(self.timed(lambda: self.checkpoints.start(self.done)))
            self.stalls["ticks"].append(np.zeros(2))
            self.ticks.append(0)
        left = steps - 1
        while left > 0 or self.checkpoints.under_way:
            beside = self.checkpoints.under_way
            self.step("beside" if beside else kind)
            if beside:
                self.stalls["ticks"][-1] += self.timed(self.checkpoints.tick)
                self.ticks[-1] += 1
            left -= 1
        if kind == "background":
            self.stalls["background"].append(self.stalls["start"][-1] + self.stalls["ticks"][-1])

    def copy(self) -> None:
        """Copy what a save copies, once more than needed: the first time touches the pages."""
        pieces = pieces_of(self.model, self.optimizer, saving=True)
        sources = list({id(piece.flat): piece.flat for piece in pieces}.values())
        if not hasattr(self, "targets"):
            self.targets = [np.ones_like(array) for array in sources]
            self.nbytes = sum(array.nbytes for array in sources)

        def copy() -> None:
            for target, source in zip(self.targets, sources, strict=True):
                np.copyto(target, source)

        self.copies.append(self.timed(copy))
        control, stream = self.mesh.communicator("control"), device.current().current_stream
        two = np.zeros(2, np.int64)
        self.meetings.append(self.timed(lambda: control.all_reduce(two, op="min", stream=stream)))


def measured(recipe: Recipe, mesh: DeviceMesh, folder: Path, rounds: int, every: int) -> dict[str, Any]:
    """Milliseconds by kind, of the slowest rank at each place; megabytes per second by rank."""
    job = Rounds(recipe, mesh, folder)
    for _ in range(WARM):
        job.step("none")
    job.round("background", every)  # the first has memory to find
    first = job.stalls["background"][0]
    for times in (
        *job.steps.values(),
        *job.stalls.values(),
        job.copies,
        job.meetings,
        job.disk.rates,
        job.ticks,
    ):
        times.clear()
    for _ in range(rounds):
        for kind in KINDS:
            job.round(kind, every)
    stalls = {name: _slowest(times, mesh) for name, times in job.stalls.items()}
    copies = _slowest(job.copies, mesh)
    ratios = np.median(stalls["start"], axis=0) / np.median(copies, axis=0)
    rates = gathered([statistics.median(job.disk.rates)], mesh)[:, 0]
    return {
        "parameters": sum(parameter.size for parameter in job.model.parameters()),
        "saved_bytes_per_rank": gathered([job.nbytes], mesh)[:, 0].astype(int).tolist(),
        "copy_ms": _summary(copies),
        "meeting_ms": _summary(_slowest(job.meetings, mesh)),
        "stall_ms": {name: _summary(times) for name, times in stalls.items()},
        "first_background_ms": _summary(_slowest([first], mesh)),
        "ticks_per_save": statistics.median(job.ticks),
        "start_over_copy": dict(zip(("clock", "processor"), ratios.round(2).tolist(), strict=True)),
        "step_ms": {kind: _summary(_slowest(times, mesh)) for kind, times in job.steps.items()},
        "written_mb_per_s_by_rank": [round(rate / 1e6, 1) for rate in rates],
    }


def _slowest(times: list[np.ndarray], mesh: DeviceMesh) -> np.ndarray:
    """(places, 2): the largest of the ranks' at each place."""
    return gathered(np.ravel(times).tolist(), mesh).max(axis=0).reshape(-1, 2)


def _summary(seconds: np.ndarray) -> dict[str, float]:
    """Milliseconds."""
    clock, processor = 1e3 * seconds.T
    figures = {"min": clock.min(), "p50": np.median(clock), "max": clock.max()}
    figures["processor_p50"] = np.median(processor)
    return {name: round(float(value), 3) for name, value in figures.items()}


if __name__ == "__main__":
    main()
