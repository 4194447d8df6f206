"""What is said of a hang of several hosts: signs of life without common clocks, hosts that do not answer.

tests/hosts/test_failures.py has real ones.
"""

import errno
import socket
import time

import numpy as np
import pytest

from shardrt.faults import diagnosis, failure, reach, reports
from shardrt.faults.flight import Recorder

HOSTS = ["node0", "node0", "node1", "node1"]


@pytest.fixture
def recorders(tmp_path, monkeypatch):
    """Of four ranks on two hosts; rank 3 has not come to the collective in which the others wait."""
    monkeypatch.setattr(reports, "LISTENING", 0.04)
    made = [Recorder(tmp_path, rank, 4) for rank in range(4)]
    for recorder in made:
        recorder.mark("forward", 1)
    for recorder in made[:3]:
        facts = recorder.facts("gather", 1, "all_gather", "blocks.0", np.zeros(4, np.float32))
        recorder._write(1, *facts)
    for recorder in made:
        recorder.beat()
    return made


def standing(heard):
    """By rank, what is said of it."""
    return {
        flight.rank: diagnosis.standing(flight, heard.flights, heard.now[flight.rank])
        for flight in heard.flights
    }


def silent(heard):
    return [rank for rank, said in standing(heard).items() if "no sign of life" in said]


def test_a_rank_of_another_host_gives_signs_of_life_or_not(recorders, tmp_path, monkeypatch):
    """However long a loaded machine takes to listen, and whatever its last sign was."""
    monkeypatch.setattr(diagnosis, "SILENT", 0.039)
    time.sleep(0.02)
    recorders[3].mark("backward")  # after its last beat

    def beat():
        time.sleep(0.02)
        recorders[2].beat()

    heard = reports.listen(tmp_path, 0, HOSTS, {}, beat)
    heard.now[0] = heard.now[1] = 0.0
    assert silent(heard) == [3]
    assert standing(heard)[3].endswith("no sign of life for 0.0 s") and heard.silent == []


def test_a_rank_that_was_stopped_in_the_collective_of_the_others_is_behind(recorders, tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosis, "SILENT", 0.039)
    facts = recorders[3].facts("gather", 1, "all_gather", "blocks.0", np.zeros(4, np.float32))
    recorders[3]._write(1, *facts)
    heard = reports.listen(tmp_path, 0, HOSTS, {}, recorders[2].beat)
    heard.now[0] = heard.now[1] = 0.0
    assert diagnosis.blame(heard.flights, HOSTS).startswith("no rank is behind")
    report = reports.hang(recorders[0], heard, HOSTS, 2.0, 1.0)
    assert diagnosis.blamed(report)[0].startswith(
        "rank 3 on node1 is behind: ranks 0,1,2 wait in all_gather #1"
    )


def test_where_all_are_in_a_collective_it_is_the_link(recorders, tmp_path):
    facts = recorders[3].facts("gather", 1, "all_gather", "blocks.0", np.zeros(4, np.float32))
    recorders[3]._write(1, *facts)
    heard = reports.listen(tmp_path, 0, HOSTS, {}, lambda: None)
    message = diagnosis.blame(heard.flights, HOSTS)
    assert message.startswith(
        "no rank is behind, all are in all_gather #1 of gather, 4 of float32, unit blocks.0:"
    )
    assert message.endswith("what links node0 and node1 is slow, or brings nothing")
    message = diagnosis.blame(heard.flights, ["a", "b", "c", "c"])
    assert message.endswith(": a link of a, b or c is slow, or brings nothing; which one is not known")
    assert diagnosis.blame(heard.flights, ["vm"] * 4) == "no rank waits for another"


def test_hosts_speak_one_after_the_other_and_the_last_is_not_late():
    def turns(count):
        names = [f"node{host}" for host in range(count) for _ in range(2)]
        return [failure.turn(host, names, 1.0, 2.0) for host in dict.fromkeys(names)]

    assert [turns(1), turns(2), turns(3), turns(5)] == [[0], [0, 1], [0, 1, 2], [0, 0.5, 1, 1.5, 2]]


