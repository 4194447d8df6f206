"""What goes wrong with a host or a link: the job ends in time, with one message that names host and rank."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardrt.faults.flight import read_all
from tests.clock import whole_job
from tests.failures.matrix import LIMIT, prepare, survivors
from tests.hosts.hosts import Hosts
from tests.hosts.test_doctor import AHEAD
from tests.ranks import ROOT, clean_environment, mpirun, mpirun_path

pytestmark = [pytest.mark.mpi, pytest.mark.hosts]


FAIL = """
import numpy as np
from shardrt.comm import init_device_mesh
mesh = init_device_mesh("cpu")
stream = mesh.device.current_stream

def wait(differs=False, comm=mesh.communicator("control")):
    if differs:
        comm.barrier(stream=stream)
    comm.all_reduce(np.zeros(4, np.float32), stream=stream)

def halves(differs):
    wait(differs, mesh.communicator("control").split(mesh.rank % 2, mesh.rank))

wait()
"""


class Job:
    """The training command on hosts, in a folder that they share."""

    def __init__(self, folder: Path, name: str, *more: str, size: int = 4, **variables: str) -> None:
        self.folder, self.name = folder, name
        self.mark = f"SHARDRT_CASE={folder}/{name}"
        command = [mpirun_path(), "-n", str(size), sys.executable, "-m", "models.train"]
        command += ["--config", "tiny.toml", "--name", name, "--report.log-interval", "1", *more]
        self._files = folder / f"{name}.out", folder / f"{name}.err"
        with open(self._files[0], "wb") as out, open(self._files[1], "wb") as err:
            environment = clean_environment(SHARDRT_CASE=f"{folder}/{name}", **variables)
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=err, env=environment)

    @property
    def out(self) -> str:
        return self._files[0].read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._files[1].read_text(errors="replace")

    def pids(self, rank: int) -> list[int]:
        """The process of a rank, if it is there."""
        numbers = map(int, filter(str.isdigit, os.listdir("/proc")))
        return [pid for pid in numbers if of_rank(pid, self.mark, rank)]

    def until_step(self, step: int) -> None:
        """Return when so many steps have been reported."""
        deadline = time.monotonic() + 200
        while len(re.findall(r"^step ", self.out, re.M)) < step:
            assert self.process.poll() is None, self.out + self.err
            assert time.monotonic() < deadline, self.out + self.err
            time.sleep(0.02)

    def ended(self, seconds: float) -> int:
        """The exit code of the launcher, which comes in time, those of some jobs beside `seconds`."""
        seconds += 5 * whole_job(4)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher is there after {seconds} s: {self.out}{self.err}") from None


@contextmanager
def started(folder, name, *more, **how):
    """(hosts, the job on them)"""
    with Hosts(**{"shared": [folder]} | how) as made, made.launching():
        job = Job(folder, name, *more, size=made.slots * len(made.names))
        try:
            yield made, job
        finally:
            job.process.kill()
            job.process.wait()
            survivors(job.mark)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("hosts"))


def limit():
    """Seconds of the watchdog in every phase, which a slow machine does not need either."""
    return max(LIMIT, 2 * whole_job(4))


def limits():
    """Options that set it."""
    return [w for which in ("limit", "save", "evaluation") for w in (f"--watchdog.{which}", str(limit()))]


@pytest.mark.parametrize(("count", "host"), [(2, 1), (2, 0), (3, 2), (3, 0)])
def test_a_host_that_disappears_is_named_with_its_ranks_by_one_of_the_others(folder, count, host):
    with started(folder, f"cut-{host}-of-{count}", *limits(), count=count) as (made, job):
        job.until_step(3)
        made.cut(host)
        assert job.ended(limit() + 30) == 124, job.err
        (said,) = re.findall(r"^ranks? .* behind: .*$", job.err, re.M)
        gone = f"ranks {2 * host},{2 * host + 1} on node{host} are behind: node{host} does not answer node"
        assert said.startswith(gone) and said[len(gone)] != str(host), job.err
        assert "the link or the machine is gone" in said, job.err
        assert job.err.count("hang: ") == 1, job.err
        deadline = time.monotonic() + 100  # ranks of the other side of the cut end by themselves
        while left := [pid for rank in range(2 * count) for pid in job.pids(rank)]:
            assert time.monotonic() < deadline, f"ranks {left} are there: {job.err}"
            time.sleep(0.1)


def test_a_link_that_is_slow_for_a_while_costs_time_and_nothing_else(folder):
    with started(folder, "slow", "--steps", "12") as (made, job):
        job.until_step(3)
        made.shape("2mbit", [1])
        job.until_step(5)
        made.shape("1gbit", [1])
        assert job.ended(400) == 0, job.err


def test_a_link_that_stays_slow_ends_the_job_and_is_named(folder):
    with started(folder, "slower", *limits()) as (made, job):
        job.until_step(3)
        made.shape("50kbit", [1])
        assert job.ended(limit() + 60) == 124, job.err
        assert re.search(r"^(no rank|ranks? \d).* behind.*(node0|node1)", job.err, re.M), job.err


def test_a_dev_shm_without_room_on_one_host_is_one_error_that_names_it(folder):
    with started(folder, "full", shm=["256m", "256k"]) as (_, job):
        assert job.ended(60) == 2, job.err
        (said,) = job.err.splitlines()
        assert said.startswith("error: /dev/shm has 256 KiB free")
        assert "of host node1" in said and "rank 2" in said


def test_a_folder_that_only_some_hosts_share_is_one_error_that_names_them(folder):
    with Hosts(shared=[folder]) as made, made.launching():
        (folder / "runs").mkdir(exist_ok=True)
        made.run(1, ["sh", "-c", f"mount -t tmpfs none {folder}/runs"])
        job = Job(folder, "apart")
        assert job.ended(60) == 65, job.out + job.err
        (said,) = re.findall(r"^error: .*$", job.err, re.M)
        assert "ranks 2,3 on node1 do not see what rank 0 on node0 has written" in said


def test_a_clock_that_is_ahead_is_told_and_spoils_no_record(folder):
    ahead = folder / "ahead"
    ahead.mkdir()
    (folder / "sitecustomize.py").write_text(AHEAD)
    with Hosts(shared=[folder]) as made, made.launching():
        made.run(1, ["mount", "--bind", str(folder), str(ahead)])
        job = Job(folder, "early", "--steps", "3", PYTHONPATH=f"{ROOT}:{ahead}")
        assert job.ended(60) == 0, job.err
    assert "clocks differ from the clock of node0: node1 +100 s" in job.err
    flights, message = read_all(folder / "runs" / "early" / "flight")
    assert not message and len(flights) == 4
    lives = [flight.life for flight in flights]
    assert max(lives) - min(lives) < 50
    assert max(flight.began for flight in flights) - min(flight.began for flight in flights) > 80


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("raise ValueError(f'boo on {mesh.rank}')", "ValueError: boo on "),
        ("mesh.rank == 3 or wait()", "PeerFailed: rank 3 has ended, but rank "),
        ("wait(mesh.rank == 3)", "CollectiveMismatch: ranks differ in collective "),
        ("halves(mesh.rank == 3)", "CollectiveMismatch: ranks differ in collective "),
    ],
    ids=["raise", "leave", "differ", "differ in a group"],
)
def test_ranks_of_all_hosts_that_fail_alike_print_one_traceback(hosts, end, message):
    done = mpirun(4, ["-c", f"{FAIL}{end}"])
    assert done.returncode == (70 if "Mismatch" in message else 1), done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    (first,) = re.findall(r"^rank (\d) of 4 on (node\d) failed in its main thread:$", done.stderr, re.M)
    assert first[1] == f"node{int(first[0]) // 2}"
    (said,) = re.findall(rf"^[\w.]*{message}.*$", done.stderr, re.M)  # "failed as well" others may say
    assert "Mismatch" not in message or re.search(r"rank [13] called barrier\(\) on node1", said), said


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_stops_on_any_host_is_named_with_its_host(folder, rank):
    with started(folder, f"stopped-{rank}", *limits()) as (_, job):
        job.until_step(3)
        (pid,) = job.pids(rank)
        os.kill(pid, signal.SIGSTOP)
        assert job.ended(limit() + 20) == 124, job.err
        (said,) = re.findall(r"^ranks? .* behind: .*$", job.err, re.M)
        assert said.startswith(f"rank {rank} on node{rank // 2} is behind: "), job.err
        assert re.search(rf"node{rank // 2}: rank {rank} .*no sign of life", job.err), job.err


def of_rank(pid, mark, rank):
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return mark in variables and f"PMI_RANK={rank}" in variables
