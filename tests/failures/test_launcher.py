"""A rank whose launcher is gone stops: a training run has saved then and goes on to the same bits.

A sample; `python -m tests.failures.launcher` runs every kill of every recipe. docs/explanation/failures.md
says what is promised.
"""

import contextlib
import subprocess
import sys
from dataclasses import replace

import pytest

from models import train
from shardrt.comm import thread
from shardrt.faults import guard
from shardrt.train.job import launch
from tests.clock import whole_job
from tests.failures.launcher import Run, check, of_ranks, prepare, strike
from tests.failures.matrix import survivors
from tests.ranks import ROOT, clean_environment, mpirun_path

pytestmark = [pytest.mark.mpi, pytest.mark.timed]
PROGRAM = """
import os, time
from shardrt.comm import init_device_mesh
init_device_mesh("cpu")
os.write(1, b"met\\n")
time.sleep(10000)
"""


def _limit() -> float:
    """Seconds until no rank is left: those for which a launcher may be stopped, and some jobs' time."""
    return guard._STOPPED + 5 * whole_job(2)


def test_a_run_whose_launcher_is_gone_saves_and_goes_on_to_the_same_bits(tmp_path):
    recipe = train.load(prepare(tmp_path) / "tiny.toml")
    with contextlib.chdir(tmp_path):  # the run that nobody kills
        thread.run(2, launch, replace(recipe, name="plain"))
    check(Run("plain", "helper", 12), tmp_path, _limit())


@pytest.mark.parametrize("kill", ["helper", "helper stopped, mpirun killed"])
def test_a_program_without_a_loop_ends_when_its_launcher_is_gone(tmp_path, kill):
    mark = f"SHARDRT_CASE={tmp_path}"
    job = subprocess.Popen(
        [mpirun_path(), "-n", "2", sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=clean_environment(SHARDRT_CASE=str(tmp_path)),
    )
    try:
        assert [job.stdout.readline() for _ in range(2)] == [b"met\n"] * 2
        assert len(of_ranks(mark)) == 2
        limit = _limit()
        assert strike(kill, job, mark, limit) < limit
    finally:
        survivors(mark)
        job.kill()
        job.wait()
