"""The flight recorder: the latest actions of a rank, in a file that outlives the rank.

A ring of the latest records in a memory-mapped file: a collective entered or done, a phase begun. The pages
belong to the file, so they are there after SIGKILL, and any process of the host reads them while the rank
runs, waits or is stopped. Nothing here communicates. The watchdog and `python -m shardrt doctor` read it.
"""

import mmap
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from shardrt import dtypes
from shardrt.comm.recording import MESSAGES
from shardrt.untrusted import Refused, read_regular

__all__ = ["DONE", "Flight", "read_all"]

RECORDS = 256
PHASES = (
    "set-up",
    "data",
    "forward",
    "backward",
    "optimizer",
    "report",
    "save",
    "eval",
    "sample",
    "end",
    "compile",
    "outer",
)
_IN_STEP = ("data", "forward", "backward", "optimizer", "report")
BEGUN, ENTERED, DONE = 0, 1, 2  # a phase; a collective
OPERATIONS = ("", "barrier", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
OPERATIONS += (*MESSAGES, "all_gather_bytes")

_MAGIC = b"shardrt flight 2"
# Magic, rank, size, pid, records, start (wall), host, seconds by which its clock is ahead of rank 0's.
_HEADER = struct.Struct("<16s I I I I d 64s d")
_BEAT = struct.Struct("<d d Q")  # monotonic, wall, resident bytes
_ENDED = struct.Struct("<d 232s")  # wall, how
# Number (again at the end: a record cut off by a kill shows), times, elements, step, call, codes, names.
_RECORD = struct.Struct("<Q d d q I I B B B B 24s 52s Q")
_MOST = 1 << 20  # ranks
_PEER = re.compile(r"\brank (\d{1,7})$")  # at the end of a message's record, which is kept
_BEAT_AT, _ENDED_AT, _RING_AT = 128, 192, 512
_SIZE = _RING_AT + RECORDS * _RECORD.size


class DamagedFlight(ValueError):
    """A file that is not a whole flight file."""


class Recorder:
    """Writes the flight file of one rank. Any thread may call it; a record takes no lock."""

    def __init__(self, folder: Path, rank: int, size: int, ahead: float = 0.0) -> None:
        """Make folder/rank-N.bin; if that fails, keep the records only in memory.

        Args:
            ahead: seconds by which this host's clock is ahead of rank 0's clock.
        """
        self._ahead = ahead
        self.rank = rank
        self.size = size
        self.latest = 0  # number of the record written last: it moves with every sign of progress
        self.step = 0
        self.phase = "set-up"
        self.ended = ""
        self.meshes = 0  # how many meshes have their communicators recorded
        self.inside: dict[bytes, float] = {}  # seconds in collectives so far, by communicator
        self._began = time.time()
        self._numbers = count(1)
        self._codes = {name: code for code, name in enumerate(OPERATIONS)}
        self._names: dict[str, bytes] = {}
        self._phase_code = 0
        self._file: Path | None = None
        self._memory = mmap.mmap(-1, _SIZE)
        self.move(folder)
        self._write(BEGUN, b"", 0, 0, b"", 0, 0)
        self.beat()

    @property
    def path(self) -> Path | None:
        """The flight file; None where none can be written."""
        return self._file

    def move(self, folder: Path) -> None:
        """Continue in a file of the same name in another folder, with all earlier records.

        If the system allows no file, continue without one: a full disk is no reason to stop.
        """
        host = socket.gethostname().encode()[:64]
        facts = _MAGIC, self.rank, self.size, os.getpid(), RECORDS, self._began, host, self._ahead
        _HEADER.pack_into(self._memory, 0, *facts)
        path, before = folder / f"rank-{self.rank}.bin", self._file
        try:
            os.makedirs(os.path.realpath(folder), exist_ok=True)  # the target of a link
            self._memory = _mapped_copy(path, self._memory[:])
            self._file = path
        except OSError:
            self._memory, self._file = _in_memory(self._memory[:]), None
        if before is not None:
            before.unlink(missing_ok=True)

    def mark(self, phase: str, step: int | None = None, action: str = "") -> None:
        """A phase of the program begins, of step `step` if that is a new one; or an action in it."""
        if step is not None:
            self.step = step
        self.phase, self._phase_code = phase, PHASES.index(phase)
        self._write(BEGUN, b"", 0, 0, tail(action, 52), 0, 0)

    def part(self, phase: str, action: str = "") -> None:
        """A phase inside a step begins.

        Evaluations and set-ups have forwards too: they keep their phase.

        Args:
            action: the action of a pipeline, as "F3 of stage 1".
        """
        if self.phase in _IN_STEP and (action or self.phase != phase):
            self.mark(phase, action=action)

    def around(self, facts: tuple, function: Callable[..., Any], args: tuple) -> Any:
        """Run a collective between a record that it was entered and one that it is done; gives its result."""
        start = self._write(ENTERED, *facts)
        result = function(*args)
        # Only one stream uses a communicator, so no other thread changes its sum.
        self.inside[facts[0]] = self.inside.get(facts[0], 0.0) + self._write(DONE, *facts) - start
        return result

    def facts(self, communicator: str, number: int, operation: str, unit: str, array: Any) -> tuple:
        """The recorded facts of a collective: the `number`-th call of a communicator, for `unit`."""
        names = self._names
        if unit not in names:
            names[unit] = tail(unit, 52)
        if communicator not in names:
            names[communicator] = tail(communicator, 24)
        elements, kind = (0, 0) if array is None else (array.size, dtypes.CODES[array.dtype])
        return names[communicator], number, self._codes[operation], names[unit], elements, kind

    def beat(self) -> None:
        """Record a sign of life, with the resident memory."""
        _BEAT.pack_into(self._memory, _BEAT_AT, time.monotonic(), time.time(), resident_bytes())

    def end(self, how: str) -> None:
        """Record how this rank ends; the first reason counts."""
        if how and not self.ended:
            self.ended = how
            _ENDED.pack_into(self._memory, _ENDED_AT, time.time(), _head(how, 232))
            self.beat()

    def _write(
        self,
        state: int,
        communicator: bytes,
        call: int,
        operation: int,
        unit: bytes,
        elements: int,
        kind: int,
    ) -> float:
        """Write a record; returns its time, in seconds."""
        number = next(self._numbers)  # atomic, so that threads never share a place
        now = time.monotonic()
        _RECORD.pack_into(
            self._memory,
            _RING_AT + (number - 1) % RECORDS * _RECORD.size,
            number,
            now,
            time.time(),
            elements,
            self.step,
            call,
            state,
            self._phase_code,
            operation,
            kind,
            communicator,
            unit,
            number,
        )
        self.latest = number
        return now


def _mapped_copy(path: Path, content: bytes) -> mmap.mmap:
    """Make a file with this content and map it. Its name appears when it is complete. Raises OSError."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            # Written, not left as a hole: a store into a hole of a full disk would kill the process.
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # some file systems allocate blocks only here
        with open(temporary, "r+b") as file:
            memory = mmap.mmap(file.fileno(), len(content))
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    return memory


def _in_memory(content: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    return memory


@dataclass(frozen=True)
class Record:
    """One record as it was written. Times are in seconds; `elements` of `dtype` for a collective."""

    number: int
    monotonic: float
    wall: float
    elements: int
    step: int
    call: int
    state: int
    phase: str
    operation: str
    dtype: str
    communicator: str
    unit: str

    def __str__(self) -> str:
        """The call in words: all_gather #41 of gather, 1024 of float32, unit blocks.3."""
        if self.state == BEGUN:
            return f"{self.phase}, {self.unit}" if self.unit else self.phase
        size = f", {self.elements} of {self.dtype}" if self.elements else ""
        if self.operation in MESSAGES:
            peer = self.peer(_MOST)
            message = self.unit if peer is None else _PEER.sub(f"rank {peer}", self.unit)
            return f"{self.operation} {message}{size}, of {self.communicator}"
        unit = f", unit {self.unit}" if self.unit else ""
        return f"{self.operation} #{self.call} of {self.communicator}{size}{unit}"

    def peer(self, world: int) -> int | None:
        """The world rank at the other end of a message; None if the record does not name it."""
        group, message = members(self.communicator, world), _PEER.search(self.unit)
        if group is None or message is None or int(message[1]) >= len(group):
            return None
        return group[int(message[1])]


@dataclass(frozen=True)
class Flight:
    """The contents of a flight file. Wall times, except the start, are by the clock of rank 0's host."""

    rank: int
    size: int
    pid: int
    host: str
    began: float  # wall time, by the clock of its own host
    beat_monotonic: float
    beat_wall: float
    resident: int  # bytes, at the last beat
    ended_wall: float
    ended: str  # how it ended; "" if it did not say
    records: tuple[Record, ...]  # oldest first

    @property
    def last(self) -> Record:
        """The record written last."""
        return self.records[-1]

    @property
    def open_call(self) -> Record | None:
        """The collective or message that this rank is in; if several streams are in one, the first entered.

        The program's own thread waits for messages, so a message comes before collectives (comm/links.py).
        """
        last = self.last_calls()
        still = [record for record in last.values() if record.state == ENTERED]
        return min(still, key=lambda record: (record.operation not in MESSAGES, record.number), default=None)

    @property
    def place(self) -> str:
        """The phase, and in a pipeline its action: "backward, B3 of stage 1"."""
        begun = next((record for record in reversed(self.records) if record.state == BEGUN), None)
        return self.last.phase if begun is None else str(begun)

    def last_calls(self) -> dict[str, Record]:
        """By communicator, the last record of a collective."""
        return {record.communicator: record for record in self.records if record.state != BEGUN}

    @property
    def life(self) -> float:
        """Wall time of the last sign of life."""
        return max(self.beat_wall, self.last.wall, self.ended_wall)

    @property
    def life_monotonic(self) -> float:
        """The same by the monotonic clock of its host."""
        return max(self.beat_monotonic, self.last.monotonic)


def read(path: Path) -> Flight:
    """The contents of a flight file. Raises DamagedFlight, which names the file, or OSError."""
    try:
        data = read_regular(path, _SIZE)
    except Refused as error:
        raise DamagedFlight(str(error)) from None
    if len(data) != _SIZE:
        raise DamagedFlight(f"{path}: a flight file has {_SIZE} bytes, got {len(data)}")
    magic, rank, size, pid, records, began, host, ahead = _HEADER.unpack_from(data, 0)
    whole = rank < size <= _MOST and _is_time(began) and abs(ahead) < 1e11
    if magic != _MAGIC or records != RECORDS or not whole:
        raise DamagedFlight(f"{path}: not a flight file of this version")
    found = [_record(data, place, ahead) for place in range(RECORDS)]
    ring = sorted((record for record in found if record), key=lambda record: record.number)
    if not ring:
        raise DamagedFlight(f"{path}: the file has no complete record")
    ended_wall, ended = _ENDED.unpack_from(data, _ENDED_AT)
    beat = _BEAT.unpack_from(data, _BEAT_AT)
    if not all(map(_is_time, (ended_wall, *beat[:2]))):
        raise DamagedFlight(f"{path}: the file has invalid times")
    monotonic, wall, resident = beat
    times = monotonic, wall - ahead, resident, ended_wall and ended_wall - ahead
    return Flight(rank, size, pid, _text(host), began, *times, _text(ended), tuple(ring))


def members(name: str, world: int) -> Sequence[int] | None:
    """The ranks of the communicator with this name; None if the name was too long to record."""
    found = re.search(r"^\w*(?:\[([\d:,]+)\])?(?:~\d+)?$", name)
    if not found:
        return None
    if not found[1]:
        return range(world)
    try:
        if ":" in found[1]:
            return range(*map(int, found[1].split(":")))
        return [int(rank) for rank in found[1].split(",")]
    except (ValueError, TypeError):  # no slice: a damaged name
        return None


def read_all(folder: Path) -> tuple[list[Flight], list[str]]:
    """The flights of a folder by rank, and a line for each file that can't be read or is missing."""
    flights, errors = [], []
    for path in sorted(folder.glob("rank-*.bin")):
        try:
            flights.append(read(path))
        except DamagedFlight as error:
            errors.append(str(error))
        except OSError as error:
            errors.append(f"{path}: {error.strerror}")
    flights.sort(key=lambda flight: flight.rank)
    if flights and not errors:
        missing = sorted(set(range(flights[0].size)) - {flight.rank for flight in flights})
        errors += [f"no flight file of rank {rank} in {folder}" for rank in missing]
    return flights, errors


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, MemoryError):
        return 0


