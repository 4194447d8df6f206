"""Files, buffers and requests of `bench.offload storage`. Knows neither ranks nor the command line.

A request is one preadv or pwritev. A queue depth of Q is Q threads of a worker, each with one request in
flight: synchronous I/O, as that of gdsio's -x 1. Python lets go of its lock during a request.

Each block that is written carries values of its own: words of 64 bits that look random and depend on the file
and on the place within the block, and a stamp at the start of each sector of 512 bytes, which depends on the
file, on the sector's offset and on the round. So a block that is at another place, of another round or of
another file is wrong in every sector.
"""

import errno
import fcntl
import mmap
import os
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardrt import device as devices
from shardrt.device import Device

from . import numa

SECTOR = 512  # bytes
_WORD = 8
_HUGE = 1 << 21  # bytes of a huge page
_LARGEST = 1 << 16  # bytes: no file system asks for larger pieces of O_DIRECT
_ODD, _FILE, _ROUND = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9  # of xxHash (Collet)
_NEVER = (1 << 63) - 1


@dataclass(frozen=True)
class Pattern:
    """random: blocks in a random order, else by offset. reads: percent of the requests that read."""

    random: bool
    reads: int

    @property
    def name(self) -> str:
        """As gdsio calls it; for both reads and writes as fio does."""
        kind = {100: "READ", 0: "WRITE"}.get(self.reads, "RW")
        return f"RAND{kind}" if self.random else kind

    def order(self, blocks: int, random: np.random.Generator) -> np.ndarray:
        """Numbers of blocks as they take turns, (blocks,); each once."""
        return random.permutation(blocks) if self.random else np.arange(blocks)

    def reading(self, blocks: int, random: np.random.Generator) -> np.ndarray:
        """Which of the requests read, (blocks,) of bool: `reads` percent, rounded, at random places."""
        chosen = np.zeros(blocks, bool)
        chosen[: round(blocks * self.reads / 100)] = True
        return random.permutation(chosen)


