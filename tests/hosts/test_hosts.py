"""The hosts themselves: what each has of its own, and that nothing of them is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import lab
from tests.hosts.hosts import unavailable
from tests.ranks import ROOT, clean_environment

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]
WHERE = """
import os, socket, time
from pathlib import Path
from shardrt.comm import mpi_world
here = mpi_world.of_mpi()
mine = Path(f"/dev/shm/of-{here.rank}")
mine.touch()
here.root.Barrier()
seen = "".join(sorted(path.name[3:] for path in mine.parent.glob("of-*")))
network = os.readlink("/proc/self/ns/net")
facts = here.rank, socket.gethostname(), here.local_rank, here.local_size, seen, network
here.root.Barrier()
mine.unlink()
os.write(1, (" ".join(map(str, facts)) + "\\n").encode())
"""
KEEP = """
import sys
from tests.hosts.hosts import Hosts
with Hosts(latency=1e-3) as hosts:
    print(*hosts.pids, *(process.pid for process in hosts._holding), flush=True)
    sys.stdin.read()
"""


def test_ranks_of_a_host_share_its_name_network_and_memory_and_nothing_with_the_other(hosts):
    found = [line.split() for line in sorted(lab.printed(4, "-c", WHERE))]
    assert [row[:5] for row in found] == [
        ["0", "node0", "0", "2", "01"],
        ["1", "node0", "1", "2", "01"],
        ["2", "node1", "0", "2", "23"],
        ["3", "node1", "1", "2", "23"],
    ]
    networks = [row[5] for row in found]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert os.readlink("/proc/self/ns/net") not in networks


def test_hosts_go_with_the_process_that_made_them_however_it_ends():
    holder = subprocess.Popen(
        [sys.executable, "-c", KEEP],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    pids = [int(word) for word in holder.stdout.readline().split()]
    assert len(pids) == 2 + 4  # two hosts; those that hold them, the bridge and the cables
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    before = Path("/proc/self/mounts").read_text()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    for pipe in (holder.stdin, holder.stdout):
        pipe.close()
    deadline = time.monotonic() + 100
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.01)
    assert Path("/proc/self/mounts").read_text() == before
    assert "port0" not in Path("/proc/net/dev").read_text()
