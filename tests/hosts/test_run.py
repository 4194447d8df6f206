"""`shardrt run` on hosts: a job that loses a host, or a rank, goes on to the losses of a whole one."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from models import train
from shardrt.comm import thread
from shardrt.train.job import launch
from shardrt.train.metrics import read_metrics
from tests.failures.matrix import prepare, survivors
from tests.hosts.hosts import Hosts, unavailable
from tests.hosts.test_failures import of_rank
from tests.ranks import clean_environment

STEPS = 14
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.hosts,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a run, whole, that nothing happened to."""
    made = prepare(tmp_path_factory.mktemp("hosts"))
    recipe = train.load(made / "tiny.toml")
    recipe = replace(recipe, steps=STEPS, report=replace(recipe.report, log_interval=1))
    before = os.getcwd()
    os.chdir(made)
    try:
        thread.run(4, launch, replace(recipe, name="whole"))
    finally:
        os.chdir(before)
    return made


def losses(folder, name):
    """By step; what was done again counts once."""
    rows = read_metrics(folder / "runs" / name / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


def until_step(job, out, step):
    deadline = time.monotonic() + 90
    while len(re.findall(r"^step ", out.read_text(errors="replace"), re.M)) < step:
        assert job.poll() is None and time.monotonic() < deadline, out.read_text(errors="replace")
        time.sleep(0.02)


@pytest.mark.parametrize("event", ["a host is lost", "the first host is lost", "a rank is killed"])
def test_a_job_goes_on_by_itself(folder, event):
    name, out = event.replace(" ", "-"), folder / f"{event}.out".replace(" ", "-")
    gone = None if event == "a rank is killed" else int(event == "a host is lost")
    mark = f"SHARDRT_CASE={out}"
    with Hosts(shared=[folder]) as made:
        with made.launching():
            environment = clean_environment(SHARDRT_CASE=str(out))
        command = [sys.executable, "-m", "shardrt", "run", "--restarts", "3", "--min-ranks", "2", "--"]
        command += [*made.launcher(), "-hosts", "node0:2,node1:2", "-n", "4"]
        command += [sys.executable, "-m", "models.train", "--config", "tiny.toml", "--name", name]
        command += ["--resume", "auto", "--steps", str(STEPS), "--report.log-interval", "1"]
        command += ["--watchdog.limit", "4", "--watchdog.save", "20", "--watchdog.evaluation", "4"]
        with open(out, "wb") as file:
            inside = made.beside(folder, *command)
            job = subprocess.Popen(inside, stdout=file, stderr=file, env=environment)
        try:
            until_step(job, out, 5)
            if gone is not None:
                made.cut(gone)
            else:
                numbers = map(int, filter(str.isdigit, os.listdir("/proc")))
                (victim,) = [pid for pid in numbers if of_rank(pid, mark, 2)]
                os.kill(victim, signal.SIGKILL)
            code = job.wait(120)
        finally:
            job.kill()
            job.wait()
            survivors(mark)
    told = out.read_text(errors="replace")
    assert code == 0, told
    assert len(re.findall(r"^shardrt run, start \d: starts", told, re.M)) == 2, told
    found, expected = losses(folder, name), losses(folder, "whole")
    assert found.keys() == expected.keys()
    if gone is not None:
        assert f"start 1: starts without node{gone}: " in told
        assert found == pytest.approx(expected, rel=1e-6, abs=0)
    else:
        assert found == expected
