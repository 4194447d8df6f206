"""Runs under `shardrt run` that lose a host at a random moment: `python -m tests.hosts.restarts RUNS [SEED]`.

Two hosts of two ranks; one of them, the first or the other, is cut off, and in half of the runs it comes back
after a while. Each run must end with the losses of one that nothing happened to: to the bit where all starts
had its number of ranks, to 1e-6 where one had fewer. Prints a JSON line for each, and one for all.
"""

import argparse
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.environment import facts, write_result
from shardrt.train.metrics import read_metrics
from tests.failures.matrix import prepare, survivors
from tests.hosts.hosts import Hosts
from tests.ranks import BACKSTOP, clean_environment, own_mpirun

STEPS = 40
CLOSE = 1e-6  # of losses at another number of ranks, relative
_LIMIT = "5"  # seconds of the watchdog
_LONGEST = 900.0  # seconds for all starts of a job
_LOOK = 0.01
_environments = threading.Lock()  # which are made one at a time


@dataclass(frozen=True)
class Loss:
    """Which host goes, when, and `back` seconds later it is there again; None: never.

    The moment: `late` seconds after step `step` was told; after the start where that is 0.
    """

    host: int
    step: int
    late: float
    back: float | None = None


def drawn(chance: random.Random) -> Loss:
    """One in six while the job starts, the others while it trains."""
    step = chance.randint(1, STEPS - 4) if chance.random() > 1 / 6 else 0
    late = chance.uniform(0.0, 0.1 if step else 4.0)
    return Loss(
        chance.randint(0, 1), step, late, chance.uniform(5.0, 20.0) if chance.random() < 0.5 else None
    )


def furnished(folder: Path) -> Path:
    """The folder, in which runs can be made, with one of 4 ranks on this machine that nothing happened to."""
    prepare(folder)
    command = [own_mpirun(), "-n", "4", sys.executable, *_training("whole")]
    environment = clean_environment()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=BACKSTOP
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _training(name: str) -> list[str]:
    """The command to Python for a run of this name."""
    command = ["-m", "models.train", "--config", "tiny.toml", "--name", name]
    return [*command, "--resume", "auto", "--steps", str(STEPS), "--report.log-interval", "1"]


