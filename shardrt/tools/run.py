"""`python -m shardrt run -- mpirun ... --name NAME --resume auto`: a command that fails is started again.

A job that lost a rank, a host or its patience goes on from its newest whole checkpoint, on the hosts that
still answer. One that would fail in the same way again ends with its exit code (docs/failures.md).
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardrt.faults import failure, reach
from shardrt.faults.flight import read_all
from shardrt.faults.watchdog import REPORT
from shardrt.tools.launched import Command
from shardrt.train import errors
from shardrt.untrusted import Refused, say

STOPPED, INTERRUPTED = 75, 130
AGAIN = {  # exit codes of what would come again, or was meant
    errors.USAGE: "a setting is wrong",
    errors.DATA: "a data file, a checkpoint or a folder can't be used",
    failure.MISMATCH: "ranks are out of step",
    errors.DIFFERS: "ranks differ",
    errors.NONFINITE: "numbers are not finite",
    failure.OUT_OF_MEMORY: "out of memory",
    STOPPED: "it was asked to stop, and has saved",
    INTERRUPTED: "it was interrupted",
}
_LONGEST = 60.0  # seconds between two starts
_VAIN = 3  # starts in a row that save nothing, after which there is no other
_ANSWER = 2.0  # seconds for a host
_LOOK = 0.2
_SIGNS = 1.0  # seconds between two looks at the ranks' signs of life
# Seconds without any after which a launcher is ended, which waits for ever for a host that is gone: when its
# watchdog has spoken, and when none has (the job was about to start) and a host does not answer.
_ENDING, _SILENCE = 10.0, 30.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def add_to(commands: Any) -> None:
    """Add `run` to argparse's subparsers."""
    told = "start a training command, and start it again where it was when it fails"
    parser = commands.add_parser("run", help=told, description=told)
    parser.add_argument("--restarts", type=int, default=5, help="at most (5)")
    parser.add_argument("--min-ranks", type=int, default=1, help="fewer are not started (1)")
    parser.add_argument("--back-off", type=float, default=1.0, help="seconds before the first restart (1)")
    parser.add_argument("--log", type=Path, help="a JSON line for each start and end goes to this file")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- mpirun ... --name NAME --resume auto")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Until the job is done, or would fail again; gives its exit code. Raises Refused, OSError."""
    command = Command([word for i, word in enumerate(options.command) if i or word != "--"])
    folder = run_folder(command.words)
    wait, vain = options.back_off, 0
    for start in range(options.restarts + 1):
        words, lost = _now(command, options.min_ranks)
        tell = _Log(options.log, start)
        tell(f"starts{' without ' + ', '.join(lost) if lost else ''}: {' '.join(words)}", "start", lost=lost)
        before, began = newest(folder), time.time()
        known = reach.addresses({host: None for host in command.hosts if host not in lost})
        code = _one(words, folder, known)
        saved = newest(folder)
        vain = 0 if saved > before else vain + 1
        wait = options.back_off if saved > before else min(2 * wait, _LONGEST)
        facts = {"code": code, "step": saved, "seconds": round(time.time() - began, 1)}
        if code == 0:
            tell("done", "end", **facts)
            return 0
        why = AGAIN.get(code, "")
        if not why and vain == _VAIN:
            why = f"{_VAIN} starts in a row have saved nothing"
        if not why and start == options.restarts:
            why = f"it has been restarted {start} times"
        if why:
            tell(f"ended with exit code {code}, and is not started again: {why}", "end", **facts)
            return code
        tell(f"ended with exit code {code}; step {saved} is saved; again in {wait:g} s", "end", **facts)
        time.sleep(wait)
    raise AssertionError("unreachable")


def run_folder(words: Sequence[str]) -> Path:
    """runs/NAME of a training command. Raises Refused for one that would not go on where it was."""
    text = " ".join(words)
    name = re.search(r"(?:^| )--name[ =](\S+)", text)
    if name is None or not re.search(r"(?:^| )--resume[ =]auto(?: |$)", text):
        raise Refused("run: the command needs --name NAME and --resume auto, to go on where it was")
    return Path("runs", name[1])


def newest(folder: Path) -> int:
    """The step of the newest checkpoint of a run that is whole; 0 if there is none."""
    found = [path.name[5:] for path in (folder / "checkpoints").glob("step-*") if path.is_dir()]
    return max((int(step) for step in found if step.isdigit()), default=0)


def _now(command: Command, least: int) -> tuple[list[str], list[str]]:
    """The command for the hosts that answer, and those that do not. Raises Refused where too few are left."""
    known = reach.addresses(dict.fromkeys(command.hosts))
    lost = [host for host in command.hosts if host not in reach.answering(known, _ANSWER)]
    words, ranks = command.without(lost)
    if ranks is not None and ranks < least:
        raise Refused(f"run: {ranks} ranks are left without {', '.join(lost)}, of at least {least}")
    return words, lost


def _one(words: list[str], folder: Path, known: dict[str, str]) -> int:
    """One start, to its end; gives the exit code. Signals go on to the launcher.

    known: its hosts, and their addresses.
    """
    report, began = folder / "flight" / REPORT, time.time()
    job = subprocess.Popen(words)
    handlers = {number: signal.signal(number, lambda n, _: job.send_signal(n)) for number in _FORWARDED}
    signs: list[float] = []
    quiet = looked = time.monotonic()
    try:
        while (code := job.poll()) is None:
            time.sleep(_LOOK)
            if time.monotonic() < looked + _SIGNS:
                continue
            looked = time.monotonic()
            now = [flight.beat_monotonic for flight in read_all(folder / "flight")[0]]
            if now != signs:
                signs, quiet = now, looked
            spoken = _changed(report) >= began
            silent = looked - quiet > _SILENCE and known.keys() - reach.answering(known, _ANSWER)
            if silent or (spoken and looked - quiet > _ENDING):
                return failure.HANG
        return code if code >= 0 else 128 - code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if job.poll() is None:
            job.kill()
            job.wait()


def _changed(path: Path) -> float:
    """When a file was written; 0 if it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class _Log:
    """Of one start: lines to stderr, and records to a file."""

    def __init__(self, path: Path | None, start: int) -> None:
        self._path = path
        self._start = start

    def __call__(self, text: str, what: str, **facts: Any) -> None:
        say(f"shardrt run, start {self._start}: {text}", file=sys.stderr)
        if self._path is not None:
            record = {"what": what, "start": self._start, "time": time.time(), "told": text} | facts
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
