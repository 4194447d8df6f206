"""Host to device, device to host, both at once, in blocks: as streams copy them for offload.

On a GPU the ceiling of a direction is one copy of everything from pinned memory. The CPU device's "copy to
the device" is a copy in host memory, which knows nothing of pinned; the ceiling is the C library's memcpy.
"""

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardrt.device import Device, Stream

from ..harness.ranks import Ranks
from .lines import line
from .ranks import Alone

Array = Any
Work = Callable[[], None]

SECTION = "copies"
DIRECTIONS = {"host to device": ("up",), "device to host": ("down",), "both at once": ("up", "down")}


@dataclass(frozen=True)
class Way:
    """A stream and what it copies."""

    stream: Stream
    target: Array
    source: Array


def rows(
    device: Device, nbytes: int, blocks: list[int], rounds: int, ranks: Ranks | None = None
) -> tuple[list[dict], dict[str, float]]:
    """Lines, and the ceilings of "host to device", "device to host" and "both at once" in bytes per second.

    All ranks copy at once; rates and ceilings are sums over ranks. ranks: None measures this process alone.
    """
    found: list[dict] = []
    ceilings: dict[str, float] = {}
    ranks = ranks or Alone()
    on_gpu = device.name != "cpu"
    whole_copy = "one pinned copy" if on_gpu else "memcpy"
    for memory in ("pinned", "pageable") if on_gpu else ("host",):
        ways = _ways(device, nbytes, memory)
        for direction, names in DIRECTIONS.items():
            chosen = [ways[name] for name in names]
            works = [lambda chosen=chosen, size=size: _copy(device, chosen, size) for size in blocks]
            if memory != "pageable":
                whole = (
                    (lambda c=chosen: _copy(device, c, nbytes)) if on_gpu else (lambda c=chosen: _memcpy(c))
                )
                works.append(whole)
            own = [len(names) * nbytes / seconds for seconds in by_turns(works, rounds, ranks.start)]
            rates = list(zip(*ranks.gathered(own), strict=True))  # by work, then by rank
            if memory != "pageable":
                top = rates.pop()
                ceilings[direction] = sum(top)
                found.append(line(SECTION, f"{whole_copy}, {direction}", top))
            for size, each in zip(blocks, rates, strict=True):
                wrong = sum(ranks.gathered(int(not _same(device, chosen, size))))
                name = f"{memory}, {direction}, {shown(size)} blocks"
                found.append(against(SECTION, name, each, wrong, whole_copy, ceilings[direction]))
    if not on_gpu:
        found.append(line(SECTION, "pinned and pageable, to and from a GPU", check="no GPU here"))
    return found, ceilings


def against(
    section: str, name: str, rates: Sequence[float], wrong: int, ceiling: str, ceiling_rate: float
) -> dict:
    """A line whose result was compared."""
    check = "DIFFER" if wrong else "equal"
    return line(section, name, rates, wrong=wrong, ceiling=ceiling, ceiling_rate=ceiling_rate, check=check)


def memory(device: Device, nbytes: int) -> Work:
    """What the host's memory can do at most: two copies of the C library at once. 4 * nbytes are moved."""
    ways = list(_ways(device, nbytes, "host").values())
    return lambda: _memcpy(ways)


def by_turns(works: list[Work], rounds: int, meet: Work = lambda: None) -> list[float]:
    """Seconds of each, the median over rounds; a round more, at first, is not counted.

    meet: called before each, so that ranks start at once.
    """
    times: list[list[float]] = [[] for _ in works]
    for _ in range(rounds + 1):
        for work, taken in zip(works, times, strict=True):
            meet()
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[1:]) for taken in times]


def shown(nbytes: int) -> str:
    """A size as a reader likes it: 64K, 16M; what is no power of two in bytes."""
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return str(nbytes)


def _ways(device: Device, nbytes: int, memory: str) -> dict[str, Way]:
    """Memory of its own for each direction; all pages are there."""

    def host() -> np.ndarray:
        return device.pinned(nbytes, np.uint8) if memory == "pinned" else np.zeros(nbytes, np.uint8)

    up = Way(device.new_stream("upload"), device.buffer(nbytes, np.uint8), host())
    down = Way(device.new_stream("download"), host(), device.buffer(nbytes, np.uint8))
    for array in (up.target, up.source, down.target, down.source):
        array.fill(1)
    device.current_stream.synchronize()
    return {"up": up, "down": down}


def _copy(device: Device, ways: list[Way], size: int) -> None:
    """Everything in blocks of `size`, each submitted to its stream."""
    for start in range(0, ways[0].target.size, size):
        piece = slice(start, start + size)
        for way in ways:
            way.stream.submit(device.copy, way.target[piece], way.source[piece])
    for way in ways:
        way.stream.synchronize()


def _memcpy(ways: list[Way]) -> None:
    """Each way by one call of the C library, at once; ctypes lets go of the interpreter lock."""
    threads = [threading.Thread(target=_memcpy_one, args=(way,)) for way in ways[1:]]
    for thread in threads:
        thread.start()
    _memcpy_one(ways[0])
    for thread in threads:
        thread.join()


def _memcpy_one(way: Way) -> None:
    to, source = (ctypes.c_void_p(array.ctypes.data) for array in (way.target, way.source))
    ctypes.CDLL(None).memcpy(to, source, ctypes.c_size_t(way.target.nbytes))


def _same(device: Device, ways: list[Way], size: int) -> bool:
    """Whether a copy of other values arrives."""
    random = np.random.default_rng(size)
    for way in ways:
        values = random.integers(0, 256, way.source.size, np.uint8)
        device.copy(way.source, values)
        way.target.fill(0)
    device.wait_here()
    device.current_stream.synchronize()
    _copy(device, ways, size)
    return all(np.array_equal(device.to_numpy(way.target), device.to_numpy(way.source)) for way in ways)
