"""Kills one of two processes that save, by SIGKILL, before and after every file operation of its own.

A JSON line says what was found, after some minutes.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardrt.checkpoint import verify
from shardrt.comm import thread, world
from tests.checkpoint.victim import HOWS, Killed, change, digest, made, save
from tests.failures.matrix import survivors
from tests.lab.jobs import OPEN_MPI
from tests.ranks import BACKSTOP, ROOT, add_launcher, clean_environment, mpirun_path

RANKS = 2
LIMIT = 2.0  # seconds from the kill to the end of the job


@dataclass(frozen=True)
class Case:
    """Rank `rank` dies around its operation `at`. published: the step has its name by then."""

    how: str
    rank: int
    at: int
    when: str
    operation: str
    published: bool

    def __str__(self) -> str:
        return f"{self.how}: rank {self.rank} {self.when} {self.at} ({self.operation})"


class Job:
    """Folders as they are before a save, made by threads that nobody kills, and how to run the others."""

    def __init__(self, folder: Path, launcher: str = "", python: str = sys.executable) -> None:
        self.folder = folder
        self.command = [launcher or mpirun_path(), "-n", str(RANKS), python, "-m", "tests.checkpoint.victim"]
        (folder / "before" / "first").mkdir(parents=True)
        self.whole("first")
        for how in HOWS.keys() - {"first"}:
            shutil.copytree(folder / "whole" / "first", folder / "before" / how)

    def whole(self, how: str) -> Path:
        """The folder after a save, made if need be."""
        folder = self.folder / "whole" / how
        if not folder.exists():
            shutil.copytree(self.folder / "before" / how, folder)
            thread.run(RANKS, counted, folder, how)
        return folder

    def run(self, folder: Path, how: str, rank: int, at: int, when: str) -> tuple[int, str, float, float]:
        """(exit code, what it printed, when it began and ended)."""
        began = time.time()
        done = subprocess.run(
            [*self.command, str(folder), how, str(rank), str(at), when],
            cwd=ROOT,
            env=clean_environment(**OPEN_MPI, SHARDRT_CASE=str(folder)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=BACKSTOP,
        )
        return done.returncode, done.stdout.decode(errors="replace"), began, time.time()

    def cases(self, how: str) -> list[Case]:
        """Every operation of every rank, before and after, as a save that nobody kills does them."""
        folder, found = self.whole(how), []
        for rank in range(RANKS):
            names = json.loads((folder / f"done-{rank}").read_text())
            publishes = [bool(re.fullmatch(r"rename \.tmp-\S+ step-\d+", name)) for name in names]
            for at, name in enumerate(names):
                for when in ("before", "after"):
                    # What a killed process has renamed is renamed: only a machine that stops can lose that.
                    published = any(publishes[:at]) or (publishes[at] and when == "after")
                    found.append(Case(how, rank, at, when, name, published))
        return found

    def check(self, case: Case, limit: Callable[[float], float] = lambda started: LIMIT) -> float:
        """Run one, and start again; gives the seconds from the kill to the end. Raises AssertionError.

        limit: of those, by the seconds from the start to the kill.
        """
        folder = self.folder / "case" / case.how
        shutil.copytree(self.folder / "before" / case.how, folder)
        try:
            code, message, began, ended = self.run(folder, case.how, case.rank, case.at, case.when)
            message = f"{case}, exit code {code}\n{message[-3000:]}"
            left = survivors(f"SHARDRT_CASE={folder}")
            assert not left, f"processes {left} are left: {message}"
            assert (folder / "killed").exists() and code != 0, message
            killed, operation = json.loads((folder / "killed").read_text())
            assert operation == case.operation, f"killed at {operation}: {message}"
            look(folder, case, message)
        finally:
            shutil.rmtree(folder)
        allowed = limit(killed - began)
        assert ended - killed < allowed, f"{ended - killed:.1f} s, {allowed:.1f} allowed: {message}"
        return ended - killed


def counted(folder: Path, how: str) -> None:
    """A whole save of this rank, a thread; its operations are those of a process (`Job.check` compares)."""
    disk = Killed(folder, -1, "")
    save(folder, how, disk)
    (folder / f"done-{world.current().rank}").write_text(json.dumps(disk.done))


def look(folder: Path, case: Case, message: str) -> None:
    """The next start finds the old or the new step, to the bit, leaves nothing over, and can save again."""
    recorded = [
        [(int(step), found) for step, found in map(str.split, (folder / f"recorded-{r}").open())]
        for r in range(RANKS)
    ]
    before = [(0, None)] * RANKS if case.how == "first" else [rows[0] for rows in recorded]
    expected = [rows[-1] for rows in recorded] if case.published else before
    found = thread.run(RANKS, restored, folder / "c")
    assert [(step, step and hashed or None) for step, hashed in found] == expected, (found, recorded, message)
    root = folder / "c"
    left = sorted(path.name for path in root.iterdir()) if root.exists() else []
    assert all(re.fullmatch(r"step-\d{8}", name) for name in left), (left, message)
    for name in left:
        verify(root / name)
    assert thread.run(RANKS, saved_and_restored, root) == [True] * RANKS, message


def restored(root: Path) -> tuple[int, str]:
    """(step, hash of what this rank then holds)."""
    model, optimizer, checkpoints = made(root)
    step, _ = checkpoints.restore()
    return step, digest(model, optimizer)


def saved_and_restored(root: Path) -> bool:
    """Whether the run goes on: a later step can be saved, and comes back."""
    model, optimizer, checkpoints = made(root)
    change(model, optimizer, 9)
    expected = digest(model, optimizer)
    checkpoints.save(9)
    return restored(root) == (9, expected)


def short(job: Job) -> list[Case]:
    """Both sides of the rename, and an operation of the rank that does not rename."""
    cases = job.cases("again")
    first, second = ([case for case in cases if case.rank == rank] for rank in range(RANKS))
    rename = next(number for number, case in enumerate(first) if case.published)
    return [first[rename - 1], first[rename], second[len(second) // 2]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.checkpoint.kill_one", description=__doc__)
    everything = ",".join(HOWS)
    parser.add_argument(
        "hows", type=known, nargs="?", default=everything, help=f"of {everything}; all if left out"
    )
    add_launcher(parser)
    given = parser.parse_args(arguments)
    launcher = given.mpirun
    began, seconds, wrong, counts = time.monotonic(), [], [], {}
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name), launcher, given.python)
        for how in given.hows:
            cases = job.cases(how)
            counts[how] = [sum(case.rank == rank for case in cases) for rank in range(RANKS)]
            for case in cases:
                try:
                    seconds.append(job.check(case))
                except AssertionError as error:
                    wrong.append(str(case))
                    print(error, file=sys.stderr, flush=True)
    version = subprocess.run([launcher or mpirun_path(), "--version"], capture_output=True, text=True)
    result = {
        "command": f"python -m tests.checkpoint.kill_one {','.join(given.hows)}",
        "mpirun": next((" ".join(line.split()) for line in version.stdout.split("\n") if "." in line), ""),
        "cases_by_rank": counts,
        "cases": sum(map(sum, counts.values())),
        "wrong": wrong,
        "limit_s": LIMIT,
        "seconds_to_the_end": {
            "median": round(sorted(seconds)[len(seconds) // 2], 3),
            "max": round(max(seconds), 3),
        },
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    return bool(wrong)


def known(text: str) -> list[str]:
    hows = text.split(",")
    if not HOWS.keys() >= set(hows):
        raise ValueError(text)
    return hows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
