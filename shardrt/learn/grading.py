"""Grades an answer in a process of its own, which may raise, loop, hang, print or die."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Verdict", "grade"]

COMPUTING = 4.0  # seconds of processor time that an answer may take
LOOK = 0.02  # seconds between two looks at an answer
IDLE = 100  # looks in a row at which all threads wait and none has computed, after which an answer hangs
WHOLE = 600.0  # seconds in all, on a machine that is busy with other work
KEPT = 2000  # characters of the answer's output

LOOPS = f"The answer computes for more than {COMPUTING:.0f} s. Look for a loop without an end."
HANGS = (
    "The answer waits for ever. A rank that leaves out a collective or a barrier, or calls one more, makes "
    "the other ranks wait."
)
DIED = "The process of the answer ended before the check was done, with exit code {}."


@dataclass(frozen=True)
class Verdict:
    """passed; text: what was checked, or the hint. output: the first lines that the answer printed."""

    passed: bool
    text: str
    output: str = ""


def grade(name: str, path: Path) -> Verdict:
    """The verdict about a file as an answer to the exercise of a module."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "shardrt.learn.judge", name, str(path), str(writing)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[writing],
        start_new_session=True,
    )
    os.close(writing)
    lines: list[str] = []
    kept = bytearray()
    readers = [
        threading.Thread(target=_keep_lines, args=(reading, lines), daemon=True),
        threading.Thread(target=_keep_output, args=(process, kept), daemon=True),
    ]
    for reader in readers:
        reader.start()
    wrong = _watch(process, lines)
    process.kill()
    process.wait()
    for reader in readers:
        reader.join(1.0)  # what the answer has started may still hold the pipes
    output = kept.decode(errors="replace").rstrip()
    if len(lines) >= 2:
        passed, text = json.loads(lines[1])
        return Verdict(passed, text, output)
    return Verdict(False, wrong or DIED.format(process.returncode), output)


def _watch(process: subprocess.Popen, lines: Sequence[str]) -> str:
    """Wait for the verdict, or until the answer takes too long; what is wrong then, else ""."""
    began, idle, last, allowed = time.monotonic(), 0, 0.0, 0.0
    while process.poll() is None and len(lines) < 2:
        time.sleep(LOOK)
        try:
            used = sum(psutil.Process(process.pid).cpu_times()[:2])
            asleep = _asleep(process.pid)
        except (psutil.Error, OSError):  # it has just ended, or a thread of it
            continue
        if not lines:
            allowed = used + COMPUTING
        idle = idle + 1 if lines and asleep and used == last else 0
        last = used
        if used > allowed:
            return LOOPS
        if idle > IDLE or time.monotonic() - began > WHOLE:
            return HANGS
    return ""


def _asleep(pid: int) -> bool:
    """Whether all threads of a process wait. A thread that waits for a processor does not."""
    stats = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    return all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)


def _keep_lines(descriptor: int, lines: list[str]) -> None:
    with os.fdopen(descriptor) as pipe:
        lines += (line for line in pipe)


def _keep_output(process: subprocess.Popen, kept: bytearray) -> None:
    while block := process.stdout.read1(65536):
        kept += block[: max(0, KEPT - len(kept))]
