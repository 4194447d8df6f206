"""Jobs as people start them on several hosts, by the mpirun of MPICH and of Open MPI, and as srun does.

Nobody names a master, and every rank knows its host's ranks.
"""

import shlex
import subprocess
import sys

import pytest

from tests import ranks
from tests.hosts.hosts import HERE, Hosts
from tests.ranks import clean_environment

pytestmark = pytest.mark.mpi
WHO = """
import os, socket
from shardrt.comm import create, mpi_world
here = mpi_world.of_mpi()
made = create()
facts = here.rank, here.size, socket.gethostname(), here.local_rank, here.local_size, type(made).__name__
os.write(1, (" ".join(map(str, facts)) + "\\n").encode())
made.close()
"""
SRUN = [sys.executable, str(HERE / "as_srun.py")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("launch")
    (made / "hosts").write_text("# ours\nnode0:2\nnode1:2\n")
    (made / "slots").write_text("# ours\nnode0 slots=2\nnode1 slots=2\n")
    return made


@pytest.fixture(scope="module")
def mpich(folder):
    with Hosts(shared=[folder]) as made:
        yield made


@pytest.fixture(scope="module")
def open_mpi(folder):
    with Hosts(shared=[folder], mpirun=ranks.open_mpi()) as made:
        yield made


def who(made, folder, options, between=()):
    """By rank: size, host, rank and ranks there, communicator."""
    with made.launching():
        environment = clean_environment()
    assert not {"MASTER_ADDR", "MASTER_PORT"} & environment.keys()
    command = [*made.launcher(), *shlex.split(options), *between, sys.executable, "-c", WHO]
    inside = made.beside(folder, *command)
    done = subprocess.run(inside, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return [tuple(line.split()[1:]) for line in sorted(done.stdout.splitlines())]


KIND = "HierarchicalCommunicator"
EXPECTED = [("4", f"node{rank // 2}", str(rank % 2), "2", KIND) for rank in range(4)]


def test_ranks_of_mpich_know_their_host(mpich, folder):
    assert who(mpich, folder, "-f hosts -n 4") == EXPECTED


@pytest.mark.hosts
@pytest.mark.parametrize(
    ("launcher", "options", "between"),
    [
        ("mpich", "-hosts node0:2,node1:2 -n 4", ()),
        ("mpich", "-hosts node0,node1 -ppn 2 -n 4", ()),
        ("mpich", "-f hosts -n 4", SRUN),  # with PMI-2
        ("open_mpi", "--host node0:2,node1:2 -n 4", ()),
        ("open_mpi", "--hostfile slots -n 4", ()),
        ("open_mpi", "--hostfile slots", ()),
        ("open_mpi", "--hostfile slots --map-by ppr:2:node", ()),
        ("open_mpi", "--hostfile slots -n 4 --map-by slot:OVERSUBSCRIBE", ()),  # more ranks than cores
        ("open_mpi", "--hostfile slots -n 4", SRUN),  # with PMIx
    ],
)
def test_ranks_know_their_host_however_it_is_named(request, folder, launcher, options, between):
    assert who(request.getfixturevalue(launcher), folder, options, between) == EXPECTED
