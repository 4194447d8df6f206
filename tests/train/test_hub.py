"""Jobs that meet at a hub: a host that is stopped or killed is left out of outer steps, and catches up."""

import re
import signal
import subprocess
import sys
from contextlib import contextmanager

from safetensors.numpy import load_file

from tests import lab
from tests.lab import jobs
from tests.parallel.test_hub import serving, until
from tests.ranks import ROOT, clean_environment

EVERY, STEPS = 4, 160


@contextmanager
def job(folder, host, address, *more):
    """A job of one rank, as a process; its output is in a file."""
    words = jobs.arguments("--name", f"host-{host}", "--steps", str(STEPS), *more)
    words += ["--diloco.hosts", "2", "--diloco.sync-every", str(EVERY), "--diloco.host", str(host)]
    words += ["--diloco.hub", address, "--report.eval-interval", str(STEPS), "--checkpoint.every", "8"]
    environment = clean_environment() | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with open(folder / f"{host}.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardrt", "train", *words],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_host_that_is_stopped_or_killed_catches_up(tmp_path):
    folder = jobs.furnish(tmp_path)

    def said(host, words):
        return len(re.findall(words, (folder / f"{host}.log").read_text()))

    def back(process, times):
        """The other host stands still until this one has asked for the outer state."""
        until(lambda: group.fetching)
        process.send_signal(signal.SIGCONT)
        until(lambda: said(1, "caught up: goes on from step") == times)

    with serving(deadline=0.5) as (address, hub), job(folder, 0, address) as first:
        with job(folder, 1, address) as second:
            until(lambda: said(1, "step +10/"))
            group = hub._groups[0]
            second.send_signal(signal.SIGSTOP)
            passed = group.closed + 3
            until(lambda: group.closed >= passed)
            first.send_signal(signal.SIGSTOP)
            second.send_signal(signal.SIGCONT)
            back(first, 1)
            second.kill()
        passed = group.closed + 3
        until(lambda: group.closed >= passed)
        first.send_signal(signal.SIGSTOP)
        with job(folder, 1, address, "--resume", "auto") as second:
            back(first, 2)
            assert (first.wait(), second.wait()) == (0, 0)
    weights = [folder / "runs" / f"host-{host}" / "checkpoint" for host in range(2)]
    names = [next(path.glob("*.safetensors")) for path in weights]
    lab.assert_equal(*map(load_file, names))


def test_a_lost_hub_ends_a_job_with_one_line(tmp_path):
    folder = jobs.furnish(tmp_path)
    with job(folder, 0, "127.0.0.1:1") as process:
        assert process.wait() == 65
    (line,) = (folder / "0.log").read_text().splitlines()
    assert line.startswith("error: no hub at 127.0.0.1:1: ")
