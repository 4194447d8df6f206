"""The failures of tests/failures on ranks of two hosts: one message, its code, nobody left.

A selection; `python -m tests.failures 4 --hosts` runs every case.
"""

import pytest

from shardrt.faults.reports import LISTENING
from tests.clock import soon, whole_job
from tests.failures.matrix import LIMIT, Case, check, prepare
from tests.failures.victim import FAILURES, MISMATCHES, PHASES
from tests.hosts.hosts import Hosts

pytestmark = [pytest.mark.mpi, pytest.mark.hosts]
CASES = [
    *(Case(failure, PHASES[1 + number % 5], 4) for number, failure in enumerate((*FAILURES, *MISMATCHES))),
    *(Case(failure, "set-up", 4) for failure in ("settings", "data", "code")),
    *(Case(*kind, 4, rank=3) for kind in (("raise", "backward"), ("kill", "save"), ("loop", "forward"))),
    *(Case(*kind, 4, tp=2) for kind in (("kill", "forward"), ("loop", "backward"))),
    *(Case(*kind, 4, pp=2) for kind in (("stop", "forward"), ("raise", "backward"))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_that_fails_ends_the_job_on_all_hosts(folder, case):
    with Hosts(shared=[folder]) as made, made.launching():
        limit = max(LIMIT, 2 * whole_job(4))
        check(case, folder, grace=lambda started: LISTENING + 1 + soon(4, started / 2), limit=limit)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("hosts"))
