"""A rank that fails ends the job: at once, with one traceback that names it, and an exit code."""

import re
import subprocess
import sys
import time

import pytest

from shardrt.faults import failure
from tests.clock import soon
from tests.ranks import BACKSTOP, clean_environment, mpirun, mpirun_path

pytestmark = pytest.mark.mpi

# Some ranks meet; then rank 1 runs the case while the others wait for it in a collective.
SCRIPT = """
import sys, threading, time
import numpy as np
from shardrt.comm import init_device_mesh

mesh = init_device_mesh("cpu", communicator=sys.argv[1])
comm, stream = mesh.communicator("control"), mesh.device.current_stream
gather = mesh.device.new_stream("gather")
numbers = np.zeros(4)
comm.all_reduce(numbers, stream=stream)

def fail():
    raise ValueError("boo")

def leave():
    try:
        sys.exit(3)
    finally:
        pass

def stay():
    try:
        sys.exit(3)
    except SystemExit:
        pass

if mesh.rank == 1:
    print("raised at", time.time(), flush=True)
    {case}
{everyone}
comm.all_reduce(numbers, stream=stream)
print("done", flush=True)
"""


def run(case, communicator="shm", everyone="", size=2):
    """How `mpirun` ended; and the seconds from its start until rank 1 raised, and from then to the end."""
    began = time.time()
    done = ended_job(case, communicator, everyone, size)
    ended = time.time()
    raised = re.search(r"raised at ([\d.]+)", done.stdout)
    assert raised, done.stderr
    return done, (float(raised[1]) - began, ended - float(raised[1]))


def ended_job(case, communicator="shm", everyone="", size=2):
    """How `mpirun` ended. Where all ranks fail, the first may end rank 1 before it has printed a line."""
    return mpirun(size, ["-c", SCRIPT.format(case=case, everyone=everyone), communicator])


def in_time(times, size=2):
    """sys.exit gives all ranks _PATIENCE to leave, and a wait in MPI looks for who has left."""
    started, seconds = times
    return seconds < failure._PATIENCE + soon(size, started)


@pytest.mark.timed
@pytest.mark.parametrize(
    ("case", "where", "communicator", "size"),
    [
        ("gather.submit(fail); gather.synchronize()", "main thread", "shm", 3),
        ("threading.Thread(target=fail, name='loader').start(); time.sleep(200)", "thread loader", "mpi", 2),
    ],
    ids=["stream", "thread"],
)
def test_a_rank_that_raises_ends_the_job_with_its_traceback(case, where, communicator, size):
    """In its main thread: tests/failures/test_matrix.py."""
    done, times = run(case, communicator, size=size)
    assert (done.returncode, in_time(times, size)) == (1, True)
    assert re.findall(r"^rank \d of \d failed.*", done.stderr, re.M) == [
        f"rank 1 of {size} failed in its {where}:"
    ]
    assert done.stderr.count("ValueError: boo\n") == 1
    assert done.stdout.count("done") == 0


@pytest.mark.parametrize("communicator", ["shm", "mpi"])
def test_ranks_that_all_raise_print_one_traceback(communicator):
    done = ended_job("pass", communicator, everyone="raise ValueError(f'on rank {mesh.rank}')")
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert len(re.findall(r"failed in its main thread:", done.stderr)) == 1


@pytest.mark.timed
@pytest.mark.parametrize(
    ("case", "communicator", "code", "message"),
    [
        ("leave()", "shm", 3, "rank 1 of 2 called sys.exit(3)"),
        ("leave()", "mpi", 3, "rank 1 of 2 called sys.exit(3)"),
        ("raise KeyboardInterrupt", "shm", 130, "rank 1 of 2 was interrupted"),
    ],
)
def test_sys_exit_or_an_interrupt_on_one_rank_ends_the_job_with_its_code(case, communicator, code, message):
    done, times = run(case, communicator)
    assert (done.returncode, in_time(times)) == (code, True)
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr


def test_sys_exit_on_all_ranks_stops_nobody():
    done = ended_job("pass", everyone="time.sleep(0.2 * mesh.rank); sys.exit(75)")
    assert done.returncode == 75
    assert "called sys.exit" not in done.stderr


def test_sys_exit_that_is_caught_is_no_exit_and_ranks_may_end_at_different_times():
    done = ended_job("stay()", everyone="threading.Timer(0.1 * mesh.rank, print).start()")
    assert (done.returncode, done.stdout.count("done"), done.stderr) == (0, 2, "")


@pytest.mark.timed
@pytest.mark.parametrize(("case", "communicator"), [("raise SystemExit(3)", "shm"), ("sys.exit(0)", "mpi")])
def test_a_rank_that_just_ends_is_missed_by_those_who_wait(case, communicator):
    done, times = run(case, communicator, size=3)
    assert (done.returncode, in_time(times, 3)) == (1, True)
    assert "rank 1 has ended, but rank" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "failed as well" not in done.stderr


@pytest.mark.parametrize("communicator", ["shm", "mpi"])
def test_a_rank_that_ends_is_missed_where_a_communicator_is_made(communicator):
    """MPI makes it when all have come, and nothing ends a wait inside MPI."""
    done = ended_job("sys.exit(0)", communicator, everyone="mesh.communicator('reduce')")
    assert done.returncode == 1
    assert re.search(r"rank 1 has ended, but rank \d waits for it in split: all ranks", done.stderr)


