"""Stops a save at every thing that it does to the file system, and looks at what the next start finds.

Run as a program, so that it can fork: a case is a process that saves on two ranks (threads) and ends before
or after one operation. What was not synced is then lost, or not: both are tried. Prints the number of cases.
"""

import gc
import os
import shutil
import sys
import tempfile
import threading
from dataclasses import dataclass
from errno import EDQUOT, EIO, ENOSPC
from itertools import product
from pathlib import Path

import numpy as np

from shardrt import nn, optim
from shardrt.checkpoint import CheckpointManager, manifest, rankfile, verify
from shardrt.checkpoint.disk import Disk
from shardrt.comm import init_device_mesh, thread, world
from shardrt.fsdp import fully_shard
from tests.checkpoint.disks import Watched

RANKS = 2
OLD, NEW = 1, 2
LOST = ("nothing", "bytes", "names")


class Stop(Watched):
    """Ends the process around operation `at` of rank `rank`; first undoes what was not synced, if `lose`."""

    def __init__(self, rank, at, when, lose):
        self.rank, self.at, self.when, self.lose = rank, at, when, lose
        self.count, self.one = 0, threading.Lock()
        self.files = {}  # descriptor -> File, of those that are open
        self.written = []  # every File
        self.names = []  # what was done to names and not synced, in order: (operation, Place, Place or None)

    def around(self, name, operation, args):
        own = world.current().rank == self.rank
        with self.one:  # when the machine stops, nobody does more
            if own and self.count == self.at and self.when == "before":
                self.die()
            try:
                result = operation(*args)
                self.note(name, args, result)
                return result
            finally:  # a directory that another rank has made is an operation, too
                if own and self.count == self.at and self.when == "after":
                    self.die()
                self.count += own

    def note(self, name, args, result):
        """Keep in mind what would be lost if the machine stopped now."""
        if name == "create":
            self.files[result] = File(Location(args[0]))
            self.written.append(self.files[result])
            self.names.append(("create", self.files[result].place, None))
        elif name == "write":
            self.files[args[0]].length += len(args[1])
        elif name == "sync":
            self.files[args[0]].safe = self.files[args[0]].length
        elif name == "make_directory":
            self.names.append(("create", Location(args[0]), None))
        elif name == "rename":
            self.move(*args)
            self.names.append(("rename", Location(args[0]), Location(args[1])))
        elif name == "sync_directory":
            self.names = [entry for entry in self.names if args[0] != entry[1].path.parent]

    def move(self, old, new):
        """What was noted of things below `old` is true of them below `new`."""
        places = [*(file.place for file in self.written), *(entry[1] for entry in self.names)]
        for place in {id(place): place for place in places}.values():
            if place.path.is_relative_to(old):
                place.path = new / place.path.relative_to(old)

    def die(self):
        if self.lose == "bytes":
            for file in self.written:
                if file.place.path.is_file():
                    os.truncate(file.place.path, file.safe)
        elif self.lose == "names":
            for operation, place, other in reversed(self.names):
                if operation == "rename" and other.path.exists():
                    other.path.rename(place.path)
                    self.move(other.path, place.path)
                elif operation == "create" and place.path.is_dir():
                    shutil.rmtree(place.path)
                elif operation == "create":
                    place.path.unlink(missing_ok=True)
        os._exit(9)


@dataclass
class Location:
    """Where something is now."""

    path: Path


@dataclass
class File:
    """Bytes written, and how many of them are on the disk."""

    place: Location
    length: int = 0
    safe: int = 0


class Fails(Watched):
    """Raises an error instead of operation `at` of one rank."""

    def __init__(self, rank, at, error):
        self.rank, self.at, self.error, self.count = rank, at, error, 0

    def around(self, _, operation, args):
        if world.current().rank == self.rank:
            self.count += 1
            if self.count - 1 == self.at:
                raise OSError(self.error, os.strerror(self.error))
        return operation(*args)


def made(root, disk=None):
    """(model, checkpoints) of this rank; keeps one."""
    mesh = init_device_mesh("auto")
    model = fully_shard(nn.Linear(5, 3), mesh=mesh)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    return model, CheckpointManager(root, model, optimizer, mesh, keep_last=1, disk=disk)


def run(root, disk, first, last):
    """Save steps first, ..., last with values that tell the step."""
    model, checkpoints = made(root, disk)
    if first > OLD:
        checkpoints.restore()
    for step in range(first, last + 1):
        model.load_state_dict({n: values(n, p.shape, step) for n, p in model.named_parameters()})
        checkpoints.save(step)


def values(name, shape, step):
    return np.full(shape, 10 * step + len(name), np.float32)


def restored(root):
    """(step, whether the values are those of the step), as the next start finds them."""
    model, checkpoints = made(root)
    step, _ = checkpoints.restore()
    right = all((p.shard == 10 * step + len(n)).all() for n, p in model.named_parameters())
    return step, right or step == 0


def look(root, allowed):
    """What a start after the crash finds must be one of the allowed steps, whole, with nothing left over."""
    for step, right in thread.run(RANKS, restored, root):
        assert step in allowed and right, (step, allowed, right)
    left = sorted(path.name for path in root.iterdir()) if root.exists() else []
    assert not [name for name in left if name.startswith(".")], left
    for name in left:
        verify(root / name)


def child(function, *args):
    """Run in a process of its own; its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            thread.run(RANKS, function, *args)
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main():
    rankfile.BLOCK = manifest.BLOCK = 128  # bytes: a file takes several writes
    folder, number = Path(tempfile.mkdtemp()), 0
    try:
        for first in (OLD, NEW):
            before, allowed = folder / f"before-{first}", {first - 1, first}
            before.mkdir()
            if first > OLD:
                thread.run(RANKS, run, before / "c", Disk(), OLD, OLD)
            for rank in range(RANKS):
                for at in range(operations(before, folder / f"count-{first}-{rank}", first, rank)):
                    # Before it is what was after the last, but that the other rank may have come further.
                    for when, lose in (("before", LOST[at % len(LOST)]), *product(["after"], LOST)):
                        root = copied(before, folder / str(number))
                        assert child(run, root, Stop(rank, at, when, lose), first, first) == 9
                        look(root, allowed)
                        number += 1
                    root = copied(before, folder / str(number))
                    error = (ENOSPC, EIO, EDQUOT)[at % 3]
                    thread.run(RANKS, run_failing, root, Fails(rank, at, error), first)
                    look(root, allowed)
                    number += 1
    finally:
        shutil.rmtree(folder)
    print(f"{number} cases")


def copied(before, folder):
    """A folder for checkpoints, as it is before the save that is stopped."""
    return shutil.copytree(before, folder) / "c"


def operations(before, folder, first, rank):
    """How many a save takes on this rank."""
    disk = Stop(rank, -1, "", "")
    thread.run(RANKS, run, copied(before, folder), disk, first, first)
    gc.freeze()  # a collection in a fork would copy everything
    return disk.count


def run_failing(root, disk, first):
    """The save fails, or gives only a warning; the run then goes on and saves again, without error."""
    mesh = init_device_mesh("auto")
    try:
        run(root, disk, first, first)
    except RuntimeError as error:
        assert "was not saved" in str(error), error
        assert mesh.size == RANKS


if __name__ == "__main__":
    main()