def _record(data: bytes, place: int, ahead: float) -> Record | None:
    """The record at a place of the ring; None if there is no record or an incomplete one."""
    number, mono, wall, elements, step, call, *codes, name, unit, again = _RECORD.unpack_from(
        data, _RING_AT + place * _RECORD.size
    )
    state, phase, operation, kind = codes
    whole = number and number == again and (number - 1) % RECORDS == place and state <= DONE
    whole = whole and _is_time(mono) and _is_time(wall)
    if not (whole and phase < len(PHASES) and operation < len(OPERATIONS) and kind < len(dtypes.CARRIED)):
        return None
    names = PHASES[phase], OPERATIONS[operation], dtypes.CARRIED[kind], _text(name), _text(unit)
    return Record(number, mono, wall - ahead, elements, step, call, state, *names)


def _is_time(seconds: float) -> bool:
    return 0 <= seconds < 1e11  # nan is not


def tail(text: str, size: int) -> bytes:
    """The end of a name, which distinguishes it from others."""
    return text.encode()[-size:]


def _head(text: str, size: int) -> bytes:
    return " ".join(text.split()).encode()[:size]


def _text(raw: bytes) -> str:
    return "".join(c if c.isprintable() else "?" for c in raw.rstrip(b"\0").decode(errors="replace"))
