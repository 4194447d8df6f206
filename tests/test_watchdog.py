"""The watchdog alone: when it speaks, when it is silent, and what ends a rank that can not watch itself."""

import re
import subprocess
import sys
import time

import pytest

from shardrt.comm.watchdog import Limits
from tests.ranks import ROOT, clean_environment, mpirun

# A program of its own, of one rank or several, whose last rank does something in step 1.
SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
from shardrt.comm import init_device_mesh
from shardrt.comm.watchdog import Limits, Watch

def stick():
    {case}

mesh = init_device_mesh("cpu")
control, stream = mesh.communicator("control"), mesh.device.current_stream
with Watch(mesh, Limits({limits})) as watch:
    watch.keep(Path(sys.argv[1]) if mesh.rank == 0 else None)
    watch.step(1)
    control.barrier(stream=stream)
    print("stuck at", time.time(), flush=True)
    if mesh.rank == mesh.size - 1:
        stick()
    control.barrier(stream=stream)
print("over", flush=True)
"""
HOLDS_THE_LOCK = "sum(range(10**13))"


def run(folder, case, limits, size=1):
    """(how it ended, seconds since it was stuck)"""
    code = SCRIPT.format(case=case, limits=limits)
    if size > 1:
        done = mpirun(size, ["-c", code, str(folder)], timeout=30)
    else:
        command = [sys.executable, "-c", code, str(folder)]
        environment = clean_environment()
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT, env=environment)
    return done, time.time() - float(re.search(r"stuck at ([\d.]+)", done.stdout)[1])


def test_a_rank_alone_is_watched_as_well(tmp_path):
    done, seconds = run(tmp_path / "flight", "while True: time.sleep(0.01)", "set_up=1")
    assert (done.returncode, 1 < seconds < 3) == (124, True)
    assert re.match(r"hang: no progress on rank 0 for 1\.\d s in data \(limit 1\.0 s\)", done.stderr)
    assert "rank 0  step 1, data: last done barrier #" in done.stderr
    assert " in stick" in (tmp_path / "flight" / "stacks-0.txt").read_text()
    assert (tmp_path / "flight" / "hang.txt").read_text() == done.stderr


def test_a_rank_that_holds_the_interpreter_lock_is_ended_by_the_timer_below(tmp_path):
    done, seconds = run(tmp_path / "flight", HOLDS_THE_LOCK, "set_up=1")
    assert (done.returncode, 2 <= seconds < 3.5) == (124, True)
    assert " in stick" in (tmp_path / "flight" / "stacks-0.txt").read_text()


@pytest.mark.mpi
def test_the_others_name_a_rank_that_holds_the_lock_and_have_its_stack(tmp_path):
    done, seconds = run(tmp_path / "flight", HOLDS_THE_LOCK, "set_up=1", size=2)
    assert (done.returncode, seconds < 3) == (124, True)
    assert done.stderr.count("hang: ") == 1
    assert re.search(r"^rank 1 is behind: rank 0 waits in barrier #\d+ of control$", done.stderr, re.M)
    assert " in stick" in (tmp_path / "flight" / "stacks-1.txt").read_text()
    assert "barrier" in (tmp_path / "flight" / "stacks-0.txt").read_text()


def test_what_makes_progress_or_was_stopped_as_a_whole_does_not_hang(tmp_path):
    slow = "for _ in range(8): time.sleep(0.25); watch.phase('optimizer')"
    stopped = "subprocess.run('kill -STOP $PPID; sleep 1.5; kill -CONT $PPID', shell=True)"
    for name, case in (("slow", slow), ("stopped", stopped)):
        done, seconds = run(tmp_path / name, case, "set_up=1.2")
        assert (done.returncode, done.stderr, seconds > 1.4) == (0, "", True), name
        assert "over" in done.stdout
        assert not (tmp_path / name / "stacks-0.txt").exists()


def test_without_limits_nobody_is_ended(tmp_path):
    later = "time.sleep(0.2); watch.phase('save'); time.sleep(1.8)"  # the timer below was set before
    for name, case, limits in (
        ("none", "time.sleep(2)", "0, 0, 0, 0"),
        ("later", later, "set_up=0.5, save=0"),
    ):
        done, _ = run(tmp_path / name, case, limits)
        assert (done.returncode, done.stderr) == (0, ""), name
        assert not (tmp_path / name / "stacks-0.txt").exists(), name


@pytest.mark.parametrize(
    ("phase", "steps", "median", "limit"),
    [
        ("set-up", 0, 0.0, 300),
        ("forward", 0, 0.0, 300),  # the first step: kernels are compiled
        ("forward", 1, 0.1, 30),
        ("backward", 9, 2.0, 40),  # 20 median steps
        ("save", 9, 2.0, 600),
        ("eval", 9, 2.0, 500),
        ("sample", 0, 0.0, 500),
    ],
)
def test_each_phase_has_its_limit(phase, steps, median, limit):
    assert Limits(evaluation=500).of(phase, steps, median) == limit
    assert Limits(0, 0, 0, 0).of(phase, steps, median) == 0
