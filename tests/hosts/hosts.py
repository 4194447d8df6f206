"""Hosts that are one machine: Linux namespaces with a network, a name, processes and /dev/shm of their own.

    with Hosts(2, rate="1gbit", latency=1e-3) as hosts, hosts.launching():
        mpirun(4, ["-m", "tests.mpi"])

Every host has a cable to a bridge, whose end `mpirun` has, without ranks: ranks of two hosts reach each other
over TCP alone. A process in each of them holds it, and goes when this one does, however that ends; with it
go its network, mounts and processes. Nothing of it is in the network or the mounts of the machine.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import ranks

HERE = Path(__file__).parent
ROOT = HERE.resolve().parent.parent
_ADDRESS = "10.77.0."  # of the network that is made here; the bridge is 254
BURST = 256 << 10  # bytes that a cable passes at once whatever its rate; the largest packet fits
_QUEUE = "50ms"  # of a cable: what comes later than that is lost
# $NAME, $TABLE, $SHM, $SHARED; "ready" when it is. Each is gone when its stdin ends.
_BEGIN = """set -e
hostname $NAME
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
ip link set lo up
mount -t tmpfs none /mnt
echo "$TABLE" > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
"""
_END = """
echo ready
read end
"""
# With an address of its own: else it has the lowest of its ports', and another one when that is taken out,
# at which the other hosts would go on sending to the old one for a while.
_HEAD = f"""{_BEGIN}
ip link add eth0 address 02:00:00:00:00:fe type bridge mcast_snooping 0
ip addr add {_ADDRESS}254/24 dev eth0
ip link set eth0 up
{_END}"""
_HOST = f"""{_BEGIN}
mount -t tmpfs -o size=$SHM none /dev/shm
for each in $SHARED; do
    mkdir -p /mnt/$each
    mount --bind $each /mnt/$each
done
mount -t tmpfs none /tmp
for each in $SHARED; do
    mkdir -p $each
    mount --bind /mnt/$each $each
done
{_END}"""


@cache
def unavailable() -> str:
    """Why no hosts can be made here; "" if they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "hosts are made of Linux namespaces by root"
    missing = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"hosts need {', '.join(missing)}"
    tried = subprocess.run(["unshare", *_OWN, "true"], capture_output=True, text=True)
    return f"no namespaces can be made: {tried.stderr.strip()}" if tried.returncode else ""


_OWN = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--time"]


