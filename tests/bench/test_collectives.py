"""The benchmark of collectives: everything checked, no figure of what is wrong, nonsense is refused."""

import csv
import json
from itertools import product

import numpy as np
import pytest

from bench import command_line
from bench.collectives.__main__ import main
from bench.collectives.fit import fit
from bench.collectives.ops import OPS, Case
from bench.collectives.values import count_wrong, fill, poison, values
from bench.peers.launch import ONE_THREAD
from shardrt import device
from shardrt.comm.wrapper import Wrapper
from tests.bench.nonsense import assert_refused
from tests.ranks import mpirun

ONCE = ["-n", "2", "-r", "2", "-w", "1"]
THREADS = ["-t", "3", "-b", "1536", "-e", "3072", "-f", "2", *ONCE]
# Bus over algorithm bandwidth of nccl-tests' doc/PERFORMANCE.md, at 3 ranks.
BUS = {"all_gather": 2 / 3, "reduce_scatter": 2 / 3, "all_reduce": 4 / 3, "broadcast": 1, "all_to_all": 2 / 3}


class Wrong(Wrapper):
    """Changes one element of what rank 1 gathers."""

    def _before(self, call, buffer, stream):
        pass

    def _wrap(self, inner):
        return Wrong(inner)

    def all_gather(self, buffer, *, stream, what=""):
        self.inner.all_gather(buffer, stream=stream, what=what)
        if self.rank == 1:
            buffer[-1] += 1


