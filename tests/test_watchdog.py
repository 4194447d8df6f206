"""The watchdog alone: when it speaks, when it is silent, and what ends a rank that can not watch itself."""

import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardrt.comm import init_device_mesh
from shardrt.faults import watchdog
from shardrt.faults.watchdog import Limits, Watch
from tests.clock import soon, whole_job
from tests.ranks import mpirun, python

# A program of its own, of one rank or several, whose last rank does something in step 1.
SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
from shardrt.comm import init_device_mesh
from shardrt.faults.watchdog import Limits, Watch

def stick():
    {case}

mesh = init_device_mesh("cpu")
control, stream = mesh.communicator("control"), mesh.device.current_stream
control.barrier(stream=stream)  # or the limit would hold for the last rank's start, too
with Watch(mesh, Limits({limits})) as watch:
    watch.keep(Path(sys.argv[1]) if mesh.rank == 0 else None)
    watch.step(1)
    control.barrier(stream=stream)
    if mesh.rank == mesh.size - 1:
        print("stuck at", time.time(), flush=True)
        stick()
    control.barrier(stream=stream)
print("over", flush=True)
"""
HOLDS_THE_LOCK = "sum(range(10**13))"


def run(folder, case, limits, size=1):
    """How it ended; and the seconds until it was stuck, and since then."""
    code = SCRIPT.format(case=case, limits=limits)
    began = time.time()
    done = mpirun(size, ["-c", code, str(folder)]) if size > 1 else python("-c", code, folder)
    stuck = re.search(r"stuck at ([\d.]+)", done.stdout)
    assert stuck, (done.returncode, done.stdout, done.stderr)
    return done, float(stuck[1]) - began, time.time() - float(stuck[1])


@pytest.mark.timed
def test_a_rank_alone_is_watched_as_well(tmp_path):
    done, started, seconds = run(tmp_path / "flight", "while True: time.sleep(0.01)", "set_up=1")
    assert (done.returncode, 1 < seconds < 1 + soon(2, started)) == (124, True)
    assert re.match(r"hang: no progress on rank 0 for 1\.\d s in data \(limit 1\.0 s\)", done.stderr)
    assert "rank 0  step 1, data: last done barrier #" in done.stderr
    assert " in stick" in (tmp_path / "flight" / "stacks-0.txt").read_text()
    assert (tmp_path / "flight" / "hang.txt").read_text() == done.stderr


@pytest.mark.timed
def test_a_rank_that_holds_the_interpreter_lock_is_ended_by_the_timer_below(tmp_path):
    done, started, seconds = run(tmp_path / "flight", HOLDS_THE_LOCK, "set_up=1")
    assert (done.returncode, 2 <= seconds < 2 + soon(2, started)) == (124, True)
    assert " in stick" in (tmp_path / "flight" / "stacks-0.txt").read_text()


@pytest.mark.timed
@pytest.mark.mpi
def test_the_others_name_a_rank_that_holds_the_lock_and_have_its_stack(tmp_path):
    limit = max(1, whole_job(2))  # that a busy machine does not exceed before the rank is stuck
    limits = f"set_up={limit}"
    done, started, seconds = run(tmp_path / "flight", HOLDS_THE_LOCK, limits, size=2)
    # the other's progress and the print are two moments
    assert (done.returncode, 0.9 * limit < seconds < 1 + limit + soon(2, started)) == (124, True)
    assert done.stderr.count("hang: ") == 1
    assert re.search(r"^rank 1 is behind: rank 0 waits in barrier #\d+ of control$", done.stderr, re.M)
    assert " in stick" in (tmp_path / "flight" / "stacks-1.txt").read_text()
    assert "barrier" in (tmp_path / "flight" / "stacks-0.txt").read_text()


@pytest.mark.timed
def test_what_makes_progress_or_was_stopped_as_a_whole_or_has_no_limit_is_not_ended(tmp_path):
    limit = max(1.2, whole_job(2))  # that a busy machine does not exceed by itself
    longer = 1.25 * limit
    looks = f"time.sleep({limit / 6})"  # in which the watchdog does
    stopped = f"subprocess.run('kill -STOP $PPID; sleep {longer}; kill -CONT $PPID', shell=True)"
    cases = {
        "slow": (f"for _ in range(6): time.sleep({longer / 6}); watch.phase('optimizer')", f"set_up={limit}"),
        "stopped": (f"{looks}; {stopped}; {looks}", f"set_up={limit}"),
        "none": (f"time.sleep({longer})", "0, 0, 0, 0"),
        # the timer below was set before
        "later": (
            f"time.sleep({limit / 12}); watch.phase('save'); time.sleep({longer})",
            f"set_up={limit / 3}, save=0",
        ),
    }
    with ThreadPoolExecutor() as pool:
        ended = pool.map(lambda name: run(tmp_path / name, *cases[name]), cases)
        for name, (done, _, seconds) in zip(cases, ended, strict=True):
            assert (done.returncode, done.stderr, seconds > 1.1 * limit) == (0, "", True), name
            assert "over" in done.stdout
            assert not (tmp_path / name / "stacks-0.txt").exists(), name


@pytest.mark.parametrize(
    ("phase", "steps", "median", "limit"),
    [
        ("set-up", 0, 0.0, 300),
        ("compile", 0, 0.0, 1800),
        ("forward", 0, 0.0, 300),  # the first step: kernels are compiled
        ("forward", 1, 0.1, 30),
        ("backward", 9, 2.0, 40),  # 20 median steps
        ("save", 9, 2.0, 600),
        ("eval", 9, 2.0, 500),
        ("sample", 0, 0.0, 500),
        ("end", 9, 0.1, 500),  # a picture is drawn, by what may not have been imported before
    ],
)
def test_each_phase_has_its_limit(phase, steps, median, limit):
    assert Limits(evaluation=500).of(phase, steps, median) == limit
    assert Limits(0, 0, 0, 0).of(phase, steps, median) == 0


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_that_is_a_link_is_used_where_it_points_to(tmp_path, there):
    scratch, link = tmp_path / "scratch", tmp_path / "flight"
    link.symlink_to(scratch)
    if there:
        scratch.mkdir()
        for name in ("rank-7.bin", "stacks-0.txt", "hang.txt", "notes.txt"):
            (scratch / name).write_text("earlier")
    with Watch(init_device_mesh("cpu")) as watch:
        watch.keep(link)
    assert link.is_symlink()
    kept = {"notes.txt"} if there else set()
    assert set(os.listdir(scratch)) == {"rank-0.bin", *kept}


@pytest.mark.parametrize("seconds", [-1, 1e-300, 0.01, 1e12, 1e300, float("inf"), float("nan")])
def test_a_limit_that_no_timer_can_keep_is_refused(seconds):
    with pytest.raises(ValueError, match=r"set_up must be 0 \(never\) or 0.05 to 1e\+07 seconds, got"):
        Limits(set_up=seconds)


ENDS = """
import atexit, os, sys, threading, time
last = os.environ["PMI_RANK"] == "1"
if last and "import" in sys.argv:
    time.sleep(1000)
