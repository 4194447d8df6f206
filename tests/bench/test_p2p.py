"""The benchmark of messages: every byte checked, every pair in the matrix, nonsense refused."""

import csv
import json

import numpy as np
import pytest

from bench.harness.benchmark import main
from bench.harness.timing import Contestant, Effort, Measured
from bench.p2p.__main__ import PointToPoint, _lines, _measured
from bench.p2p.cases import Case
from bench.p2p.matrix import matrices
from bench.p2p.ways import Buffered, Direct
from bench.peers.launch import ONE_THREAD
from shardrt import device
from shardrt.comm import create
from shardrt.comm.interceptors import Interceptor
from tests.bench.nonsense import assert_refused
from tests.ranks import mpirun, run_ranks

ONCE = ["-n", "3", "--rounds", "2"]
OURS = {
    "latency": {"buffered", "direct"},
    "bandwidth": {"buffered", "direct"},
    "bibw": {"buffered", "exchange"},
}
OURS |= {name: OURS["latency"] for name in ("message_rate", "matrix_latency", "matrix_bandwidth")}
FIGURES = ("avg_us", "p50_us", "p99_us", "gb_s", "messages_s")


def point_to_point(words, **attributes):
    """The exit code of a benchmark with other attributes."""
    return main(type("Changed", (PointToPoint,), attributes)(), words)


class Wrong(Interceptor):
    """Changes the last byte of what rank 1 receives by a call."""

    call = "recv"

    def intercept(self, call, run):
        def wrong(buffer, *args):
            run(buffer, *args)
            buffer[-1] += 1

        return wrong if call.name == self.call and self.communicator.rank == 1 else run


class WrongExchange(Wrong):
    call = "exchange"


def wrap_of(kind):
    """What puts an interceptor of this kind around a communicator."""

    def wrap(communicator):
        kind(communicator)
        return communicator

    return staticmethod(wrap)


