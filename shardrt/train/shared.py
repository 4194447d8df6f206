"""Whether the folder of a run is the same on all hosts, as checkpoints and the flight recorder need it."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.objects import all_gather_object, broadcast_object
from shardrt.faults.diagnosis import ranks

_SEEN = 5.0  # seconds until another host must see a new file: some cache for a while that a file was absent


def check_shared(mesh: DeviceMesh, directory: Path | None) -> None:
    """Raise ValueError on all ranks, naming hosts and ranks, unless all see this folder.

    Collective.

    Of ranks on one host, and where rank 0 can't write, nothing is asked.

    Args:
        directory: as rank 0 has it.
    """
    if mesh.world.local_size == mesh.world.size:
        return
    control, mark = mesh.communicator("control"), None
    if mesh.rank == 0 and directory is not None:
        mark = directory / f".seen-{os.urandom(6).hex()}"
        try:
            mark.touch()
        except OSError:  # a full disk ends no run
            mark = None
    message = broadcast_object(control, None if mark is None else str(mark))
    if message is None:
        return
    deadline = time.monotonic() + _SEEN
    while not (seen := os.path.exists(message)) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = all_gather_object(control, [socket.gethostname(), seen])
    if mark is not None:
        with suppress(OSError):
            mark.unlink()
    missing = [rank for rank, (_, has) in enumerate(found) if not has]
    if missing:
        hosts = [host for host, _ in found]
        raise ValueError(
            f"{Path(message).parent} is not the same folder on all hosts: {ranks(missing, hosts)} "
            f"{'does' if len(missing) == 1 else 'do'} not see what rank 0 on {hosts[0]} has written there; "
            f"a run needs a folder that all hosts share, or checkpoint.folder hosts"
        )
