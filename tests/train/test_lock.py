"""Only one job that is alive has a run: the kernel knows, however slow the disk is."""

import subprocess
import sys
import time

import pytest

from shardrt.faults import lock as locks
from shardrt.faults.lock import Locked, lock
from shardrt.train.metrics import RunLog
from tests.lab.jobs import STEPS, launch, records, refused
from tests.ranks import clean_environment

HOLDER = """
import sys, time
from pathlib import Path
from shardrt.faults.lock import lock
held = lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process, which has the lock of the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_job_is_refused_and_told_of_the_first(tmp_path, holder, monkeypatch):
    with pytest.raises(Locked, match=rf"another job \(process {holder.pid} on .*\) is writing this run"):
        lock(tmp_path, patience=0)
    monkeypatch.setattr(locks, "_PATIENCE", 0.1)
    with pytest.raises(Locked):
        RunLog(tmp_path, resumed=True)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_job_that_was_killed_is_waited_for_and_holds_nothing(tmp_path, holder):
    began = time.monotonic()
    reaper = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {holder.pid}"])
    RunLog(tmp_path, resumed=True).close()
    assert time.monotonic() - began > 0.2  # that is, it waited
    reaper.wait()


def test_a_run_that_another_job_has_is_left_as_it_is(folder, monkeypatch, capfd):
    monkeypatch.setattr(locks, "_PATIENCE", 0.1)
    launch(1, "mine")
    metrics = folder / "runs" / "mine" / "metrics.jsonl"
    before = metrics.read_bytes()
    held = RunLog(metrics.parent, resumed=True)
    message = refused(capfd, 69, lambda: launch(1, "mine", resume="auto"))
    assert message.startswith("error: runs/mine: another job (process ")
    held.close()
    assert metrics.read_bytes() == before
    launch(1, "mine", resume="auto")
    assert len(records(folder, "mine", "step")) == STEPS


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        lock(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="the file system has no locks"):
        RunLog(tmp_path).close()
