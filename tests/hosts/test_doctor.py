"""`shardrt doctor --hosts FILE`: hosts that fit together, and each way in which they do not."""

import json
import platform
import shlex
import subprocess
import sys

import pytest

from shardrt.__main__ import main
from shardrt.faults import reach
from shardrt.tools.hosts import hosts_of, placed
from shardrt.untrusted import Refused
from tests.hosts.hosts import HERE, Hosts
from tests.ranks import clean_environment, open_mpi

pytestmark = pytest.mark.mpi
AHEAD = "import time\n_time = time.time\ntime.time = lambda: _time() + 100\n"
OLDER = "import platform\nplatform.python_version = lambda: '2.7.18'\n"


def examine(made, folder, *names, **variables):
    """(exit code, what it says as JSON)"""
    (folder / "hosts").write_text("".join(f"{name}:2\n" for name in names or made.names))
    command = [sys.executable, "-m", "shardrt", "doctor", "--hosts", "hosts", "--json"]
    command += ["--mpirun", shlex.join(made.launcher())]
    with made.launching():
        environment = clean_environment(**variables)
    inside = made.beside(folder, *command)
    done = subprocess.run(inside, capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_host_files_of_both_launchers(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\nnode1:8\nnode2 slots=8  # the new one\n\nnode1:8\n")
    assert hosts_of(file) == ["node1", "node2"]
    file.write_text("me@node2:2\r\n  node1\nnode2:4\n10.0.0.3 slots=2 user=me\n")
    assert hosts_of(file) == ["me@node2", "node1", "10.0.0.3"]
    file.write_text("# none\n")
    with pytest.raises(Refused, match="names no host"):
        hosts_of(file)


@pytest.mark.parametrize("line", ["fe80::1", "[::1]:2", "node[1-4]", "node1:two", "n\xf6de:2\n\xff"])
def test_a_line_that_is_no_host_is_refused(tmp_path, line):
    (tmp_path / "hosts").write_bytes(line.encode("latin-1"))
    with pytest.raises(Refused, match="is not a host"):
        hosts_of(tmp_path / "hosts")


def test_what_a_launcher_says_that_fails_is_reported(tmp_path, monkeypatch, capsys):
    """The reason comes first, as ssh's, and what MPICH makes of it behind that."""
    script = tmp_path / "mpirun"
    script.write_text("#!/bin/sh\necho ssh: connect refused >&2\nseq 30 >&2\nexit 255\n")
    script.chmod(0o755)
    (tmp_path / "hosts").write_text("me@localhost:2\n")
    monkeypatch.setattr(reach, "answering", lambda known, _: set(known))
    command = ["doctor", "--hosts", str(tmp_path / "hosts"), "--mpirun", str(script)]
    assert main(command) == 1
    message = capsys.readouterr().out.splitlines()
    assert message[0].endswith(f"could not be run: {script} ended with exit code 255")
    assert (
        message[1] == "  ssh: connect refused"
        and "  ..." in message
        and message[-1] == "  30"
        and len(message) < 20
    )
    assert main([*command[:-1], "true"]) == 1
    assert "true ended with exit code 0" in capsys.readouterr().out
    assert main([*command, "runs/a"]) == 65
    assert "pass a run or --hosts FILE, not both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("HYDRA build details:\n    Version: 5.0.2\n", "-hosts a,b -ppn 1 -n 2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240515\n", "-hosts a,b -ppn 1 -n 2"),
        ("mpirun (Open MPI) 5.0.11\n", "--host a:1,b:1 -n 2"),
    ],
)
def test_each_launcher_is_told_by_what_it_says_of_itself(version, options):
    assert placed(version, ["a", "b"]) == options.split()


def test_hosts_that_fit_and_one_that_is_cut_off(tmp_path):
    with Hosts(shared=[tmp_path]) as made:
        code, found = examine(made, tmp_path)
        assert (code, found["lacking"]) == (0, [])
        assert [host["host"] for host in found["hosts"]] == ["node0", "node1"]
        assert all(host["seen"] and abs(host["clock"]) < 0.5 for host in found["hosts"])
        (pair,) = found["pairs"]
        assert pair["hosts"] == ["node0", "node1"]
        assert 0 < pair["latency"] < 0.1 and pair["there"] > 1e6 and pair["back"] > 1e6
        assert [path.name for path in tmp_path.iterdir()] == ["hosts"]
        made.cut(1)
        code, found = examine(made, tmp_path, "node0", "node1", "node7")
        assert code == 1
        assert found["lacking"] == [
            "node7: its name is not known here",
            "node1 (10.77.0.2) does not answer, at port 9 or 22",
        ]


@pytest.mark.hosts
def test_hosts_that_fit_by_the_launcher_of_open_mpi(tmp_path):
    with Hosts(shared=[tmp_path], mpirun=open_mpi()) as made:
        code, found = examine(made, tmp_path)
    assert (code, found["lacking"]) == (0, []) and len(found["hosts"]) == 2 and len(found["pairs"]) == 1


@pytest.mark.hosts
def test_a_slow_link_a_clock_ahead_another_python_a_small_dev_shm_and_a_folder_of_its_own_are_reported(
    tmp_path,
):
    ahead, own = tmp_path / "ahead", tmp_path / "own"
    ahead.mkdir()
    own.mkdir()
    with Hosts(3, shared=[tmp_path], shm=["256m", "32m"]) as made:
        made.shape("400mbit", [0, 1])  # else what the cores have left says how fast they are
        made.shape("50mbit", [2])
        (tmp_path / "sitecustomize.py").write_text(AHEAD + OLDER)
        made.run(1, ["mount", "--bind", str(tmp_path), str(ahead)])
        made.run(2, ["mount", "-t", "tmpfs", "none", str(own)])
        made.run(2, ["sh", "-c", "grep -v node1 /etc/hosts > /tmp/others; cat /tmp/others > /etc/hosts"])
        code, found = examine(made, own, PYTHONPATH=f"{HERE.parent.parent}:{ahead}")
    assert code == 1
    message = "\n".join(found["lacking"])
    assert f"hosts differ: python: {platform.python_version()} on node0, 2.7.18 on node1" in message
    assert "node1: its clock is +100.0 s from that of node0" in message
    assert f"node2 does not see what node0 writes to {own}" in message
    assert "node2 knows no host of the name node1, and can't say if it is lost" in message
    assert message.count("knows no host") == 1
    assert "node1: /dev/shm has less than 64 MB free" in message
    assert len(found["pairs"]) == 3
    slow = {tuple(pair["hosts"]) for pair in found["pairs"] if min(pair["there"], pair["back"]) < 7e6}
    assert slow == {("node0", "node2"), ("node1", "node2")}
    assert "node0 - node2: " in message and "node1 - node2: " in message and "node0 - node1" not in message
