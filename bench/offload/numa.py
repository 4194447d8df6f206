"""NUMA nodes of this machine, and threads that stay on one. Linux says them in /sys/devices/system/node.

A thread that stays on a node first touches the memory that it allocates, so the memory is of that node.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def nodes(folder: Path = _NODES) -> dict[int, set[int]]:
    """Numbers of the cores of each node, those that this process may use; {0: all} where Linux names none."""
    allowed = os.sched_getaffinity(0)
    found = {}
    for path in folder.glob("node[0-9]*"):
        cores = _listed((path / "cpulist").read_text()) & allowed
        if cores:
            found[int(path.name.removeprefix("node"))] = cores
    return dict(sorted(found.items())) or {0: allowed}


@contextmanager
def on(cores: set[int] | None) -> Iterator[None]:
    """Inside a with block, this thread runs on these cores; anywhere for None."""
    before = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _listed(text: str) -> set[int]:
    """0-3,8 is {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