def losses(folder: Path, name: str | Path) -> dict[int, float]:
    """By step; what was done again counts once. name: of a run, or its folder."""
    rows = read_metrics(folder / "runs" / name / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


def run(
    folder: Path,
    name: str,
    harm: Callable[[Hosts, "Job"], None],
    least: int = 2,
    places: Sequence[Path] = (),
) -> "Job":
    """A job on two hosts under `shardrt run`, to its end, to which `harm` does something.

    places: what each host has at folder/runs, where they share none.
    """
    with Hosts(shared=[folder]) as made:
        for host, place in enumerate(places):
            mount = ["mount", "--bind", str(place), str(folder / "runs")]
            made.run(host, mount)
            if not host:  # `shardrt run` is where rank 0 is
                subprocess.run(made.beside(folder, *mount), check=True)
        job = Job(folder, name, made, least, ["--checkpoint.folder", "hosts"] if places else [])
        try:
            harm(made, job)
            job.code = job.process.wait(_LONGEST)
        except subprocess.TimeoutExpired:
            job.code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()
            survivors(job.mark)
    return job


class Job:
    """The training command under `shardrt run`, as it goes on."""

    def __init__(self, folder: Path, name: str, made: Hosts, least: int, more: Sequence[str]) -> None:
        self.out, self.log = folder / f"{name}.out", folder / f"{name}.jsonl"
        self.mark = f"SHARDRT_CASE={self.out}"
        self.code: int | None = None
        with _environments, made.launching():
            environment = clean_environment(SHARDRT_CASE=str(self.out))
        command = [sys.executable, "-m", "shardrt", "run", "--restarts", "4", "--min-ranks", str(least)]
        command += ["--log", str(self.log), "--", *made.launcher(), "-hosts", "node0:2,node1:2", "-n", "4"]
        command += [sys.executable, *_training(name), *more]
        for which in ("limit", "evaluation"):
            command += [f"--watchdog.{which}", _LIMIT]
        command += ["--watchdog.save", "20", "--watchdog.set-up", "30"]
        self.began = time.monotonic()
        with open(self.out, "wb") as file:
            self.process = subprocess.Popen(
                made.beside(folder, *command),
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    @property
    def printed(self) -> str:
        return self.out.read_text(errors="replace")

    def until_step(self, step: int) -> None:
        """Return when it has told of a step, or has ended."""
        deadline = time.monotonic() + _LONGEST
        while not re.search(rf"^step +{step}/", self.printed, re.M) and self.process.poll() is None:
            assert time.monotonic() < deadline, self.printed
            time.sleep(_LOOK)

    @property
    def starts(self) -> list[list[str]]:
        """Of each, the hosts that it was without."""
        rows = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [row["lost"] for row in rows if row["what"] == "start"]


def lose(folder: Path, name: str, loss: Loss) -> dict[str, Any]:
    """One run that loses a host; what came of it. "wrong" is "" where it ended as it must."""

    def harm(made: Hosts, job: Job) -> None:
        if loss.step:
            job.until_step(loss.step)
        time.sleep(loss.late)
        made.cut(loss.host)
        if loss.back is not None:
            time.sleep(loss.back)
            made.mend(loss.host)

    job = run(folder, name, harm)
    result: dict[str, Any] = vars(loss) | {
        "code": job.code,
        "seconds": round(time.monotonic() - job.began, 1),
    }
    if job.code != 0:
        return result | {"wrong": f"exit code {job.code}: {job.printed[-6000:]}"}
    expected, found = losses(folder, "whole"), losses(folder, name)
    fewer = any(job.starts)
    off = max((abs(found[step] / expected[step] - 1) for step in found if step in expected), default=1.0)
    wrong = ""
    if found.keys() != expected.keys():
        wrong = f"steps {sorted(found.keys() ^ expected.keys())} are missing or too many"
    elif off > (CLOSE if fewer else 0.0):
        wrong = f"losses differ by {off:.2g}"
    return result | {"starts": len(job.starts), "fewer_ranks": fewer, "off": off, "wrong": wrong}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.restarts", description=__doc__)
    parser.add_argument("runs", nargs="?", type=int, default=50)
    parser.add_argument("seed", nargs="?", type=int, default=0, help="of the first; the others follow")
    parser.add_argument("--at-once", type=int, default=1, help="most of the time they wait (1)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none later than that")
    printed = "write JSON; runs that are in it are not made again"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=printed)
    given = parser.parse_args(arguments)
    last = time.monotonic() + given.seconds
    results = kept(given.output)
    seeds = set(range(given.seed, given.seed + given.runs)) - {result["seed"] for result in results}
    with tempfile.TemporaryDirectory() as name:
        folder = furnished(Path(name))
        with ThreadPoolExecutor(given.at_once) as pool:
            for done in as_completed(pool.submit(one, folder, seed, last) for seed in sorted(seeds)):
                if not done.result():
                    continue
                results = sorted([*results, done.result()], key=lambda result: result["seed"])
                print(json.dumps(done.result()), flush=True)
                if given.output:
                    printed = facts(shlex.join(["python", "-m", "tests.hosts.restarts", *arguments]))
                    write_result(given.output, printed | summary(results) | {"each": results})
    print(json.dumps(summary(results)))
    return int(any(result["wrong"] for result in results))


def kept(output: Path | None) -> list[dict[str, Any]]:
    """The runs that a file has, if it is there."""
    return json.loads(output.read_text())["each"] if output and output.exists() else []


def one(folder: Path, seed: int, last: float) -> dict[str, Any]:
    """The run of this seed; {} where it would begin too late."""
    if time.monotonic() > last:
        return {}
    return {"seed": seed} | lose(folder, f"run-{seed}", drawn(random.Random(seed)))


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all runs."""
    ended = [result for result in results if not result["wrong"]]
    again = [result for result in ended if result["starts"] > 1]
    fewer = [result for result in ended if result["fewer_ranks"]]
    return {
        "runs": len(results),
        "wrong": [result["seed"] for result in results if result["wrong"]],
        "started_again": len(again),
        "at_fewer_ranks": len(fewer),
        "largest_difference": max((result["off"] for result in fewer), default=0.0),
        "equal_to_the_bit": sum(result["off"] == 0 for result in ended),
        "seconds_each": round(sum(result["seconds"] for result in results) / max(1, len(results)), 1),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
