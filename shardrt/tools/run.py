"""`python -m shardrt run -- mpirun ... --name NAME --resume auto`: restarts a command that fails.

A job that lost a rank or a host, or that hung, continues from its newest complete checkpoint on the hosts
that still answer. A job that would fail in the same way again ends with its exit code
(docs/howto/failures.md).
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardrt.checkpoint.store import MANIFEST
from shardrt.faults import failure, reach
from shardrt.faults.flight import read_all
from shardrt.faults.lock import Locked
from shardrt.faults.watchdog import REPORT
from shardrt.tools.launched import Command
from shardrt.tools.scripts import positive, seconds, whole
from shardrt.train import errors
from shardrt.untrusted import Refused, say

STOPPED, INTERRUPTED = 75, 130
AGAIN = {  # exit codes of failures that would repeat, or of intended ends
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
_VAIN = 3  # starts in a row without a new checkpoint, after which the command gives up
_ANSWER = 2.0  # seconds for a host
_LOOK = 0.2
_SIGNS = 1.0  # seconds between two looks at the ranks' signs of life
# Seconds without a sign of life until the launcher is ended, which would wait forever for a lost host. One
# holds after the watchdog's report; the other if there is no report (at start) and a host does not answer.
_ENDING, _SILENCE = 10.0, 30.0
_QUIET = 60.0  # seconds without a sign of life until a warning, if nothing is ended
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def add_to(commands: Any) -> None:
    """Add `run` to argparse's subparsers."""
    message = "start a training command, and start it again where it was when it fails"
    parser = commands.add_parser("run", help=message, description=message)
    message = "at most so often with no newer checkpoint in between; a wait for hosts counts as one (5)"
    parser.add_argument("--restarts", type=whole, default=5, help=message)
    parser.add_argument("--min-ranks", type=positive, default=1, help="fewer are not started (1)")
    message = "seconds before the first restart, then twice as long each time, up to 60 (1)"
    parser.add_argument("--back-off", type=seconds, default=1.0, help=message)
    parser.add_argument("--log", type=Path, help="a JSON line for each start, wait and end goes to this file")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- mpirun ... --name NAME --resume auto")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run until done, a repeating failure or a stop; returns the exit code. Raises Refused, OSError."""
    command = Command([word for i, word in enumerate(options.command) if i or word != "--"])
    folder = run_folder(command.words)
    if options.log is not None:
        options.log.open("a", encoding="utf-8").close()
    least = options.min_ranks
    if command.ranks is not None and command.ranks < least:
        raise Refused(f"run: the command starts {command.ranks} ranks, fewer than --min-ranks {least}")
    patience = _Patience(options.restarts, options.back_off)
    refused: set[int] = set()  # numbers of ranks that could not share the job
    start, code = 0, errors.DATA
    with _Stop() as stop, tempfile.TemporaryDirectory(prefix="shardrt-hosts-") as scratch:
        while True:
            tell = _Log(options.log, start)
            there = reach.addresses(command.hosts)  # may be others than at the last start
            answers = reach.answering(there, _ANSWER)
            lost = [host for host in command.hosts if host not in answers]
            ranks = command.most(lost, refused)
            unknown = " (its name is not known here)"
            left_out = [host if host in there else host + unknown for host in lost]
            without = f" without {', '.join(left_out)}" if lost else ""
            if stop.asked:
                tell(f"is not started: {stop.asked} asked it to stop", "end", code=stop.code)
                return stop.code
            facts: dict[str, Any] = {}
            if ranks is not None and ranks < least:
                what, why = "wait", patience.waited()
                message = f"can start {ranks} ranks{without}, of at least {least}"
            else:
                words = command.on(lost, ranks, Path(scratch, "hosts"))
                tell(f"starts{without}: {' '.join(words)}", "start", lost=lost, ranks=ranks)
                before, began = newest(folder), time.time()
                code = _one(words, folder, {host: there[host] for host in answers}, stop, tell)
                start, what, saved = start + 1, "end", newest(folder)
                facts = {"code": code, "step": saved, "seconds": round(time.time() - began, 1)}
                if code == 0:
                    tell("done", "end", **facts)
                    return 0
                message = f"ended with exit code {code}; step {saved} is saved"
                if code == errors.USAGE and ranks is not None and ranks != command.ranks and not stop.asked:
                    refused.add(ranks)
                    tell(f"{message}; is tried with fewer ranks than {ranks}", "end", **facts)
                    continue
                why = stop.why or AGAIN.get(code, "")
                if not why:
                    why = patience.waited() if code == Locked.exit_code else patience.ended(saved > before)
            if why:
                tell(f"{message}; it is not started again: {why}", what, **facts)
                return stop.code if stop.asked and code != STOPPED else code
            tell(f"{message}; again in {patience.wait:g} s", what, **facts)
            stop.sleep(patience.wait)