class Hosts:
    """`count` hosts, node0, node1, ..., with `slots` ranks each, and a bridge that joins them."""

    def __init__(
        self,
        count: int = 2,
        slots: int = 2,
        *,
        rate: str = "",
        latency: float = 0.0,
        loss: float = 0.0,
        shared: Iterable[Path] = (),
        shm: Iterable[str] = (),
        mpirun: str = "",
    ) -> None:
        """rate: of each cable in each direction, "1gbit" (tc's words). latency: seconds that it takes, each
        way; from host to host is twice that. loss: the share of frames that get lost on it. shared: folders
        below /tmp that all hosts see, beside a checkout there; else each has a /tmp of its own. shm: how
        large the /dev/shm of the first hosts are, 256m for the others. mpirun: another one than that beside
        this Python.

        Skips the test where hosts can't be made.
        """
        if unavailable():
            pytest.skip(unavailable())
        self.names = [f"node{number}" for number in range(count)]
        self.slots = slots
        self._rate, self._latency, self._loss = rate, latency, loss
        programs = [path for path in (ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")]
        self._shared = " ".join(map(str, [*programs, *shared]))
        self._shm = [*shm, *["256m"] * count][:count]
        self._mpirun = mpirun or ranks.own_mpirun()
        self._is_mpich = "HYDRA" in ranks.version_of(self._mpirun)
        self._holding: list[subprocess.Popen[str]] = []
        self.pids: list[int] = []  # of the process that holds each host

    def __enter__(self) -> "Hosts":
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self._holding:
            process.stdin.close()
        for process in self._holding:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
            process.stdout.close()
        self._holding.clear()

    def _make(self) -> None:
        table = [f"127.0.0.1 localhost\n{_ADDRESS}254 head"]
        table += [f"{_ADDRESS}{number + 1} {name}" for number, name in enumerate(self.names)]
        words = {"TABLE": "\n".join(table), "SHARED": self._shared}
        self._hold(["unshare", "--net", "--uts", "--mount", "sh", "-c", _HEAD], NAME="head", **words)
        head = self._holding[0].pid
        for number, name in enumerate(self.names):
            # As machines that were started at different times: clocks that only go on differ.
            started = ["--monotonic", str(1000 * number), "--boottime", str(1000 * number)]
            command = ["unshare", *_OWN, *started, "sh", "-c", _HOST]
            holder = self._hold(command, NAME=name, SHM=self._shm[number], **words)
            self.pids.append(int(Path(f"/proc/{holder}/task/{holder}/children").read_text()))
        self._connect(head)
        self.environment = {
            "HOSTS_MPIRUN": self._mpirun,
            "HOSTS_HEAD": str(head),
            "HOSTS_PIDS": " ".join(map("{}={}".format, self.names, self.pids)),
            "HOSTS_SLOTS": ",".join(f"{name}:{self.slots}" for name in self.names),
        }
        if not self._is_mpich:
            library = Path(self._mpirun).parent.parent / "lib" / "libmpi.so"
            self.environment |= {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(library)}
            self.environment["OMPI_MCA_mpi_yield_when_idle"] = "1"  # all hosts share these cores

    def _hold(self, command: list[str], **variables: str) -> int:
        """Start a process that says that it is ready, and lives until its stdin is closed."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: os.environ[name] for name in ("PATH",)} | variables,
        )
        self._holding.append(process)
        if process.stdout.readline() != "ready\n":
            raise OSError(f"{command[:2]} could not be started")
        return process.pid

    def _connect(self, head: int) -> None:
        if self._latency or self._loss:
            ends = [[str(head), f"port{number}", str(pid), "eth0"] for number, pid in enumerate(self.pids)]
            command = [sys.executable, "-S", str(HERE / "cable.py"), str(self._latency), str(self._loss)]
            self._hold([*command, *sum(ends, [])])
            links = []
        else:
            links = [
                f"link add port{number} type veth peer name eth0 netns {pid}"
                for number, pid in enumerate(self.pids)
            ]
        ports = [f"link set port{number} master eth0 up" for number in range(len(self.pids))]
        self._inside(head, ["ip", "-batch", "-"], [*links, *ports])
        for number, pid in enumerate(self.pids):
            address = f"addr add {_ADDRESS}{number + 1}/24 dev eth0"
            self._inside(pid, ["ip", "-batch", "-"], [address, "link set eth0 up"])
        if self._rate:
            self.shape(self._rate)

    def shape(self, rate: str, hosts: Iterable[int] | None = None) -> None:
        """Give the cables of these hosts, or all, this rate, in both directions."""
        words = f"root tbf rate {rate} burst {BURST} latency {_QUEUE}"
        for number in range(len(self.pids)) if hosts is None else hosts:
            head = self._holding[0].pid
            self._inside(head, ["tc", "-batch", "-"], [f"qdisc replace dev port{number} {words}"])
            self._inside(self.pids[number], ["tc", "-batch", "-"], [f"qdisc replace dev eth0 {words}"])

    def cut(self, host: int) -> None:
        """Pull a host's cable out of the bridge. No connection is told: what is sent does not arrive."""
        self._inside(self._holding[0].pid, ["ip", "-batch", "-"], [f"link set port{host} nomaster down"])

    def mend(self, host: int) -> None:
        """Put it back."""
        self._inside(self._holding[0].pid, ["ip", "-batch", "-"], [f"link set port{host} master eth0 up"])

    def run(self, host: int, command: list[str]) -> subprocess.CompletedProcess[str]:
        """A command on one host."""
        inside = ["nsenter", "--target", str(self.pids[host]), "--all", "--wd=/", "--"]
        return subprocess.run([*inside, *command], capture_output=True, text=True, check=True)

    def beside(self, folder: Path, *command: str) -> list[str]:
        """A command at the bridge, where `mpirun` runs, in a folder."""
        head = str(self._holding[0].pid)
        return ["nsenter", "--target", head, "--net", "--uts", "--mount", f"--wd={folder}", "--", *command]

    def launcher(self) -> list[str]:
        """mpirun with what it takes to start processes on these hosts, but for their names."""
        enter = str(HERE / "enter")
        if self._is_mpich:
            return [self._mpirun, "-launcher", "ssh", "-launcher-exec", enter, "-iface", "eth0"]
        command = [self._mpirun, "--allow-run-as-root", "--prtemca", "plm_ssh_agent", enter]
        command += ["--prtemca", "prte_if_include", "eth0", "--mca", "btl_tcp_if_include", "eth0"]
        return [*command, "--mca", "pml", "ob1"]

    def received(self, host: int) -> int:
        """Bytes that a host's cable has brought to it, with all headers."""
        return _counted(self.pids[host], "eth0", 0)

    def lost(self, host: int) -> int:
        """Frames that a host has sent and its cable has lost, once what is under way has come."""
        found = -1
        while found != (
            now := _counted(self.pids[host], "eth0", 9) - _counted(self._holding[0].pid, f"port{host}", 1)
        ):
            found = now
            time.sleep(0.1 + 4 * self._latency)
        return found

    def _inside(self, pid: int, command: list[str], lines: list[str]) -> None:
        done = subprocess.run(
            ["nsenter", "--target", str(pid), "--net", "--", *command],
            input="\n".join(lines),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise OSError(f"{command[0]}: {done.stderr}")

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Inside, tests.ranks starts jobs on these hosts."""
        before = ranks.on_hosts
        ranks.on_hosts = (str(HERE / "mpirun"), self.environment)
        try:
            yield
        finally:
            ranks.on_hosts = before


def _counted(pid: int, device: str, column: int) -> int:
    """A counter of a device in the network of a process; 0: bytes in, 1: packets in, 9: packets out."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    (found,) = (line.split(":")[1].split() for line in lines if line.strip().startswith(f"{device}:"))
    return int(found[column])
