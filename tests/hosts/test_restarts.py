"""`shardrt run` on hosts: a job that loses a host, or a rank, goes on to the losses of a whole one.

A few of what `python -m tests.hosts.restarts` does many times.
"""

import os
import re
import signal
import time

import pytest

from tests.hosts.restarts import Loss, furnished, lose, losses, run
from tests.hosts.test_failures import of_rank

pytestmark = [pytest.mark.mpi, pytest.mark.hosts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return furnished(tmp_path_factory.mktemp("hosts"))


@pytest.mark.parametrize(
    "loss",
    [Loss(1, 12, 0.0), Loss(0, 5, 0.05), Loss(1, 0, 1.0), Loss(0, 20, 0.0, back=6.0)],
    ids=["the other", "the first", "while it starts", "comes back"],
)
def test_a_run_that_loses_a_host_ends_with_the_losses_of_a_whole_one(folder, loss):
    result = lose(folder, f"lost-{loss.host}-{loss.step}", loss)
    assert not result["wrong"], result["wrong"]
    assert result["starts"] > bool(loss.step)  # a loaded machine may not have asked it in a second
    assert loss.back is not None or result["fewer_ranks"]


def test_a_run_that_loses_a_rank_goes_on_with_as_many_to_the_bit(folder):
    def harm(made, job):
        job.until_step(5)
        numbers = map(int, filter(str.isdigit, os.listdir("/proc")))
        (victim,) = [pid for pid in numbers if of_rank(pid, job.mark, 2)]
        os.kill(victim, signal.SIGKILL)

    job = run(folder, "killed", harm)
    assert job.code == 0, job.printed
    assert job.starts == [[], []]
    assert len(re.findall(r"^shardrt run, start \d: starts", job.printed, re.M)) == 2
    assert losses(folder, "killed") == losses(folder, "whole")


def test_hosts_with_folders_of_their_own_wait_for_the_one_that_is_lost(folder):
    def harm(made, job):
        job.until_step(12)
        made.cut(1)
        while (
            "can start 2 ranks without node1, of at least 4" not in job.printed and job.process.poll() is None
        ):
            time.sleep(0.1)
        made.mend(1)

    places = [folder / "host0", folder / "host1"]
    for place in places:
        place.mkdir()
    job = run(folder, "apart", harm, 4, places)
    assert job.code == 0, job.printed
    assert job.starts == [[], []], job.printed
    here = [sorted(path.name for path in place.glob("apart/checkpoints/*40/rank-*")) for place in places]
    assert [len(found) for found in here] == [2, 2] and here[0] != here[1]
    assert losses(folder, places[0] / "apart") == losses(folder, "whole")
