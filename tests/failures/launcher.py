"""Kills of the launcher, its helper, or ranks, and a resume: `python -m tests.failures.launcher --runs 80`.

Each run is one of ten recipes and one of eight kills, at a step of its own. The ranks must be gone within
5 seconds, and the resumed run must end with the losses, evaluations and weights of one that nobody killed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from shardrt.faults.launcher import Launcher
from shardrt.train import config as settings
from shardrt.train.metrics import read_metrics
from tests.failures.matrix import survivors
from tests.lab import jobs
from tests.lab.jobs import TINY, furnish
from tests.ranks import BACKSTOP, clean_environment, mpirun_path

LIMIT = 5.0  # seconds from a kill until no rank is left
STEPS = 60
RECIPES = {
    "plain": [],
    "foreground": ["--checkpoint.in-background", "False", "--optimizer.clip-norm", "inf"],
    "accumulation": ["--micro-batches", "2"],
    "offload": jobs.ON_HOST,
    "in_backward": ["--optimizer.in-backward", "True", "--optimizer.clip-norm", "inf"],
    "bf16": ["--precision.param", "bfloat16", "--precision.reduce", "bfloat16"],
    "hybrid": jobs.HYBRID,
    "tensor": ["--parallel.tp", "2", "--parallel.sequence", "True"],
    "pipeline": ["--parallel.pp", "2", "--parallel.schedule", "ZB-H1", "--micro-batches", "4"],
    "world_invariant": jobs.INVARIANT,
}
KILL, STOP, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
# Whom to send what, one after the other. The helper is the parent of the ranks.
KILLS = {
    "helper": [("helper", KILL)],
    "helper stopped": [("helper", STOP)],
    "helper stopped, mpirun killed": [("helper", STOP), ("mpirun", KILL)],
    "mpirun terminated": [("mpirun", TERM)],
    "mpirun": [("mpirun", KILL)],
    "mpirun and helper": [("mpirun", KILL), ("helper", KILL)],
    "one rank": [("rank", KILL)],
    "all": [("mpirun", KILL), ("helper", KILL), ("ranks", KILL)],
}
SAVED = ("helper", "helper stopped", "helper stopped, mpirun killed")  # the ranks live on, and save
_TIMES = ("ms", "seconds", "tokens_per_second", "eta", "memory", "rate")  # parts of keys of what is measured


@dataclass(frozen=True)
class Run:
    """One kill of one recipe, when so many steps have been reported."""

    recipe: str
    kill: str
    step: int

    def __str__(self) -> str:
        return f"{self.recipe}: {self.kill} at {self.step}"


def runs() -> Iterator[Run]:
    """Every kill of every recipe, so that the first ten have all of both."""
    draw = random.Random(0)
    recipes, kills = list(RECIPES), list(KILLS)
    for turn in range(len(kills)):
        for place, recipe in enumerate(recipes):
            yield Run(recipe, kills[(place + turn) % len(kills)], draw.randrange(2, STEPS - 20))


def prepare(folder: Path) -> Path:
    """A folder in which the runs take place."""
    furnish(folder)
    config = replace(
        TINY,
        steps=STEPS,
        batch_size=8,
        report=replace(TINY.report, log_interval=1, eval_interval=5),
        checkpoint=settings.CheckpointConfig(every=7),
        data=(Path("text.txt"),),
    )
    settings.dump(config, folder / "tiny.toml")
    return folder


def check(run: Run, folder: Path, limit: float = LIMIT) -> float:
    """Kill a run and resume it; gives the seconds until its ranks were gone. Raises AssertionError."""
    reference = whole(folder, run.recipe)
    name = f"{run}".replace(" ", "-").replace(":", "").replace(",", "")
    mark = f"SHARDRT_CASE={folder}/{name}"
    job = start(folder, run.recipe, name, mark)
    try:
        wait_for(folder / "runs" / name / "metrics.jsonl", run.step, job)
        seconds = strike(run.kill, job, mark, limit)
    finally:
        survivors(mark)
        job.kill()
        job.wait()
    message = (folder / f"{name}.out").read_text(errors="replace")[-3000:]
    assert seconds < limit, f"{run}: ranks were there after {seconds:.1f} s\n{message}"
    kept = folder / "runs" / name
    done = max(row["step"] for row in read_metrics(kept / "metrics.jsonl") if row["kind"] == "step")
    saved = [int(path.name[5:]) for path in (kept / "checkpoints").glob("step-*")]
    if run.kill in SAVED:
        assert done in saved, f"{run}: step {done} was done, {sorted(saved)} are saved\n{message}"
    again = start(folder, run.recipe, name, mark, "--resume", "auto")
    code = again.wait(timeout=BACKSTOP)
    message = (folder / f"{name}.out").read_text(errors="replace")[-3000:]
    assert code == 0, f"{run}: resumed with code {code}\n{message}"
    found = outcome(kept)
    wrong = [
        f"{part} differ: {difference(found[part], expected)}"
        for part, expected in reference.items()
        if found[part] != expected
    ]
    assert not wrong, f"{run}: {'; '.join(wrong)}"
    return seconds


def whole(folder: Path, recipe: str) -> dict[str, Any]:
    """What a run that nobody kills comes to."""
    kept = folder / "runs" / recipe
    if not kept.exists():
        job = start(folder, recipe, recipe, "SHARDRT_CASE=none")
        assert job.wait(timeout=BACKSTOP) == 0, (folder / f"{recipe}.out").read_text()[-3000:]
    return outcome(kept)


def start(folder: Path, recipe: str, name: str, mark: str, *more: str) -> subprocess.Popen:
    """A training job; what it prints is in NAME.out."""
    size = 4 if recipe in ("hybrid", "tensor") else 2
    command = [mpirun_path(), "-n", str(size), sys.executable, "-m", "tests.train.plain"]
    variable, _, value = mark.partition("=")
    with open(folder / f"{name}.out", "ab") as out:
        return subprocess.Popen(
            [*command, "--config", "tiny.toml", *RECIPES[recipe], "--name", name, *more],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=clean_environment(**{variable: value}),
        )


def wait_for(metrics: Path, step: int, job: subprocess.Popen) -> None:
    """Return when so many steps have been reported."""
    while not metrics.exists() or metrics.read_bytes().count(b'"kind": "step"') < step:
        assert job.poll() is None, "the job has ended before it was to be killed"
        time.sleep(0.005)


def strike(kill: str, job: subprocess.Popen, mark: str, limit: float) -> float:
    """Send the signals; gives the seconds until no rank is left, or more than the limit."""
    ranks = of_ranks(mark)
    helper = int(Path(f"/proc/{next(iter(ranks)).pid}/stat").read_text().rpartition(")")[2].split()[1])
    targets = {"helper": [helper], "mpirun": [job.pid], "rank": [max(ranks).pid]}
    targets["ranks"] = [rank.pid for rank in ranks]
    began = time.monotonic()
    for whom, number in KILLS[kill]:
        for pid in targets[whom]:
            os.kill(pid, number)
    while any(rank.trouble() != "gone" for rank in ranks) and time.monotonic() <= began + limit:
        time.sleep(0.01)
    seconds = time.monotonic() - began
    if kill.startswith("helper stopped"):
        os.kill(helper, KILL)
    return seconds


def of_ranks(mark: str) -> set[Launcher]:
    """The processes of a job's ranks."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if mark.encode() in variables and any(each.startswith(b"PMI_RANK=") for each in variables):
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                found.add(Launcher(int(pid), stat[19]))
        except OSError:
            pass
    return found


