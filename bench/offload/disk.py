"""Arrays in files (shardrt.device.host): written out and dropped block by block, and read from the disk.

The ceiling of writing is one fdatasync of the same dirty pages, that of reading one preadv into memory.
"""

import os
import tempfile
import time
from pathlib import Path

import numpy as np

from shardrt.device import host

from ..harness.ranks import Ranks
from .copies import against, shown
from .lines import line
from .ranks import Alone

SECTION = "disk"


def rows(
    directory: Path, nbytes: int, blocks: list[int], rounds: int, ranks: Ranks | None = None
) -> tuple[list[dict], float]:
    """Lines, and the bytes per second that the disk takes.

    All ranks write at once, and read at once, each its own file of `nbytes`; rates are sums over ranks.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        array = np.memmap(file, np.uint8, "r+", shape=(nbytes,))
        return _rows(file.fileno(), array, blocks, rounds, ranks or Alone())


def _rows(
    file: int, array: np.memmap, blocks: list[int], rounds: int, ranks: Ranks
) -> tuple[list[dict], float]:
    values = np.random.default_rng(ranks.rank).integers(0, 256, array.size, np.uint8)
    sizes = [array.size, *blocks]  # the first by the ceiling's calls
    writing, reading = (np.zeros((rounds + 1, len(sizes))) for _ in range(2))  # seconds
    wrong = np.zeros(len(sizes), int)
    for round_ in range(rounds + 1):
        for number, size in enumerate(sizes):
            raw = number == 0
            values += np.uint8(1)  # what an earlier turn wrote would not pass
            writing[round_, number] = _write(file, array, values, size, raw, ranks)
            reading[round_, number], right = _read(file, array, values, size, raw, ranks)
            wrong[number] |= not right
    own = [(array.size / np.median(each[1:], axis=0)).tolist() for each in (writing, reading)]
    rates = np.array(ranks.gathered(own)).transpose(1, 2, 0)  # write and read; sizes; ranks
    failed = np.sum(ranks.gathered(wrong.tolist()), axis=0).tolist()  # ranks, by size
    found = []
    for what, ceiling, (top, *spilled) in zip(
        ("write", "read"), ("fdatasync", "preadv"), rates.tolist(), strict=True
    ):
        found.append(line(SECTION, f"{what}, {ceiling} of all", top, wrong=failed[0]))
        for size, each, bad in zip(blocks, spilled, failed[1:], strict=True):
            name = f"{what}, spilled, {shown(size)} blocks"
            found.append(against(SECTION, name, each, bad, ceiling, sum(top)))
    return found, float(rates[0, 0].sum())


def _write(file: int, array: np.memmap, values: np.ndarray, size: int, raw: bool, ranks: Ranks) -> float:
    """Seconds until pages that were just written are on the disk."""
    array[:] = values
    ranks.start()
    start = time.perf_counter()
    if raw:
        os.fdatasync(file)
    else:
        for first in range(0, array.size, size):
            host.write_out(array[first : first + size])
    return time.perf_counter() - start


def _read(
    file: int, array: np.memmap, values: np.ndarray, size: int, raw: bool, ranks: Ranks
) -> tuple[float, bool]:
    """(Seconds to bring everything from the disk to memory, whether it is `values`)."""
    host.drop(array)  # from this process
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # from the page cache
    target = np.zeros_like(values)
    target.fill(1)
    ranks.start()
    start = time.perf_counter()
    if raw:
        os.preadv(file, [target], 0)
    else:
        for first in range(0, array.size, size):
            target[first : first + size] = array[first : first + size]
    return time.perf_counter() - start, np.array_equal(target, values)
