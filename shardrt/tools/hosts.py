"""Whether hosts are fit to train together: the checks of `shardrt doctor --hosts FILE`.

One process on each host, started like a rank, reports its versions and its memory. Together the processes
compare clocks, look for a file that the first has written, and send each other data, pair by pair.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from shardrt.comm.differences import differing
from shardrt.faults import reach
from shardrt.tools.launched import host_lines, host_of
from shardrt.train.versions import versions
from shardrt.untrusted import Refused

_ANSWER = 3.0  # seconds
_PATIENCE = 60.0  # for all to start, and 2 more for each pair
_CLOCK = 1.0  # seconds by which clocks may differ
_TRIPS, _TRANSFERS = 20, 3  # of which the shortest counts
_BYTES = 4 << 20  # of a transfer
_SEEN = 5.0  # seconds until a file of another host is seen
_SHM = 64 << 20
_SHOWN = 8  # of the first and of the last lines of a launcher that fails: ssh speaks first, Python last
_SLOW = 4  # a pair so many times slower than the fastest is reported


def hosts_of(path: Path) -> list[str]:
    """The hosts in a host file, each once, with its user if the file names one (`me@node1`).

    Raises OSError; Refused if there are no hosts, or a line can't be read.
    """
    found: dict[str, str] = {}
    for host in map(host_of, host_lines(path)):
        found.setdefault(host.name, host.login)
    if not found:
        raise Refused(f"{path} names no host; write lines such as `node1:8` or `node1 slots=8`")
    return list(found.values())


def examine(hosts: Sequence[str], mpirun: Sequence[str]) -> dict[str, Any]:
    """All facts, in JSON types; `code` is the exit code of the command, `lacking` says why it is not 0.

    mpirun: the launcher's command and its options.
    """
    names = [host.rpartition("@")[2] for host in hosts]
    known = reach.addresses(dict.fromkeys(names))
    answers = reach.answering(known, _ANSWER)
    lacking = [f"{name}: its name is not known here" for name in names if name not in known]
    ports = f", at port {' or '.join(map(str, reach.PORTS))}"
    lacking += [f"{host} ({known[host]}) does not answer{ports}" for host in known if host not in answers]
    found: dict[str, Any] = {"hosts": [], "pairs": []}
    if not lacking:
        pairs = len(hosts) * (len(hosts) - 1) // 2
        message = _started(hosts, mpirun, _PATIENCE + 2 * pairs)
        if isinstance(message, str):
            lacking.append(f"one process on each host could not be run: {message}")
        else:
            found = message
            lacking += _lacking(found)
    return found | {"lacking": lacking, "code": int(bool(lacking))}


def lines(found: dict[str, Any]) -> list[str]:
    """The same facts as lines of text."""
    rows = [
        f"{host['host']}: {host['cores']} cores, {host['shm'] / 1e9:.1f} GB in /dev/shm, clock "
        f"{host['clock']:+.3f} s, shardrt {host['versions']['shardrt']}, Python {host['versions']['python']}"
        for host in found["hosts"]
    ]
    rows += [
        f"{pair['hosts'][0]} - {pair['hosts'][1]}: {pair['latency'] * 1e3:.3f} ms, "
        f"{pair['there'] / 1e6:.0f} MB/s there, {pair['back'] / 1e6:.0f} MB/s back"
        for pair in found["pairs"]
    ]
    return rows + [f"lacking: {what}" for what in found["lacking"]]


def _lacking(found: dict[str, Any]) -> list[str]:
    hosts = found["hosts"]
    names = [host["host"] for host in hosts]
    lacks = []
    for what, values in differing([host["versions"] for host in hosts]):
        other = next(number for number, value in enumerate(values) if value != values[0])
        lacks.append(f"hosts differ: {what}: {values[0]} on {names[0]}, {values[other]} on {names[other]}")
    for host in hosts:
        if abs(host["clock"]) > _CLOCK:
            lacks.append(f"{host['host']}: its clock is {host['clock']:+.1f} s from that of {names[0]}")
        if not host["seen"]:
            lacks.append(f"{host['host']} does not see what {names[0]} writes to {found['folder']}")
        if host["unknown"]:
            unknown = ", ".join(host["unknown"])
            lacks.append(f"{host['host']} knows no host of the name {unknown}, and can't say if it is lost")
        if host["shm"] < _SHM:
            lacks.append(f"{host['host']}: /dev/shm has less than 64 MB free")
    pairs = found["pairs"] if len(hosts) > 2 else []  # one pair has nothing to be compared with
    best = max((pair[way] for pair in pairs for way in ("there", "back")), default=0.0)
    for pair in pairs:
        slowest = min(pair["there"], pair["back"])
        if slowest < best / _SLOW:
            between = " - ".join(pair["hosts"])
            lacks.append(f"{between}: {slowest / 1e6:.0f} MB/s, where others reach {best / 1e6:.0f} MB/s")
    return lacks


def launcher() -> list[str]:
    """The mpirun next to this Python, or the system's mpirun; [] if there is none."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    return [found] if found else []


