"""A job that saves, in which one rank is killed around one file operation of its own.

mpirun -n 2 python -m tests.checkpoint.victim FOLDER HOW RANK AT WHEN

Before each save a rank appends the step and a hash of all that it holds to FOLDER/recorded-RANK.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from shardrt import nn, optim
from shardrt.checkpoint import CheckpointManager
from shardrt.checkpoint.pieces import counted, pieces_of
from shardrt.comm import init_device_mesh, world
from shardrt.fsdp import fully_shard
from tests.checkpoint.disks import Watched

HOWS = {  # how a step is saved -> which step it is
    "first": 1,  # where no checkpoint is yet
    "next": 2,  # and step 1, which is restored before, is removed
    "background": 2,
    "again": 1,  # with other values than before
}


class Killed(Watched):
    """Keeps what is done in `done`, and kills this process before or after operation `at`."""

    def __init__(self, folder: Path, at: int, when: str) -> None:
        self.folder, self.at, self.when = folder, at, when
        self.done = []

    def around(self, name, operation, args):
        self.done.append(" ".join([name, *(named(value) for value in args if isinstance(value, Path))]))
        hit = len(self.done) - 1 == self.at
        if hit and self.when == "before":
            self._die()
        try:
            return operation(*args)
        finally:  # a directory that the other rank has made is an operation, too
            if hit and self.when == "after":
                self._die()

    def _die(self):
        (self.folder / "killed").write_text(json.dumps([time.time(), self.done[-1]]))
        os.kill(os.getpid(), signal.SIGKILL)


def named(path):
    """Its name, without what is drawn at random."""
    return path.name.rpartition("-")[0] if path.name.startswith(".tmp-") else path.name


def made(root, disk=None):
    """(model, optimizer, checkpoints) of this rank; keeps one."""
    mesh = init_device_mesh("cpu")
    model = nn.Linear(5, 3)
    fully_shard(model, mesh=mesh)
    optimizer = optim.AdamW(model.parameters())
    return model, optimizer, CheckpointManager(root, model, optimizer, mesh, keep_last=1, disk=disk)


def change(model, optimizer, step):
    """Other parameters, moments and numbers of updates."""
    numbers = np.random.default_rng()
    for piece in pieces_of(model, optimizer, saving=False):
        piece.array[:] = numbers.standard_normal(piece.array.size)
    for piece in optimizer.slices:
        piece.set_steps([step] * len(piece.members))


def digest(model, optimizer):
    """A hash of all that this rank holds."""
    steps = {name: int(piece.steps[at]) for name, (piece, at) in counted(model, optimizer).items()}
    found = hashlib.sha256(repr(steps).encode())
    for piece in pieces_of(model, optimizer, saving=False):
        found.update(f"{piece.kind} {piece.parameter} {piece.extents}".encode() + piece.array.tobytes())
    return found.hexdigest()


def save(folder, how, disk=None):
    """Restore what there is, and save what `how` says with new values."""
    model, optimizer, checkpoints = made(folder / "c", disk)
    found, _ = checkpoints.restore()
    assert found == (0 if how == "first" else 1), found
    step = HOWS[how]
    change(model, optimizer, step)
    with open(folder / f"recorded-{world.current().rank}", "a") as file:
        print(step, digest(model, optimizer), file=file)
    if how == "background":
        checkpoints.start(step)
        while checkpoints.tick() is None:
            pass
    else:
        checkpoints.save(step)


def main():
    folder, how, victim, at, when = sys.argv[1:]
    folder, rank = Path(folder), init_device_mesh("cpu").rank
    save(folder, how, Killed(folder, int(at) if rank == int(victim) else -1, when))


if __name__ == "__main__":
    main()
