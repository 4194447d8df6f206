"""A rank that fails, in whichever way and phase: the job ends in time, with its code and one message.

A selection; `python -m tests.failures` runs every case. docs/explanation/failures.md is the promise.
"""

import pytest

from shardrt import device
from tests.clock import soon, whole_job
from tests.failures.matrix import LIMIT, check, prepare, short

pytestmark = [pytest.mark.mpi, pytest.mark.timed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the victims run; kernels are compiled before, since set-up has a limit in some cases."""
    device.get("cpu").warm_up()
    return prepare(tmp_path_factory.mktemp("failures"))


@pytest.mark.parametrize("case", short(), ids=str)
def test_a_failure_ends_the_job_in_time_with_one_message_that_names_the_rank(case, folder):
    limit = max(LIMIT, 2 * whole_job(case.size))
    check(case, folder, grace=lambda started: 1 + soon(case.size, started / 2), limit=limit)