def _started(hosts: Sequence[str], mpirun: Sequence[str], seconds: float) -> dict[str, Any] | str:
    """The findings of the processes, or an error message."""
    if not mpirun:
        return "no mpirun: pip install mpich"
    try:
        about = subprocess.run([mpirun[0], "--version"], capture_output=True, text=True, timeout=seconds)
        command = [*mpirun, *placed(about.stdout, hosts), sys.executable, "-m", "shardrt.tools.hosts"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"it took more than {seconds:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode or not done.stdout.strip():
        message = done.stderr.strip().splitlines()
        message[_SHOWN:-_SHOWN] = ["..."] if len(message) > 2 * _SHOWN else message[_SHOWN:-_SHOWN]
        return "\n  ".join([f"{command[0]} ended with exit code {done.returncode}", *message])
    return json.loads(done.stdout.strip().splitlines()[-1])


def placed(version: str, hosts: Sequence[str]) -> list[str]:
    """Options for one process on each host, for the launcher with this version text.

    Open MPI's says "Open MPI" or "PRRTE", MPICH's "HYDRA build details", and Intel's, which is made of
    MPICH's, "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build ...".
    """
    if "Open MPI" in version or "PRRTE" in version:
        return ["--host", ",".join(f"{host}:1" for host in hosts), "-n", str(len(hosts))]
    return ["-hosts", ",".join(hosts), "-ppn", "1", "-n", str(len(hosts))]


def main() -> None:
    """The program of one process per host, under mpirun: the first process prints the findings of all."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    own = {
        "host": socket.gethostname(),
        "versions": versions(),
        "cores": len(os.sched_getaffinity(0)),
        "shm": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        "clock": _clock(world),
        "seen": _sees(world),
    }
    hosts = [json.loads(text) for text in world.allgather(json.dumps(own))]
    known = reach.addresses(dict.fromkeys(host["host"] for host in hosts))
    for host, names in zip(hosts, world.allgather(list(known)), strict=True):
        host["unknown"] = [other["host"] for other in hosts if other["host"] not in {*names, host["host"]}]
    pairs = []
    for here, there in combinations(range(world.size), 2):
        world.Barrier()
        measured = _pair(world, here, there) if world.rank in (here, there) else None
        measured = world.bcast(json.dumps(measured), root=here)
        pairs.append({"hosts": [hosts[here]["host"], hosts[there]["host"]]} | json.loads(measured))
    if world.rank == 0:
        print(json.dumps({"hosts": hosts, "pairs": pairs, "folder": os.getcwd()}), flush=True)


def _clock(world: Any) -> float:
    """Seconds by which this host's clock is ahead of the first host's, from the shortest of several trips."""
    best, ahead = float("inf"), 0.0
    for rank in range(1, world.size):
        for _ in range(_TRIPS):
            if world.rank == 0:
                world.recv(source=rank)
                world.send(time.time(), rank)
            elif world.rank == rank:
                began, sent = time.monotonic(), time.time()
                world.send(None, 0)
                theirs = world.recv(source=0)
                took = time.monotonic() - began
                if took < best:
                    best, ahead = took, sent + took / 2 - theirs
    return ahead


def _sees(world: Any) -> bool:
    """Whether this host sees a file that the first host writes to the current directory."""
    mark = None
    if world.rank == 0:
        mark = Path.cwd() / f".seen-{os.urandom(6).hex()}"
        try:
            mark.touch()
        except OSError:
            mark = None
    message = world.bcast(None if mark is None else str(mark))
    deadline = time.monotonic() + _SEEN
    while message and not (seen := os.path.exists(message)) and time.monotonic() < deadline:
        time.sleep(0.1)
    world.Barrier()
    if mark is not None:
        with suppress(OSError):
            mark.unlink()
    return bool(message) and seen


def _pair(world: Any, here: int, there: int) -> dict[str, float]:
    """Seconds of a message and bytes per second in each direction between two hosts, as the first sees it."""
    import numpy as np

    data, little = np.zeros(_BYTES, np.uint8), np.zeros(1, np.uint8)

    def trip(out: Any, back: Any) -> float:
        began = time.monotonic()
        if world.rank == here:
            world.Send(out, there)
            world.Recv(back, there)
        else:
            world.Recv(out, here)
            world.Send(back, here)
        return time.monotonic() - began

    trip(data, data)  # connect
    latency = min(trip(little, little) for _ in range(_TRIPS)) / 2
    out = min(trip(data, little) for _ in range(_TRANSFERS)) - latency
    back = min(trip(little, data) for _ in range(_TRANSFERS)) - latency
    return {"latency": latency, "there": _BYTES / out, "back": _BYTES / back}


if __name__ == "__main__":
    main()