class File:
    """A new file of `nbytes` that disappears with this process: its name is removed as soon as it is open.

    direct: whether O_DIRECT is asked for; then, whether the file system took it. granularity: bytes whose
    multiples O_DIRECT takes; 1 without it. number: of the file, over all ranks.

    Raises:
        OSError: if there is such a file, or no room for it.
    """

    def __init__(self, path: Path, nbytes: int, direct: bool, number: int) -> None:
        self.number = number
        self.fd = _new(path, direct)
        try:
            path.unlink()
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            os.close(self.fd)
            raise OSError(error.errno, f"{nbytes} bytes: {error.strerror}", str(path)) from error
        self.granularity = _granularity(self.fd) if direct else 0
        self.direct = self.granularity > 0
        if not self.direct:
            self.granularity = 1
            flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)

    def write_out(self) -> None:
        """Return when all that was written is on the disk."""
        os.fdatasync(self.fd)

    def forget(self) -> None:
        """Drop the file from the page cache: what is read next comes from the disk."""
        self.write_out()
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give its room back."""
        os.close(self.fd)


def _new(path: Path, direct: bool) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            with suppress(FileNotFoundError):  # Linux makes a file and then finds that O_DIRECT is refused
                path.unlink()
    return os.open(path, flags, 0o600)


def _granularity(fd: int) -> int:
    """The least power of two, from a sector on, that the file takes with O_DIRECT; 0 if it takes none."""
    if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        return 0
    buffer = mmap.mmap(-1, _LARGEST)
    size = SECTOR
    while size <= _LARGEST:
        try:
            os.preadv(fd, [memoryview(buffer)[:size]], size)
            return size
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        size *= 2
    return 0


class Slot:
    """Memory of one request in flight: a block that is written, and a block that is read.

    number: of the file. huge: buffers are in huge pages where the kernel has some: a request to the disk
    then has fewer pieces. Buffers begin at a page, as O_DIRECT wants it.
    """

    def __init__(self, nbytes: int, number: int, huge: bool = False) -> None:
        self.nbytes = nbytes
        self._huge = huge
        self.out, self.into = self._memory(nbytes), self._memory(nbytes)
        self._words = self.out.view(np.uint64)
        self._words[:] = np.random.default_rng(number).integers(0, 1 << 64, nbytes // _WORD, np.uint64)
        self._stamps = self._words[:: SECTOR // _WORD]
        self._ramp = np.arange(self._stamps.size, dtype=np.uint64) * np.uint64(_ODD)
        self.seen = memoryview(self.into).cast("Q")  # the words that were read
        self.last = (nbytes - SECTOR) // _WORD  # the place of the last stamp

    def _memory(self, nbytes: int) -> np.ndarray:
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if not self._huge:
            array = np.frombuffer(mmap.mmap(-1, nbytes, flags=kind), np.uint8)
        else:
            memory = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE + _HUGE, flags=kind)
            memory.madvise(mmap.MADV_HUGEPAGE)
            start = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE
            array = np.frombuffer(memory, np.uint8)[start : start + nbytes]
        array.fill(1)  # the first touch, by this thread
        return array

    def stamp(self, first: np.uint64) -> None:
        """Make the block to be written the block whose first stamp is `first`: one of `stamps`."""
        np.add(self._ramp, first, self._stamps)

    def write(self, fd: int, offset: int) -> int:
        """The timed part of a write; bytes written."""
        return os.pwritev(fd, [self.out], offset)

    def read(self, fd: int, offset: int) -> int:
        """The timed part of a read; bytes read."""
        return os.preadv(fd, [self.into], offset)

    def right(self) -> bool:
        """Whether the block that was read is the block that `stamp` made."""
        return np.array_equal(self.arrived().view(np.uint64), self._words)

    def arrived(self) -> np.ndarray:
        """The block that was read, as the reader gets it."""
        return self.into


class GPUSlot(Slot):
    """Its blocks come from a GPU, and go there, by pinned memory. Never run on a GPU."""

    def __init__(self, nbytes: int, number: int, device: Device) -> None:
        self._device = device
        super().__init__(nbytes, number)
        self._source, self._target = (device.buffer(nbytes, np.uint8) for _ in range(2))
        device.copy(self._source, self.out)
        device.current_stream.synchronize()

    def _memory(self, nbytes: int) -> np.ndarray:
        memory = self._device.pinned(nbytes + mmap.PAGESIZE, np.uint8)
        start = -memory.ctypes.data % mmap.PAGESIZE
        return memory[start : start + nbytes]

    def write(self, fd: int, offset: int) -> int:
        """A copy from the GPU, the stamps, and the write."""
        kept = self._stamps.copy()
        self._device.copy(self.out, self._source)
        self._device.current_stream.synchronize()
        self._stamps[:] = kept
        return super().write(fd, offset)

    def read(self, fd: int, offset: int) -> int:
        """The read, and the copy to the GPU."""
        count = super().read(fd, offset)
        self._device.copy(self._target, self.into)
        self._device.current_stream.synchronize()
        return count

    def arrived(self) -> np.ndarray:
        """The block that was copied to the GPU."""
        return self._device.to_numpy(self._target)


def stamps(number: int, sectors: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """First words of sectors: modulo 2^64, a step of an odd number for each sector, round and file."""
    steps = sectors.astype(np.uint64) * np.uint64(_ODD) + rounds.astype(np.uint64) * np.uint64(_ROUND)
    return steps + np.uint64(number * _FILE % (1 << 64))


@dataclass
class Lap:
    """One pass over the blocks of a worker. Arrays are by request; a request that was not made stops at 0.

    round_: what its writes carry. firsts: the first stamps of the blocks, as they are to be read or written.
    """

    order: list[int]
    reading: list[bool]
    round_: int
    firsts: np.ndarray
    turns: Iterator[int] = field(init=False)  # shared by threads; Python's lock makes each turn go to one
    starts: array = field(init=False)  # nanoseconds
    stops: array = field(init=False)
    first: array = field(init=False)  # stamps that were read
    last: array = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.order)
        self.turns = iter(range(count))
        self.starts, self.stops = (array("q", bytes(_WORD * count)) for _ in range(2))
        self.first, self.last = (array("Q", bytes(_WORD * count)) for _ in range(2))

    @property
    def done(self) -> np.ndarray:
        """Which requests were made."""
        return np.asarray(self.stops) > 0


class Worker:
    """Blocks of a file, and the threads that make requests for them.

    Args:
        first: the first byte of the file that is its own; it has `blocks` of `size` bytes.
        slots: one for each request in flight.
        seed: of orders that are random.
        cores: where its threads run; None: anywhere.
    """

    def __init__(
        self,
        file: File,
        first: int,
        blocks: int,
        size: int,
        slots: Sequence[Slot],
        seed: Sequence[int] = (0,),
        cores: set[int] | None = None,
    ) -> None:
        self.file, self.first, self.blocks, self.size, self.slots = file, first, blocks, size, slots
        self.rounds = np.zeros(blocks, np.int64)  # that the blocks on the disk are of
        self.laps: list[Lap] = []
        self._random = np.random.default_rng(list(seed))
        self._cores = cores

    def begin(self, pattern: Pattern, duration: float) -> None:
        """Get ready for a run of at least one pass, or of `duration` seconds if that is not 0."""
        self.laps = [self._lap(pattern)]
        self._pattern, self._duration = pattern, duration
        self.deadline = _NEVER
        self._again = threading.Barrier(len(self.slots), self._next)
        self._more = False
        self._read_the_disk()

    def _lap(self, pattern: Pattern) -> Lap:
        order = pattern.order(self.blocks, self._random)
        reading = pattern.reading(self.blocks, self._random)
        round_ = int(self.rounds.max()) + 1
        firsts = self._firsts(order, np.where(reading, self.rounds[order], round_))
        return Lap(order.tolist(), reading.tolist(), round_, firsts)

    def _firsts(self, blocks: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        """The first stamps of blocks."""
        return stamps(self.file.number, (self.first + blocks * self.size) // SECTOR, rounds)

    def serve(self, slot: Slot) -> None:
        """A thread's part of a run."""
        with numa.on(self._cores):
            self._serve(slot, self.laps[-1])
            while self._duration:
                self._again.wait()
                if not self._more:
                    return
                self._serve(slot, self.laps[-1])

    def _next(self) -> None:
        """While all threads wait: go on to another lap, until time is over."""
        self.settle()
        self._more = time.perf_counter_ns() < self.deadline
        if self._more:
            self.laps.append(self._lap(self._pattern))
            self._read_the_disk()

    def _read_the_disk(self) -> None:
        """Let reads come from the disk and not from the page cache, which O_DIRECT does not use."""
        if not self.file.direct and self._pattern.reads:
            self.file.forget()

    def settle(self) -> None:
        """Note what the last lap has written."""
        lap = self.laps[-1]
        wrote = lap.done & ~np.array(lap.reading)
        self.rounds[np.array(lap.order)[wrote]] = lap.round_

    def _serve(self, slot: Slot, lap: Lap) -> None:
        now, fd, size, last = time.perf_counter_ns, self.file.fd, self.size, slot.last
        for turn in lap.turns:
            offset = self.first + lap.order[turn] * size
            reads = lap.reading[turn]
            if not reads:
                slot.stamp(lap.firsts[turn])
            start = now()
            if start >= self.deadline:
                return
            count = slot.read(fd, offset) if reads else slot.write(fd, offset)
            lap.stops[turn] = now()
            lap.starts[turn] = start
            if reads:
                lap.first[turn], lap.last[turn] = slot.seen[0], slot.seen[last]
            if count != size:
                raise OSError(f"{count} of {size} bytes were {'read' if reads else 'written'} at {offset}")

    def abort(self) -> None:
        """Let threads end after the requests that are in flight."""
        self.deadline = 0
        self._again.abort()

    def wrong_stamps(self) -> int:
        """Reads of the last run whose first or last sector was of another place, round or file."""
        wrong = 0
        for lap in self.laps:
            to_last = np.uint64((self.size // SECTOR - 1) * _ODD % (1 << 64))
            off = (np.asarray(lap.first) != lap.firsts) | (np.asarray(lap.last) != lap.firsts + to_last)
            wrong += int((off & lap.done & np.array(lap.reading)).sum())
        return wrong

    def wrong_blocks(self) -> int:
        """Read all blocks once more, and compare every byte. Blocks that are wrong."""
        slot, wrong = self.slots[0], 0
        for block, first in enumerate(self._firsts(np.arange(self.blocks), self.rounds)):
            offset = self.first + block * self.size
            slot.stamp(first)
            wrong += slot.read(self.file.fd, offset) != self.size or not slot.right()
        return wrong


@dataclass(frozen=True)
class Run:
    """What the requests of a run took. seconds: until the last is done, and written out if buffered.

    latencies: microseconds of each request. moved: bytes. read: those of them that were read.
    """

    seconds: float
    latencies: np.ndarray
    moved: int
    read: int


def run(
    workers: Sequence[Worker], pattern: Pattern, duration: float = 0.0, device: Device | None = None
) -> Run:
    """Make all requests of a pattern. device: the current one of the threads.

    Raises:
        OSError: of the first request that failed.
    """
    for worker in workers:
        worker.begin(pattern, duration)
    errors: list[BaseException] = []
    jobs = [(worker, slot) for worker in workers for slot in worker.slots]
    gate = threading.Barrier(len(jobs) + 1)

    def work(worker: Worker, slot: Slot) -> None:
        try:
            if device is not None:
                devices.set_current(device)
            gate.wait()
            worker.serve(slot)
        except threading.BrokenBarrierError:
            pass  # another thread has failed
        except BaseException as error:
            errors.append(error)
            for each in workers:
                each.abort()

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    try:
        for thread in threads:
            thread.start()
        begin = time.perf_counter_ns()
        for worker in workers:
            worker.deadline = begin + round(1e9 * duration) if duration else _NEVER
        gate.wait()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C
        gate.abort()
        for worker in workers:
            worker.abort()
        for thread in threads:
            if thread.ident is not None:
                thread.join()  # its file is closed next
        raise
    if errors:
        raise errors[0]
    return _result(workers, pattern, begin, bool(duration))


def _result(workers: Sequence[Worker], pattern: Pattern, begin: int, settled: bool) -> Run:
    buffered = [worker.file for worker in workers if not worker.file.direct]
    if pattern.reads < 100 and buffered:
        for file in buffered:
            file.write_out()
        end = time.perf_counter_ns()
    else:
        end = max(max(lap.stops) for worker in workers for lap in worker.laps)
    if not settled:
        for worker in workers:
            worker.settle()
    laps = [(worker.size, lap) for worker in workers for lap in worker.laps]
    taken = [(np.asarray(lap.stops) - np.asarray(lap.starts))[lap.done] / 1e3 for _, lap in laps]
    moved = sum(size * int(lap.done.sum()) for size, lap in laps)
    read = sum(size * int((lap.done & np.array(lap.reading)).sum()) for size, lap in laps)
    return Run((end - begin) / 1e9, np.concatenate(taken), moved, read)
