"""The ranks of a run: they start together, and bring their figures together; and the room for their files."""

import os
import shutil
from pathlib import Path
from typing import Any

from shardrt.comm import Communicator, create, mpi_world
from shardrt.comm.objects import all_gather_object


class Ranks:
    """All ranks of this run; one without mpirun. Collective to make, without `control`.

    `shardrt.train.errors.one_line` takes it for a mesh.
    """

    def __init__(self, control: Communicator | None = None) -> None:
        self._control = control or create("auto")
        self.rank, self.size = self._control.rank, self._control.size

    def communicator(self, role: str) -> Communicator:
        """The same communicator for every role."""
        return self._control

    def start(self) -> None:
        """Return when all ranks have called this."""
        if self.size > 1:
            self._control.all_gather_bytes(b"")

    def gathered(self, value: Any) -> list[Any]:
        """The `value` of each rank, in order, after a round trip through JSON. Collective."""
        return all_gather_object(self._control, value)

    def gathered_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of each rank, in order. Collective."""
        return self._control.all_gather_bytes(data)


class Alone(Ranks):
    """One rank that measures by itself, whatever world it is in."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1

    def gathered(self, value: Any) -> list[Any]:
        """Its own."""
        return [value]


def check_room(option: str, folder: Path, nbytes: int) -> None:
    """Raise ValueError unless each rank of this host can write `nbytes` into new files in `folder`."""
    if not folder.is_dir():
        raise ValueError(f"{option}: {folder} is no directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: {folder} is not writable")
    launched = mpi_world.launch()
    needed, free = nbytes * (launched.local_size if launched else 1), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(f"{option}: {folder} has {free} bytes free, and this run needs {needed}")
