"""What holds on one host holds on several: the contract of communicators, strategies, memory, training.

`make hosts` runs all of it.
"""

import re
import subprocess
import sys

import pytest

from shardrt.comm import create
from tests import lab
from tests.failures.matrix import prepare
from tests.hosts.hosts import Hosts
from tests.hosts.restarts import losses
from tests.hosts.test_failures import Job
from tests.mpi.contract import digest
from tests.ranks import BACKSTOP, ROOT, clean_environment, open_mpi, run_ranks

pytestmark = pytest.mark.mpi
QUICK = "TestNodes and (its_bits or crosses)"
SUMS = """
import os
import numpy as np
from shardrt.comm import create
from tests.mpi.contract import INLINE, digest
made, n = create("auto"), 100_001
gathered, output = made.allocate(made.size * n, np.float32, shared=True), np.zeros(n, np.float32)
gathered[made.rank * n : (made.rank + 1) * n] = made.rank
made.all_gather(gathered, stream=INLINE)
columns = gathered.reshape(made.size, n)[:, [0, -1]]
assert np.array_equal(columns[:, 0], np.arange(made.size)) and np.array_equal(*columns.T)
made.reduce_scatter(output, made.allocate(made.size * n, np.float32, shared=False), stream=INLINE)
across = made.bytes_across / output.nbytes
os.write(1, f"{made.rank} {type(made).__name__} {across:g} {digest(made)}\\n".encode())
"""
OF_THREADS = [
    (
        "tests/checkpoint/test_checkpoints.py",
        "resumed_run and (FULL_SHARD-False or bfloat16-True) or another_model_is",
    ),
    ("tests/fsdp/test_equal_to_one_rank.py", "unsharded_model and (4-Net or 4-Tied or 3-Frozen)"),
    ("tests/parity/test_features.py", "twins and (2-FULL or 4-)"),
]


def strategies(*precisions, size=4):
    """The lines of tests/hosts/strategies.py."""
    return lab.printed(size, "-m", "tests.hosts.strategies", *precisions)


@pytest.mark.parametrize("chosen", [QUICK, pytest.param("TestNodes", marks=pytest.mark.hosts)])
def test_the_contract_holds_between_hosts_with_the_bits_of_threads(hosts, chosen):
    lines = lab.printed(4, "-m", "tests.mpi", "-k", f"({chosen}) and not test_training")
    expected = run_ranks(4, lambda: digest(create()))
    found = set(re.findall(r"digest (\d+) ([0-9a-f]{64})", "\n".join(lines)))
    assert found == {(str(rank), bits) for rank, bits in enumerate(expected)}


@pytest.mark.hosts
@pytest.mark.parametrize(("slots", "chosen"), [(2, "not TestNodes"), (1, "TestMPI"), (1, "not TestMPI")])
def test_all_else_holds_between_two_hosts_of_two_ranks_and_of_one(slots, chosen):
    """Links, every strategy, precision and offload; plain MPI's contract is that of two ranks."""
    with Hosts(2, slots) as made, made.launching():
        lab.printed(2 * slots, "-m", "tests.mpi", "-k", chosen)


@pytest.mark.hosts
def test_the_contract_and_strategies_hold_between_hosts_under_open_mpi(hosts):
    expected = strategies("float32")
    with Hosts(mpirun=open_mpi()) as made, made.launching():
        assert sorted(strategies("float32")) == sorted(expected)
        lab.printed(4, "-m", "tests.mpi", "-k", "TestNodes")


@pytest.mark.hosts
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float32-bfloat16"])
def test_strategies_give_the_same_bits_wherever_ranks_are(hosts, precision):
    layouts = {}
    for count, slots in ((2, 2), (4, 1), (1, 4)):
        with Hosts(count, slots) as made, made.launching():
            layouts[count] = [line.split() for line in strategies(precision)]
    kinds = {count: {row[2] for row in rows} for count, rows in layouts.items()}
    assert kinds == {2: {"HierarchicalCommunicator"}, 4: {"MPICommunicator"}, 1: {"ShmCommunicator"}}
    for rows in layouts.values():
        assert len(rows) == 6
    assert len({row[3] for rows in layouts.values() for row in rows}) == 1


@pytest.mark.hosts
@pytest.mark.parametrize("count", [3, 4])
def test_three_and_four_hosts_of_two_ranks_have_the_bits_of_one(count):
    """Sums of each host first, where there are three of them, too; hybrids whose shards lie across hosts."""
    size, precisions = 2 * count, ("float32", "float32-bfloat16")
    with Hosts(count, 2) as made, made.launching():
        sums, found = lab.printed(size, "-c", SUMS), strategies(*precisions, size=size)
    with Hosts(1, size) as made, made.launching():
        expected = strategies(*precisions, size=size)
    digests = run_ranks(size, lambda: digest(create()))
    message = f"HierarchicalCommunicator {2 * (count - 1)}"  # a slice and a sum to each of the other hosts
    assert sorted(sums) == [f"{rank} {message} {bits}" for rank, bits in enumerate(digests)]
    of_hosts, of_one = ([line.split() for line in lines] for lines in (found, expected))
    assert {row[2] for row in of_hosts} == {"HierarchicalCommunicator"} and len(of_hosts) == 12
    assert [row[:2] + row[3:] for row in of_hosts] == [row[:2] + row[3:] for row in of_one]


@pytest.mark.hosts
@pytest.mark.parametrize(("path", "chosen"), OF_THREADS)
def test_what_threads_show_holds_for_processes_on_hosts(path, chosen):
    """What equals one rank, PyTorch, and a run that never stopped: by the same tests, with other ranks."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.hosts.plugin", path, "-k", chosen]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=clean_environment(), timeout=BACKSTOP
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    if " passed" not in done.stdout:
        pytest.skip(f"{path}: {done.stdout.splitlines()[-1]}")  # as without PyTorch


@pytest.mark.hosts
def test_a_run_over_a_link_that_loses_packets_has_the_losses_and_weights_of_one_that_loses_none(tmp_path):
    prepare(tmp_path)
    found = {}
    for name, how in (("whole", {}), ("lossy", {"loss": 0.01, "latency": 5e-4})):
        with Hosts(shared=[tmp_path], **how) as made, made.launching():
            job = Job(tmp_path, name, "--steps", "12")
            assert job.ended(BACKSTOP) == 0, job.out + job.err
            assert not how or made.lost(0) and made.lost(1)
        run = tmp_path / "runs" / name
        weights = {path.name: path.read_bytes() for path in run.glob("checkpoint/*.safetensors")}
        found[name] = losses(tmp_path, name), weights
    assert len(found["whole"][0]) == 12 and found["whole"][1]
    assert found["lossy"] == found["whole"]