def test_every_op_dtype_and_place_is_right_in_a_thread_world(capsys):
    assert main([*THREADS, "-d", "all", "-c", "2", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    offered = {(op, dtype, place) for op, o in OPS.items() for dtype, place in product(o.dtypes, o.places)}
    offered.remove(("reduce_scatter", "bfloat16", "in"))
    assert {(line["op"], line["dtype"], line["place"]) for line in lines} == offered
    for line in lines:
        assert line["communicator"] == "thread" and line["wrong"] == 0 and line["raw_us"] is None
        itemsize = {"bfloat16": 2, "float32": 4}.get(line["dtype"], 8)
        parts = 3 if line["op"] not in ("all_reduce", "broadcast") else 1
        assert line["count"] * parts * itemsize == line["bytes"]
        assert 0 < line["min_us"] <= line["average_us"] <= line["max_us"]
        size_over_time = line["bytes"] / line["average_us"] / 1e3
        assert line["algorithm_gb_s"] == pytest.approx(size_over_time, rel=0.01, abs=1e-3)
        assert line["bus_gb_s"] == pytest.approx(size_over_time * BUS[line["op"]], rel=0.01, abs=1e-3)


def test_no_figure_of_a_communicator_that_is_wrong_is_printed(capsys):
    assert main([*THREADS, "all_gather", "broadcast", "-p", "in", "-c", "4"], wrap=Wrong) == 1
    printed = capsys.readouterr().out.splitlines()
    gathers = [line.split() for line in printed if line.startswith("  thread all_gather")]
    assert len(gathers) == 2
    for words in gathers:  # communicator, op, place, type, size, count, then three times and two bandwidths
        assert words[6:11] == ["-"] * 5 and words[11] == "4"  # an element in each of 4 rounds
    broadcasts = [line.split() for line in printed if line.startswith("  thread broadcast")]
    assert len(broadcasts) == 2 and all(float(words[6]) > 0 and words[11] == "0" for words in broadcasts)
    assert "wrong elements: 8 " in printed[-1] and "OK" not in printed[-1]
    assert main([*THREADS, "all_gather", "-p", "in", "--csv"], wrap=Wrong) == 1
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    figures = [name for name in rows[0] if name.endswith(("_us", "_gb_s", "_percent"))]
    assert len(figures) >= 9 and all(not row[name] for row in rows for name in figures)


def test_a_piece_in_the_wrong_place_or_from_another_round_is_found():
    here, count = device.get("cpu"), 1000
    case = Case(OPS["all_gather"], "bfloat16", "in", 2 * 3 * count, 3)
    target = np.concatenate(
        [values(rank, np.arange(count, dtype=np.uint64), 1, "bfloat16") for rank in range(3)]
    )

    def wrong(array, round_=1):
        return count_wrong(here, array, lambda start, stop: case.expected(0, start, stop, round_))

    assert wrong(target) == 0
    for broken in (np.roll(target, count), np.roll(target, 1)):
        assert wrong(broken) > 2.5 * count
    assert wrong(target, round_=2) > 2.5 * count
    fill(here, target[:count], 1, 1, "bfloat16")
    assert 0.8 * count < wrong(target) <= count
    for dtype in ("float32", "int64", "uint16"):
        array = np.zeros(7, dtype)
        poison(array)
        assert count_wrong(here, array, lambda start, stop: np.full(stop - start, 7)) == 7


def test_a_fit_finds_latency_and_bandwidth():
    sizes = [1 << k for k in range(10, 31, 4)]
    found = fit(sizes, [3e-6 + size / 5e9 for size in sizes])
    assert found.latency == pytest.approx(3e-6) and found.bandwidth == pytest.approx(5e9)
    assert found.worst < 1e-9
    flat = fit(sizes, [5e-6] * len(sizes))
    assert flat.latency == pytest.approx(5e-6) and (flat.bandwidth is None or flat.bandwidth > 1e18)
    falling = fit([1, 2, 3], [3.0, 2.0, 1.0])
    assert falling.bandwidth is None and falling.worst > 0.3
    assert fit([1, 2], [1.0, 2.0]) is None


NONSENSE = {
    "gather": (["gather"], "op: 'gather' is unknown; known are all_gather"),
    "dtype": (["-d", "int8"], "-d: 'int8' is unknown"),
    "communicator": (["-k", "gloo"], "-k: 'gloo' is unknown"),
    "no peer": (["-k", "mpi"], "'mpi' has no peer to talk to: this run is of one rank"),
    "not threads": (["-t", "2", "-k", "shm"], "-k: 'shm' does not fit ranks that are threads"),
    "one thread": (["-t", "1"], "-t: must be at least 2, got 1"),
    "no division": (
        ["-t", "3", "all_gather", "-e", "1K"],
        "1024 bytes are no whole number of float32 for each of 3",
    ),
    "half an element": (["-b", "6", "-e", "6", "broadcast"], "6 bytes are no whole number of float32"),
    "no size": (["-b", "1Q"], "'1Q' is no size"),
    "backwards": (["-b", "1M", "-e", "1K"], "-e: 1024 bytes is less than -b"),
    "factor": (["-f", "1"], "-f: must be at least 2, got 1"),
    "nothing timed": (["-n", "0"], "-n: must be at least 1, got 0"),
    "not offered": (["all_to_all", "-p", "in"], "all_to_all: not offered"),
    "sums of bits": (["all_reduce", "-d", "bfloat16"], "all_reduce: not offered"),
}


@pytest.mark.parametrize("words, message", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_one_line_and_exit_code_2(words, message, capsys):
    assert_refused(main, words, message, capsys)


def test_sizes_are_read_as_they_are_written():
    assert [command_line.nbytes(text) for text in ("12", "1K", "1KiB", "16MB", "2g")] == [
        *(12, 1024, 1024),
        *(16 << 20, 2 << 30),
    ]


@pytest.mark.mpi
def test_two_processes_beside_mpi4py(tmp_path):
    file = tmp_path / "result.json"
    words = ["-k", "mpi,shm", "-b", "1K", "-e", "1M", "-f", "32", "-d", "float32,bfloat16", *ONCE, "--csv"]
    done = mpirun(2, ["-m", "bench.collectives", *words, "-o", str(file)], **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    result = json.loads(file.read_text())
    assert len(rows) == len(result["lines"]) == 2 * 3 * (9 + 6)
    for row in rows:
        assert row["wrong"] == "0" and float(row["average_us"]) > 0
        raw = row["op"] != "reduce_scatter" or row["dtype"] == "float32"  # MPI adds no bfloat16
        assert row["raw_wrong"] == ("0" if raw else "") and bool(row["overhead_us"]) == raw
    assert {(row["of"], row["communicator"]) for row in result["fits"]} == {
        (who, name) for who in ("ours", "raw") for name in ("mpi", "shm")
    }
    assert "-m bench.collectives" in result["command"] and result["ranks"] == 2
    refused = mpirun(2, ["-m", "bench.collectives", "-k", "single"], **ONE_THREAD)
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1
    assert "'single' is of one rank" in refused.stderr and not refused.stdout
