"""Arrays in files (shardrt.device.host): written out and dropped block by block, and read from the disk.

The ceiling of writing is one fdatasync of the same dirty pages, that of reading one preadv into memory.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from shardrt.device import host

from ..gpu.report import Row
from .copies import shown

SECTION = "disk"


def rows(directory: Path, nbytes: int, blocks: list[int], rounds: int) -> tuple[list[Row], float]:
    """Rows, and the bytes per second that the disk takes."""
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        array = np.memmap(file, np.uint8, "r+", shape=(nbytes,))
        return _rows(file.fileno(), array, blocks, rounds)


def _rows(file: int, array: np.memmap, blocks: list[int], rounds: int) -> tuple[list[Row], float]:
    values = np.random.default_rng(0).integers(0, 256, array.size, np.uint8)
    sizes = [array.size, *blocks]  # the first by the ceiling's calls
    taken: dict[tuple[str, int, bool], list[float]] = {}
    wrong: set[int] = set()
    for round_ in range(rounds + 1):
        for number, size in enumerate(sizes):
            raw = number == 0
            values += np.uint8(1)  # what an earlier turn wrote would not pass
            writing = _write(file, array, values, size, raw)
            reading, right = _read(file, array, values, size, raw)
            if not right:
                wrong.add(number)
            if round_:
                taken.setdefault(("write", number), []).append(writing)
                taken.setdefault(("read", number), []).append(reading)
    rates = {key: array.size / statistics.median(seconds) for key, seconds in taken.items()}
    found = []
    for what, ceiling in (("write", "fdatasync of all"), ("read", "preadv of all")):
        top = rates[what, 0] / 1e9
        found.append(Row(SECTION, f"{what}, {ceiling}", None if 0 in wrong else top, "GB/s"))
        for number, size in enumerate(blocks, 1):
            figure = None if number in wrong else rates[what, number] / 1e9
            check = "DIFFER" if number in wrong else "equal"
            name = f"{what}, spilled, {shown(size)} blocks"
            found.append(Row(SECTION, name, figure, "GB/s", beside="ceiling", theirs=top, check=check))
    return found, rates["write", 0]


def _write(file: int, array: np.memmap, values: np.ndarray, size: int, raw: bool) -> float:
    """Seconds until pages that were just written are on the disk."""
    array[:] = values
    start = time.perf_counter()
    if raw:
        os.fdatasync(file)
    else:
        for first in range(0, array.size, size):
            host.write_out(array[first : first + size])
    return time.perf_counter() - start


def _read(file: int, array: np.memmap, values: np.ndarray, size: int, raw: bool) -> tuple[float, bool]:
    """(Seconds to bring everything from the disk to memory, whether it is `values`)."""
    host.drop(array)  # from this process
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # from the page cache
    target = np.zeros_like(values)
    target.fill(1)
    start = time.perf_counter()
    if raw:
        os.preadv(file, [target], 0)
    else:
        for first in range(0, array.size, size):
            target[first : first + size] = array[first : first + size]
    return time.perf_counter() - start, np.array_equal(target, values)