def outcome(kept: Path) -> dict[str, Any]:
    """The losses, evaluations and weights of a run, without what is measured."""
    rows = read_metrics(kept / "metrics.jsonl")
    names = ("step", "loss", "norm", "lr")
    return {
        "losses": [{name: row[name] for name in names} for row in rows if row["kind"] == "step"],
        "evaluations": [
            {name: value for name, value in row.items() if not any(part in name for part in _TIMES)}
            for row in rows
            if row["kind"] == "evaluation"
        ],
        "weights": b"".join(
            path.read_bytes() for path in sorted((kept / "checkpoint").glob("*.safetensors"))
        ),
    }


def difference(found: Any, expected: Any) -> str:
    """The first rows that are not the same."""
    if isinstance(found, bytes):
        return f"{len(found)} and {len(expected)} bytes"
    steps = [[row["step"] for row in rows] for rows in (found, expected)]
    if steps[0] != steps[1]:
        return f"missing {sorted(set(steps[1]) - set(steps[0]))}, {len(found)} rows of {len(expected)}"
    return str(next(pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.failures.launcher", description=__doc__)
    parser.add_argument("--runs", type=int, default=len(RECIPES) * len(KILLS))
    given = parser.parse_args(arguments)
    began, seconds, wrong = time.monotonic(), {}, []
    with tempfile.TemporaryDirectory() as name:
        folder = prepare(Path(name))
        for run in islice(runs(), given.runs):
            try:
                seconds.setdefault(run.kill, []).append(check(run, folder))
            except (AssertionError, subprocess.TimeoutExpired) as error:
                wrong.append(str(run))
                print(error, file=sys.stderr, flush=True)
    result = {
        "runs": given.runs,
        "wrong": wrong,
        "limit_s": LIMIT,
        "seconds_until_no_rank_is_left": {
            kill: {"median": round(sorted(took)[len(took) // 2], 2), "max": round(max(took), 2)}
            for kill, took in seconds.items()
        },
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
