"""Wherever a save was when a process or the machine stopped, the next start finds a whole checkpoint."""

import re
import subprocess
import sys

import pytest

from tests.checkpoint.kill_one import RANKS, Job, short
from tests.clock import soon
from tests.ranks import BACKSTOP, ROOT, clean_environment


@pytest.mark.slow
def test_the_old_or_the_new_step_is_found_after_every_operation():
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.crash"],
        capture_output=True,
        text=True,
        timeout=BACKSTOP,
        cwd=ROOT,
        env=clean_environment(PYTHONWARNINGS="ignore"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(re.fullmatch(r"(\d+) cases\n", done.stdout).group(1)) > 180


@pytest.mark.mpi
@pytest.mark.timed
def test_of_two_processes_either_may_be_killed_at_any_operation(tmp_path):
    """A selection; `python -m tests.checkpoint.kill_one` has every operation."""
    job = Job(tmp_path)
    for case in short(job):
        job.check(case, lambda started: 1 + soon(RANKS, started))
