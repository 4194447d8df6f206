"""What holds on one host holds on several: the contract of communicators, strategies, memory, training.

`make hosts` runs all of it.
"""

import re

import pytest

from shardrt.comm import create
from tests.hosts.hosts import Hosts, unavailable
from tests.mpi.contract import digest
from tests.ranks import mpirun, run_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]
QUICK = "TestNodes and (its_bits or crosses)"


@pytest.mark.parametrize("chosen", [QUICK, pytest.param("TestNodes", marks=pytest.mark.hosts)])
def test_the_contract_holds_between_hosts_with_the_bits_of_threads(hosts, chosen):
    done = mpirun(4, ["-m", "tests.mpi", "-k", f"({chosen}) and not test_training"], timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    expected = run_ranks(4, lambda: digest(create()))
    found = set(re.findall(r"digest (\d+) ([0-9a-f]{64})", done.stdout))
    assert found == {(str(rank), bits) for rank, bits in enumerate(expected)}


@pytest.mark.hosts
def test_links_and_every_strategy_precision_and_offload_hold_between_hosts(hosts):
    done = mpirun(4, ["-m", "tests.mpi", "-k", "TestLinks or test_training"], timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


@pytest.mark.hosts
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_strategies_give_the_same_bits_wherever_ranks_are(hosts, precision):
    layouts = {}
    for count, slots in ((2, 2), (4, 1), (1, 4)):
        with Hosts(count, slots) as made, made.launching():
            done = mpirun(4, ["-m", "tests.hosts.strategies", precision])
        assert done.returncode == 0, done.stderr
        layouts[count] = [line.split() for line in done.stdout.splitlines()]
    kinds = {count: {row[2] for row in rows} for count, rows in layouts.items()}
    assert kinds == {2: {"HierarchicalCommunicator"}, 4: {"MPICommunicator"}, 1: {"ShmCommunicator"}}
    for rows in layouts.values():
        assert len(rows) == 6
    assert len({row[3] for rows in layouts.values() for row in rows}) == 1


@pytest.mark.hosts
def test_a_link_that_loses_packets_costs_time_and_nothing_else():
    with Hosts(loss=0.01) as made, made.launching():
        lossy = mpirun(4, ["-m", "tests.hosts.strategies", "float32"])
        assert made.lost(0) and made.lost(1)
    with Hosts() as made, made.launching():
        plain = mpirun(4, ["-m", "tests.hosts.strategies", "float32"])
    assert lossy.returncode == plain.returncode == 0, lossy.stderr + plain.stderr
    assert lossy.stdout == plain.stdout