def test_a_rank_leaves_when_its_streams_are_done_and_is_not_missed_by_groups_without_it():
    late = "part = comm.split(0 if mesh.rank != 1 else None, mesh.rank)\n"
    late += "if mesh.rank == 2: time.sleep(1.5)\n"  # rank 1 is at its exit, and its stream in this collective
    late += "comm.all_reduce(numbers, stream=gather if mesh.rank == 1 else stream)\n"
    late += "if mesh.rank == 1: sys.exit(0)\n"
    late += "if mesh.rank == 0: time.sleep(1.5)\n"  # rank 1 has left, and rank 2 waits
    late += "part.all_reduce(numbers, stream=stream); print('done', flush=True); sys.exit(0)"
    done = ended_job("pass", "mpi", everyone=late, size=3)
    assert (done.returncode, done.stdout.count("done"), done.stderr) == (0, 2, "")


ALLOCATE = (
    "import resource; resource.setrlimit(resource.{}, ({}, -1)); comm.allocate(1 << {}, 'f4', shared=False)"
)
REFUSED = {
    "files": (
        ALLOCATE.format("RLIMIT_FSIZE", "1 << 20", 20),
        2,
        "is 7340032 bytes too low for 8388608 bytes of shared memory: `ulimit -f 8192`, or more",
    ),
    "addresses": (
        ALLOCATE.format("RLIMIT_AS", "4 << 30", 30),
        81,
        "no room for 8589934592 bytes of shared memory; the address space is limited to 4295.0 MB",
    ),
    "threads": (
        'raise RuntimeError("can\'t start new thread")',
        81,
        "out of memory, or of processes (`ulimit -u`): can't start new thread",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_system_refuses_is_one_line_and_a_code(what):
    everyone, code, message = REFUSED[what]
    done = ended_job("pass", "shm", everyone=everyone)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("Abort(")]
    assert (done.returncode, len(lines)) == (code, 1), done.stderr
    assert re.match(r"error: rank \d of 2: ", lines[0]) and lines[0].endswith(message)


def test_an_aborted_job_leaves_no_segment_of_mpich_behind():
    maps = "print(''.join(line for line in open('/proc/self/maps') if 'mpich_shm_' in line), flush=True)"
    done = ended_job(f"{maps}; fail()")
    left = [line for line in done.stdout.splitlines() if "mpich_shm_" in line and "(deleted)" not in line]
    assert done.returncode == 1
    assert not left


@pytest.mark.parametrize("communicator", ["shm", "mpi"])
def test_a_rank_that_leaves_is_missed_at_the_other_end_of_a_link(communicator):
    links = "from shardrt.comm.links import Links; links = Links(mesh, {(1, 0, 'F')})\n"
    links += "if mesh.rank: links.send('F', 0, (numbers,), tag='F0'); links.finish(); sys.exit(0)\n"
    links += "for m in range(2): links.expect('F', 1, tag=f'F{m}')\n"
    links += "for m in range(2): links.receive('F', 1, tag=f'F{m}').free()"
    done = ended_job("pass", communicator, everyone=links)
    assert done.returncode == 1
    assert "PeerFailed: rank 1 has ended, but rank 0 waits for it in recv" in done.stderr


@pytest.mark.parametrize("communicator", ["shm", "mpi"])
def test_a_message_that_nobody_takes_is_a_failure(communicator):
    send = "comm.send(np.zeros(1 << 20), peer=0, stream=stream); sys.exit(0)"
    done = ended_job(send, communicator, everyone="sys.exit(0)")
    assert done.returncode == 1
    assert "rank 0 has left without what rank 1 sent it" in done.stderr


def ended(*command, **how):
    how |= {"capture_output": True, "text": True, "env": clean_environment(), "timeout": BACKSTOP}
    return subprocess.run(command, **how)


def test_a_dev_shm_without_room_is_one_error_and_no_signal():
    small = f"mount -t tmpfs -o size=256k none /dev/shm && exec {mpirun_path()} -n 2 {sys.executable} -c "
    small += "'from shardrt.comm import init_device_mesh; init_device_mesh()'"
    done = ended("unshare", "-m", "sh", "-c", small)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("no right to mount")
    assert done.returncode == 1
    assert "NoRoom: /dev/shm has 256 KiB free, and MPI needs 2148 KiB for 2 ranks" in done.stderr


def test_too_few_open_files_are_one_line_and_the_code_of_a_setting(tmp_path):
    limited = f"ulimit -n 40; exec {sys.executable} -m models.train"
    done = ended(mpirun_path(), "-n", "2", "sh", "-c", limited, cwd=tmp_path)
    assert done.returncode == 2
    message = [line for line in done.stderr.splitlines() if not line.startswith("Abort(")]
    assert len(message) == 1, done.stderr
    assert message[0].startswith("error: 40 open files are allowed on host")


def test_a_job_needs_no_temporary_directory():
    done = mpirun(
        2, ["-c", "from shardrt.comm import *; init_device_mesh('cpu'); print('met')"], TMPDIR="/proc"
    )
    assert (done.returncode, done.stdout.count("met"), done.stderr) == (0, 2, "")
