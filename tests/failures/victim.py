"""A training run in which one rank fails: `python -m tests.failures.victim FAILURE PHASE RANK OPTIONS...`

The failure happens in step 4 (set-up: before the first), in the middle of real training code of that phase:
the library's own functions are wrapped, nothing of them is replaced.
"""

import os
import resource
import signal
import sys
import time
from functools import wraps
from pathlib import Path

import numpy as np

from models import train
from models.gpt import GPT
from shardrt import device
from shardrt.checkpoint import CheckpointManager
from shardrt.comm import mpi_world
from shardrt.faults import diagnosis
from shardrt.faults.flight import read_all
from shardrt.fsdp.schedule import Schedule
from shardrt.functional import collective
from shardrt.parallel import Stage
from shardrt.train import job, loop
from tests.train.plain import leave_out

STEP = 4


def fail(failure: str, mesh, victim: int) -> None:
    """What goes wrong, called by every rank; most of it happens on one of them."""
    if failure in MISMATCHES:
        call(failure, mesh, mesh.rank == victim)
    elif mesh.rank == victim:
        if failure == "kill":
            until_awaited(mesh.rank)
        print(f"failed at {time.time()}", flush=True)
        FAILURES[failure]()


def until_awaited(rank: int) -> None:
    """Return when others wait for this rank, if the run has a folder.

    The launcher kills them at once with it. Who was first could not be told where nobody waits yet.
    """
    folder = Path("runs", sys.argv[sys.argv.index("--name") + 1], "flight")
    deadline = time.monotonic() + 100
    while folder.exists() and diagnosis.behind(read_all(folder)[0]) != [rank]:
        assert time.monotonic() < deadline, "nobody waits for the rank that is to fail"
        time.sleep(0.01)


def call(failure: str, mesh, victim: bool) -> None:
    """A collective that one rank calls differently."""
    if victim:
        print(f"failed at {time.time()}", flush=True)
    control, stream = mesh.communicator("control"), device.current().current_stream
    numbers = np.zeros(
        8 if failure == "shape" and victim else 4, "f8" if failure == "dtype" and victim else "f4"
    )
    what = "blocks.1" if failure == "unit" and victim else "blocks.0"
    if failure == "order" and victim:
        control.barrier(stream=stream, tag=what)
    control.all_reduce(numbers, stream=stream, tag=what)


def out_of_memory() -> None:
    """The address space is full, as far as large arrays go."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 26), resource.RLIM_INFINITY))
    device.current().empty(1 << 30, np.float32)


def spin() -> None:
    """An endless loop that leaves the interpreter lock to others."""
    while True:
        time.sleep(0.01)


def boo() -> None:
    raise RuntimeError("boo")


FAILURES = {
    "raise": boo,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": spin,
    "memory": out_of_memory,
}
MISMATCHES = ("order", "shape", "dtype", "unit")
DIFFERENCES = ("settings", "seed", "data", "code")
PHASES = ("set-up", "forward", "backward", "optimizer", "save", "eval")
EXCHANGES = ("exchange", "exchange back")  # rows on their way to experts of other ranks, and their gradients


class Trap:
    """Fails once, at the first call in the phase in which `armed` holds."""

    def __init__(self, failure: str, victim: int) -> None:
        self.failure, self.victim = failure, victim
        self.mesh = self.step = None
        self.sprung = False

    def spring(self) -> None:
        if not self.sprung and self.step == STEP:
            self.sprung = True
            fail(self.failure, self.mesh, self.victim)

    def before(self, owner: object, name: str, only=lambda *args: True) -> None:
        """Spring it before a function."""
        original = getattr(owner, name)

        @wraps(original)
        def function(*args, **kwargs):
            if only(*args):
                self.spring()
            return original(*args, **kwargs)

        setattr(owner, name, function)


def prepare(failure: str, phase: str, victim: int) -> None:
    """Wrap what the failure goes into."""
    trap = Trap(failure, victim)
    backward, planned = loop.backward, job.planned_memory

    def planned_memory(recipe, mesh, task, model, batches):
        plan = planned(recipe, mesh, task, model, batches)
        trap.mesh = mesh
        if phase == "set-up":
            trap.step = STEP
            trap.spring()
        return plan

    def backward_of_step(recipe, task, model, batches, scaler, step):
        trap.step = step + 1
        return backward(recipe, task, model, batches, scaler, step)

    job.planned_memory = planned_memory
    loop.backward = backward_of_step
    if phase == "forward":
        trap.before(GPT, "forward", lambda model, *how: model.training)
        trap.before(Stage, "forward", lambda stage, *how: stage.model.training)
    elif phase == "backward":
        trap.before(Schedule, "after_backward", lambda schedule, unit: unit.label == last_block(schedule))
    elif phase == "optimizer":
        trap.before(loop, "update")
    elif phase == "save":
        trap.before(CheckpointManager, "_begin")
    elif phase == "exchange":
        trap.before(collective, "exchanged_rows")
    elif phase == "exchange back":
        trap.before(collective.AllToAllRows, "backward")
    elif phase == "eval":
        trap.before(GPT, "forward", lambda model, *how: not model.training)
        trap.before(Stage, "forward", lambda stage, *how: not stage.model.training)


def last_block(schedule: Schedule) -> str:
    """The last that this rank has: of the model, or of its stage."""
    return [unit.label for unit in schedule.units if unit.label.startswith("blocks")][-1]


def differ(what: str, arguments: list[str]) -> list[str]:
    """The command line of the rank that differs; or else its data, or its code."""
    if what == "settings":
        return [*arguments, "--optimizer.lr", "0.5"]
    if what == "seed":
        return [*arguments, "--seed", "7"]
    if what == "data":  # a file of the same name
        os.chdir("other")
        return arguments
    import shardrt

    shardrt.__version__ = "0.0.9"
    return arguments


def main() -> None:
    failure, phase, victim, *arguments = sys.argv[1:]
    if failure in DIFFERENCES:
        if mpi_world.launch().rank == int(victim):
            print(f"failed at {time.time()}", flush=True)
            arguments = differ(failure, arguments)
    else:
        prepare(failure, phase, int(victim))
    leave_out()
    train.main(arguments)


if __name__ == "__main__":
    main()