def test_every_test_size_and_way_is_right_in_a_thread_world(capsys):
    words = "-t 4 -b 1 -e 64K -f 256 -W 3 -c 2 --json".split()
    assert point_to_point([*words, *ONCE]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    for test, hows in OURS.items():
        own = [line for line in lines if line["test"] == test]
        assert {line["how"] for line in own} == hows
        if not test.startswith("matrix"):
            assert {line["bytes"] for line in own} == {1, 256, 65536}
            assert {line["pair"] for line in own} == {"2 pairs" if test == "message_rate" else "0-3"}
    for line in lines:
        assert line["communicator"] == "thread" and line["wrong"] == 0 and line["ours_raw"] is None
        assert line["window"] == (1 if "latency" in line["test"] else 3)
        large = "latency" not in line["test"] and line["bytes"] > 8192
        assert line["iterations"] == 2 * (1 if large else 3)
        assert 0 < line["p50_us"] <= line["p99_us"]
        messages = line["window"] * {"bibw": 2, "message_rate": 2}.get(line["test"], 1)
        assert line["messages_s"] * line["avg_us"] == pytest.approx(messages * 1e6)
        assert line["gb_s"] == pytest.approx(line["messages_s"] * line["bytes"] / 1e9)


@pytest.mark.parametrize(
    ("kind", "hows", "cells"), [(Wrong, {"buffered", "direct"}, 4), (WrongExchange, {"exchange"}, 0)]
)
def test_a_wrong_message_has_no_figure_and_exit_code_1(kind, hows, cells, capsys):
    words = ["-t", "2", "-b", "64", "-e", "64", "-c", "4", "-W", "3", *ONCE]
    assert point_to_point([*words, "--json"], wrap=wrap_of(kind)) == 1
    result = json.loads(capsys.readouterr().out)
    for line in result["lines"]:
        assert (line["how"] in hows) == bool(line["wrong"])
        assert all((line[name] is None) == bool(line["wrong"]) for name in FIGURES)
        if line["wrong"]:  # a byte of each message that rank 1 receives: of a window, or of an answer
            assert line["wrong"] == 4 * (3 if line["window"] == 3 and line["pair"] == "0-1" else 1)
    empty = sum(matrix["rows"][a][b] is None for matrix in result["matrices"] for a, b in ((0, 1), (1, 0)))
    assert empty == 2 * cells
    assert point_to_point([*words, "bibw"], wrap=wrap_of(kind)) == 1
    assert "OK" not in capsys.readouterr().out.splitlines()[-1]


def test_a_message_in_the_place_of_another_is_found(capsys):
    class Late(Buffered):
        name = "late"

        def receive(self, arrays, peer):
            return super().receive(arrays[::-1], peer)

    def ways(kind, communicator, here):
        return [Late(communicator, here), Direct(communicator, here)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.p2p.__main__.ways_of", ways)
        assert point_to_point("-t 2 bandwidth -b 1K -e 1K -W 2 --json".split() + ONCE) == 1
    late, direct = json.loads(capsys.readouterr().out)["lines"]
    assert 1700 < late["wrong"] < 1900 and direct["wrong"] == 0  # of 2048 bytes an eighth is right by chance


def test_only_the_ranks_that_send_first_count():
    case = Case("message_rate", 1000, ((0, 2), (1, 3)), 10)
    each = np.array([[1e-6, 3e-6], [2e-6, 2e-6], [9.0, 9.0], [9.0, 9.0]])
    found = {"direct": Measured(each, 2 * each, 0), "mpi4py": Measured(each, each, 0)}
    mine, theirs = _lines("shm", case, found)
    assert theirs["avg_us"] == pytest.approx(2.0) and theirs["p99_us"] == pytest.approx(3.0)
    assert theirs["messages_s"] == pytest.approx(20 / 2e-6)  # 2 pairs, 10 messages each
    assert theirs["gb_s"] == pytest.approx(20 * 1000 / 2e-6 / 1e9)
    assert mine["ours_raw"] == pytest.approx(2.0) and theirs["ours_raw"] is None
    (half,) = _lines("shm", Case("latency", 1000, ((1, 0),), 1), {"mpi4py": Measured(each, each, 0)})
    assert half["avg_us"] == pytest.approx(1.0) and half["gb_s"] == pytest.approx(1.0)
    wrong, _ = _lines("shm", case, {"direct": Measured(each, each, 1), "mpi4py": Measured(each, each, 0)})
    assert wrong["ours_raw"] is None and not any(wrong[name] for name in FIGURES)


def test_the_first_iteration_of_a_round_is_not_counted():
    calls = []

    def body():
        control = create("auto")
        effort = Effort(warmup=0, calls=3, rounds=2, checks=0)
        contestants = {"a": Contestant(lambda: calls.append(control.rank))}
        case = Case("latency", 1, ((0, 1),), 1)
        return _measured(case, contestants, device.get("cpu"), control, effort)["a"].each.shape

    assert run_ranks(2, body) == [(2, 6)] * 2
    assert sorted(calls) == [0] * 8 + [1] * 8


def test_the_matrix_of_three_ranks_has_every_pair_and_a_picture(tmp_path, capsys):
    words = ["-t", "3", "matrix", "-b", "8", "-e", "512", "-W", "2", *ONCE]
    for name, head in (("matrix.png", b"\x89PNG"), ("matrix.svg", b"<?xml")):
        assert point_to_point([*words, "--picture", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(head)
    printed = capsys.readouterr().out.splitlines()
    for test, size, unit in (("latency", 8, "us"), ("bandwidth", 512, "GB/s")):
        for how in ("buffered", "direct"):
            start = printed.index(f"matrix_{test} thread {how}, {size} bytes, {unit}: row to column")
            assert printed[start + 1].split() == ["0", "1", "2"]
            for row in range(3):
                name, *cells = printed[start + 2 + row].split()
                assert name == str(row) and [cell == "-" for cell in cells] == [row == k for k in range(3)]
    drawn = (tmp_path / "matrix.svg").read_text()
    assert all(word in drawn for word in ("GB/s", "us", "sender", "receiver", "latency, 8 bytes"))


def test_what_is_not_checked_is_not_said_to_be_right(capsys):
    assert point_to_point([*"-t 2 latency -b 8 -e 8 -c 0".split(), *ONCE]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "# wrong: not checked"


def test_a_matrix_is_row_to_column():
    line = {"test": "matrix_bandwidth", "communicator": "shm", "how": "direct", "bytes": 4, "p50_us": 9.0}
    (found,) = matrices([line | {"pair": "0-1", "gb_s": 1.0}, line | {"pair": "1-0", "gb_s": 2.0}])
    assert found.rows == [[None, 1.0], [2.0, None]] and found.unit == "GB/s"


NONSENSE = {
    "test": (["osu_latency"], "test: unknown 'osu_latency'; known: latency, bandwidth"),
    "no peer": ([], "p2p: needs 2 ranks, and this run has one"),
    "one thread": (["-t", "1"], "p2p: needs 2 ranks, and this run has one"),
    "far": (["-t", "2", "--pair", "0,2"], "--pair: must be two ranks of 2 (0 to 1) such as 0,1, got '0,2'"),
    "itself": (["-t", "2", "--pair", "1,1"], "--pair: must be two ranks of 2"),
    "negative": (["-t", "2", "--pair=-1,0"], "--pair: must be two ranks of 2"),
    "three": (["-t", "4", "--pair", "0,1,2"], "--pair: must be two ranks of 4"),
    "no window": (["-t", "2", "-W", "0"], "-W: must be at least 1, got 0"),
    "no bytes": (["-t", "2", "-b", "0"], "-b: must be at least 1, got 0"),
    "backwards": (["-t", "2", "-b", "1K", "-e", "8"], "-e: 8 bytes is less than -b, 1024"),
    "factor": (["-t", "2", "-f", "1"], "-f: must be at least 2, got 1"),
    "format": (
        ["-t", "2", "--picture", "x.bmp"],
        "--picture: must be a .png or .svg file in a folder that exists, got x.bmp",
    ),
    "folder": (["-t", "2", "--picture", "/no/x.png"], "in a folder that exists, got /no/x.png"),
    "no matrix": (["-t", "2", "latency", "--picture", "x.png"], "--picture: draws the matrix, which is not"),
    "no GPU": (["-t", "2", "-k", "nccl"], "-k: 'nccl' is for arrays of a GPU, and there is none here"),
}


@pytest.mark.parametrize("words, message", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_one_line_and_exit_code_2(words, message, capsys):
    assert_refused(point_to_point, words, message, capsys)


@pytest.mark.mpi
def test_two_processes_next_to_mpi4py(tmp_path):
    picture = tmp_path / "matrix.png"
    words = ["-k", "mpi,shm", "-b", "1", "-e", "64K", "-f", "65536", "-W", "4", "--picture", str(picture)]
    done = mpirun(2, ["-m", "bench.p2p", *words, *ONCE, "--csv"], **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    found = {(row["communicator"], row["test"], row["how"]) for row in rows}
    hows = {test: own | {"mpi4py"} for test, own in OURS.items()}
    assert found == {(kind, test, how) for kind in ("mpi", "shm") for test in hows for how in hows[test]}
    for row in rows:
        assert row["wrong"] == "0" and float(row["p50_us"]) > 0
        assert bool(row["ours_raw"]) == (row["how"] != "mpi4py")
    assert picture.stat().st_size > 10_000
    refused = mpirun(2, ["-m", "bench.p2p", "--pair", "0,2"], **ONE_THREAD)
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1 and not refused.stdout