def test_a_host_that_sees_none_of_its_own_behind_lets_others_speak_first(recorders, tmp_path):
    """Before a run has its folder, and where each host has one of its own."""
    for rank, unseen in ((0, (2, 3)), (2, (0, 1))):
        folder = tmp_path / f"of-{rank}"
        folder.mkdir()
        for other in set(range(4)) - set(unseen):
            recorders[other].move(folder)
        heard = reports.listen(folder, rank, HOSTS, {}, lambda: None)
        report = reports.hang(recorders[rank], heard, HOSTS, 2.0, 1.0)
        message = {
            0: "ranks 2,3 on node1 are behind: ranks 0,1 wait in all_gather #1 of gather",
            2: "rank 3 on node1 is behind: rank 2 waits in all_gather #1 of gather",
        }
        assert diagnosis.blamed(report)[0].startswith(message[rank]), report
        assert reports.is_guess(report, heard, HOSTS) == (rank == 0)
        assert not reports.is_guess(report, heard._replace(silent=["node1"]), HOSTS)


def test_ranks_on_one_host_are_not_listened_to(recorders, tmp_path):
    def never():
        raise AssertionError

    heard = reports.listen(tmp_path, 0, ["vm"] * 4, {}, never)
    assert len(set(heard.now.values())) == 1
    lines = reports.hang(recorders[0], heard, ["vm"] * 4, 2.0, 1.0).splitlines()
    assert lines[0].startswith("hang: no progress on rank 0 for 2.0 s in forward (limit 1.0 s)")
    assert lines[-1].startswith("rank 3 is behind: ranks 0,1,2 wait in all_gather #1 of gather")


@pytest.mark.parametrize("hosts", [["vm"] * 4, HOSTS], ids=["one host", "two"])
def test_a_rank_that_has_ended_is_not_taken_for_dead(recorders, tmp_path, monkeypatch, hosts):
    recorders[3].end("done")
    monkeypatch.setattr(diagnosis, "SILENT", -1.0)
    heard = reports.listen(tmp_path, 0, hosts, {}, lambda: None)
    assert silent(heard) == [0, 1, 2]
    assert standing(heard)[3].endswith("; it has ended: done")


def test_hosts_are_named_beside_ranks(recorders, tmp_path):
    heard = reports.listen(tmp_path, 0, HOSTS, {}, lambda: None)
    report = reports.hang(recorders[0], heard, HOSTS, 2.0, 1.0)
    lines = report.splitlines()
    assert lines[0].startswith("hang: no progress on rank 0 on node0 for 2.0 s")
    assert [line[:16] for line in lines[1:4]] == ["  node0: ranks 0", "  node1: rank 2 ", "  node1: rank 3 "]
    assert lines[4].startswith("rank 3 on node1 is behind: ranks 0,1,2 wait in all_gather #1 of gather")
    assert diagnosis.blamed(report) == (lines[4], [3])
    (tmp_path / "hang.txt").write_text(report)
    assert reports.speaker(tmp_path / "hang.txt", HOSTS) == "node0"
    assert reports.speaker(tmp_path / "none.txt", HOSTS) == ""


def test_a_host_that_does_not_answer_is_behind_with_all_its_ranks(recorders, tmp_path, monkeypatch):
    monkeypatch.setattr(reach, "answering", lambda known, seconds: set())
    heard = reports.listen(tmp_path, 0, HOSTS, {"node1": "10.0.0.2"}, lambda: None)
    report = reports.hang(recorders[0], heard, HOSTS, 2.0, 1.0)
    line = "ranks 2,3 on node1 are behind: node1 does not answer node0, the link or the machine is gone; "
    line += "the others wait in all_gather #1 of gather, 4 of float32, unit blocks.0"
    assert diagnosis.blamed(report) == (line, [2, 3])
    assert "  node1: " not in report


def test_a_host_that_is_there_answers():
    assert reach.answering({"here": "127.0.0.1"}, 5.0) == {"here"}
    assert reach.answering({}, 5.0) == set()
    found = reach.addresses({"localhost": 1, "no-such-host.invalid": 2, "." * 64: 3})
    assert list(found) == ["localhost"] and "127.0.0.1" in found["localhost"].split(",")
    assert reach.answering({"broadcast": "255.255.255.255"}, 5.0) == set()  # there is no way to it


@pytest.mark.parametrize("open_port", [0, 1])
def test_one_port_that_answers_is_enough_where_a_firewall_drops_or_rejects_the_other(monkeypatch, open_port):
    begun = []

    def asked(address, port):  # what connects to a port that is listened on, and what never does
        begun.append((address, port))
        if reach.PORTS.index(port) != open_port:
            raise OSError(errno.EHOSTUNREACH, "prohibited")
        return real(*listening.getsockname())

    real = reach._asked
    monkeypatch.setattr(reach, "_asked", asked)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        known = {"there": "10.0.0.1,fe80::1"}
        assert reach.answering(known, 5.0) == {"there"}
    assert begun == [(address, port) for address in ("10.0.0.1", "fe80::1") for port in reach.PORTS]
