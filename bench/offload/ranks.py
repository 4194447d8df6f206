"""A rank that measures by itself; and the room for files of all ranks."""

import os
import shutil
from pathlib import Path
from typing import Any

from shardrt.comm import mpi_world

from ..harness.ranks import Ranks


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
