"""Runs kernels/cuda on the CPU and finds races: the emulator, with every access to memory seen (shadow.h).

g++ -fsanitize=thread puts a call before each access; the functions called are ours, not ThreadSanitizer's.
Found are also shared memory that is read before the block wrote it, and accesses beyond the arrays of a
launch and beyond shared memory.
"""

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np

from tests.cuda.emulator import Emulator, Library, runtime

# With lines; no variable shared by two libraries. (ALONE leaves out the run-time library of the sanitizer.)
_OPTIONS = ("-fsanitize=thread", "-g1", "-gdwarf-4", "-fno-exceptions", "-fno-gnu-unique")
_KINDS = ("read", "write", "atomic")
_WHATS = ("race", "read before it was written", "not of an array of the launch")


class Extent(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("begin", "end", "shared", "bytes_read")]


class Side(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("kind", "where", "thread", "block")]


class Finding(ctypes.Structure):
    _fields_ = [
        ("what", ctypes.c_uint32),
        ("extent", ctypes.c_uint32),
        ("first", Side),
        ("second", Side),
        ("offset", ctypes.c_uint64),
    ]


class Race(AssertionError):
    """What was found in a launch. `lines`: of each finding, the lines of its one or two accesses."""

    def __init__(self, message: str, lines: list[tuple[str, ...]]) -> None:
        super().__init__(message)
        self.lines = lines


class Watched(Library):
    """A library whose accesses are seen."""

    def __init__(self, path: Path, defines: tuple) -> None:
        super().__init__(path, defines, _OPTIONS)
        symbols = re.findall(r"^(\w+) (\w+) (\w) (.*)$", _told(["nm", "-S", "-C", self.path]), re.MULTILINE)
        kernel = next(iter(self._texts))
        (start,) = (int(start, 16) for start, _, _, name in symbols if name == f"call_{kernel}")
        self.base = ctypes.cast(self.call(kernel), ctypes.c_void_p).value - start
        self.shared = [
            (re.sub(r".*::|\.\d+$", "", name), self.base + int(start, 16), int(size, 16))
            for start, size, kind, name in symbols
            if kind in "bBdDvVu" and not re.match(r"DW\.ref|completed|_", name)
        ]

    def lines(self, where: int) -> tuple[str, ...]:
        """The line of code at an address, then those that it was inlined into."""
        found = _told(["addr2line", "-i", "-e", self.path, hex(where - 1)])
        lines = [re.sub(r" \(.*", "", line.rpartition("/")[2]) for line in found.splitlines()]
        return tuple(line for line in lines if not line.startswith("shim.h"))


class Checker(Emulator):
    """The emulator, whose launches raise Race. `bytes_read`: of each array in the last launch."""

    bytes_read: dict[str, int] = {}  # before the first one

    def _library(self, file, defines):
        return Watched.of(self.sources / f"{file}.cu", defines)

    def _run(self, library, function, args, values, grid, threads, shared):
        names, extents = [], []
        for (_, name), arg in zip(library.parameters(function), args, strict=True):
            if isinstance(arg, np.ndarray):
                names.append(name)
                extents.append(Extent(*np.lib.array_utils.byte_bounds(arg), 0, 0))
        for name, start, size in library.shared:
            names.append(f"shared {name}")
            extents.append(Extent(start, start + size, 1, 0))
        names.append("dynamic shared memory")
        machine = runtime()
        machine.shim_watch((Extent * len(extents))(*extents), len(extents), ctypes.c_void_p(library.base))
        try:
            super()._run(library, function, args, values, grid, threads, shared)
            machine.shim_bytes_read.restype = ctypes.c_uint64
            self.bytes_read = {name: machine.shim_bytes_read(index) for index, name in enumerate(names)}
        finally:
            found = (Finding * 64)()
            count = machine.shim_findings(found, len(found))
            if count:
                raise _race(f"{library.file}.cu: {function}", library, names, found[:count], grid)


def _told(command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _race(launch, library, names, findings, grid):
    report, lines = [], []
    for finding in findings:
        sides = [finding.first, finding.second] if finding.what == 0 else [finding.first]
        lines.append(tuple(library.lines(side.where)[0] for side in sides))
        where = "" if finding.what == 2 else f" of {names[finding.extent]}, byte {finding.offset}"
        report.append(_WHATS[finding.what] + where)
        for side in sides:
            x, y, z = side.block % grid[0], side.block // grid[0] % grid[1], side.block // grid[0] // grid[1]
            places = ", from ".join(library.lines(side.where))
            report.append(
                f"    {_KINDS[side.kind]} by thread {side.thread} of block ({x}, {y}, {z}): {places}"
            )
    return Race("\n".join([launch, *report]), lines)