if last and "after" in sys.argv:  # what is registered first runs last, after ours
    atexit.register(time.sleep, 1000)
from shardrt.comm import init_device_mesh
from shardrt.faults.watchdog import Limits, Watch
limit = float(sys.argv[2])
mesh = init_device_mesh("cpu", timeout=3 * limit)
with Watch(mesh, Limits(exit=limit)):
    pass
if last and "before" in sys.argv:
    atexit.register(time.sleep, 1000)
if last and "thread" in sys.argv:
    threading.Thread(target=time.sleep, args=(1000,), name="uploads").start()
if "threads" in sys.argv:  # of all ranks: none waits for another
    threading.Thread(target=time.sleep, args=(2.5 * limit,)).start()
"""


@pytest.mark.mpi
@pytest.mark.timed
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("import", "rank 0 of 2 has waited {} s for all ranks to come to init_device_mesh"),
        ("before", "rank 1 has been in its exit handlers for"),
        ("thread", "rank 1 has ended but for its thread 'uploads', for which others have waited"),
        ("after", "has been at its exit for {} s; the job ends with exit code 124"),
    ],
)
def test_a_rank_that_never_comes_to_mpi_or_never_leaves_ends_the_job(where, message):
    limit = max(1, round(whole_job(2)))  # that ranks which come and leave do not need
    message = message.format(3 * limit if where == "import" else limit)
    done = mpirun(2, ["-c", ENDS, where, str(limit)])
    assert (done.returncode, message in done.stderr) == (124, True), done.stderr


@pytest.mark.mpi
def test_threads_that_all_ranks_leave_are_waited_for():
    done = mpirun(2, ["-c", ENDS, "threads", "1"])
    assert (done.returncode, done.stderr) == (0, "")


def test_folders_that_killed_jobs_left_are_removed_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = ["shardrt-flight-held", "shardrt-flight-new", "shardrt-flight-report", "of-others"]
    for name in ("shardrt-flight-left", *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.bin").touch()
    (tmp_path / "shardrt-flight-report" / "hang.txt").touch()
    for name in ("shardrt-flight-left", "shardrt-flight-held", "shardrt-flight-report", "of-others"):
        os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    held = watchdog._held(tmp_path / "shardrt-flight-held")
    made = os.path.basename(watchdog._temporary_folder())
    assert sorted(os.listdir(tmp_path)) == sorted([made, *kept])
    os.close(held)
    watchdog._temporary_folder()
    assert not (tmp_path / "shardrt-flight-held").exists()