class _Patience:
    """Decides whether to start again, and after which `wait`, in seconds."""

    def __init__(self, restarts: int, back_off: float) -> None:
        self._restarts, self._back_off = restarts, back_off
        self._used = self._vain = 0  # since a checkpoint was saved
        self.wait = 0.0

    def ended(self, progress: bool) -> str:
        """After a failed start: why to give up, or "". progress: whether it saved a newer checkpoint."""
        if progress:
            self._used = self._vain = 0
            self.wait = 0.0
        self._vain += not progress
        return f"{_VAIN} starts in a row have saved nothing" if self._vain == _VAIN else self.waited()

    def waited(self) -> str:
        """If no start was possible, for lack of hosts or the run's lock: why to give up, or ""."""
        self._used += 1
        self.wait = min(2 * self.wait, max(_LONGEST, self._back_off)) or self._back_off
        return f"of --restarts {self._restarts} none is left" if self._used > self._restarts else ""


class _Stop:
    """Forwards signals that ask for a stop to the job, once. `asked` names the last signal.

    An ignored signal (nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.asked, self.code = "", 0
        self._job: subprocess.Popen | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Stop":
        heeded = [number for number in _STOPS if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in heeded}
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def why(self) -> str:
        return f"{self.asked} asked it to stop" if self.asked else ""

    def start(self, words: list[str]) -> subprocess.Popen:
        """Start the job in its own process group: the terminal's signals reach it only from here."""
        self._job = subprocess.Popen(words, stdin=subprocess.DEVNULL, process_group=0)
        if self.asked:  # just now
            self._job.send_signal(self.code - 128)
        return self._job

    def sleep(self, wait: float) -> None:
        """Sleep `wait` seconds, or until a stop is asked for."""
        end = time.monotonic() + wait
        while not self.asked and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK))

    def _note(self, number: int, frame: Any) -> None:
        self.asked, self.code = signal.Signals(number).name, 128 + number
        if self._job is not None:
            self._job.send_signal(number)


def run_folder(words: Sequence[str]) -> Path:
    """runs/NAME of a training command. Raises Refused for a command that would not resume."""
    text = " ".join(words)
    name = re.search(r"(?:^| )--name[ =](\S+)", text)
    if name is None or not re.search(r"(?:^| )--resume[ =]auto(?: |$)", text):
        raise Refused(
            "run: the command needs --name NAME and --resume auto, so that a restart resumes the run"
        )
    return Path("runs", name[1])


def newest(folder: Path) -> int:
    """The step of a run's newest complete checkpoint; 0 if there is none."""
    found = [path.parent.name[5:] for path in (folder / "checkpoints").glob(f"step-*/{MANIFEST}")]
    return max((int(step) for step in found if step.isdigit()), default=0)


def _one(words: list[str], folder: Path, hosts: Mapping[str, str], stop: _Stop, tell: "_Log") -> int:
    """Run one start on these hosts (name to addresses) to its end; returns the exit code."""
    report = folder / "flight" / REPORT
    old = _written(report)
    job = stop.start(words)
    signs: list[float] = []
    reported = False
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
            spoken = _written(report) not in (None, old)
            still = looked - quiet
            away = hosts.keys() - reach.answering(hosts, _ANSWER) if still > _SILENCE else ()
            what = f"no rank has given a sign of life in {folder / 'flight'} for {still:.0f} s"
            if away or (spoken and still > _ENDING):
                why = f"{', '.join(sorted(away))} does not answer" if away else "the watchdog has spoken"
                tell(f"{what}, and {why}: the launcher is ended", "silent")
                return failure.HANG
            if still > _QUIET and not reported:
                tell(f"{what}; it is not ended", "silent")
                reported = True
        return code if code >= 0 else 128 - code
    finally:
        if job.poll() is None:
            job.kill()
            job.wait()


def _written(path: Path) -> int | None:
    """When a file was written, in ns by its file system's clock, not ours; None if there is no file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


class _Log:
    """The log of one start: lines to stderr, and records to a file. If either fails, the job goes on."""

    def __init__(self, path: Path | None, start: int) -> None:
        self._path = path
        self._start = start

    def __call__(self, text: str, what: str, **facts: Any) -> None:
        self._say(text)
        if self._path is not None:
            record = {"what": what, "start": self._start, "time": time.time(), "message": text} | facts
            try:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:
                self._say(f"the log lacks this line: {self._path}: {error.strerror}")

    def _say(self, text: str) -> None:
        try:
            say(f"shardrt run, start {self._start}: {text}", file=sys.stderr)
        except OSError:  # the reader or the terminal is gone: pending lines are dropped too
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), sys.stderr.fileno())
