"""The benchmark of collectives: everything checked, no figure of what is wrong, nonsense is refused."""

import csv
import json

import numpy as np
import pytest

from bench.collectives.__main__ import main
from bench.collectives.measure import Effort
from bench.collectives.ops import DTYPES, OPS, Case, rounded
from bench.collectives.options import cases, parse
from bench.harness import command_line
from bench.harness.fit import fit
from bench.harness.values import count_wrong, fill, poison, values
from bench.peers.launch import ONE_THREAD
from shardrt import device
from shardrt.comm.interceptors import Interceptor
from tests.bench.nonsense import assert_refused
from tests.ranks import mpirun

ONCE = ["-n", "2", "--rounds", "2", "-w", "1"]
THREADS = ["-t", "3", "-b", "1536", "-e", "3072", "-f", "2", *ONCE]
# Bus over algorithm bandwidth at 3 ranks: nccl-tests' doc/PERFORMANCE.md, and GetBw of its src/*.cu.
BUS = {"all_gather": 2 / 3, "reduce_scatter": 2 / 3, "all_reduce": 4 / 3, "broadcast": 1, "all_to_all": 2 / 3}
BUS |= {"reduce": 1, "gather": 2 / 3, "scatter": 2 / 3, "sendrecv": 1}
SLICED = (
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
)  # count is that of a rank's slice
MOVING = ("all_gather", "broadcast", "all_to_all", "gather", "scatter", "sendrecv")


class Wrong(Interceptor):
    """Changes one element of what rank 1 gathers."""

    def intercept(self, call, run):
        def wrong(buffer, what):
            run(buffer, what)
            buffer[-1] += 1

        return wrong if call.name == "all_gather" and self.communicator.rank == 1 else run


def wronged(communicator):
    Wrong(communicator)
    return communicator


def test_every_op_type_reduction_place_and_root_is_right_in_a_thread_world(capsys):
    assert main([*THREADS, "-b", "3072", "-d", "all", "-o", "all", "-r", "all", "-c", "2", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    for op in MOVING:
        roots = {0, 1, 2} if op in ("broadcast", "gather", "scatter") else {-1}
        places = {"out"} if op in ("all_to_all", "sendrecv") else {"out", "in"}
        found = {(line["dtype"], line["place"], line["root"]) for line in lines if line["op"] == op}
        assert found == {(dtype, place, root) for dtype in DTYPES for place in places for root in roots}
    added = [line for line in lines if line["op"] not in MOVING]
    assert {line["op"] for line in added} == {"reduce_scatter", "all_reduce"}  # shardrt has no reduce
    summed = {line["dtype"] for line in added if (line["op"], line["reduction"]) == ("all_reduce", "sum")}
    assert summed == set(DTYPES) - {"float16", "bfloat16"}
    for dtype, count in (
        ("float32", 5),
        ("int32", 4),
        ("uint8", 4),
        ("int8", 2),
    ):  # avg; min and max of signs
        assert len({each["reduction"] for each in added if each["dtype"] == dtype}) == count, dtype
    for line in lines:
        assert line["communicator"] == "thread" and line["wrong"] == 0 and line["raw_us"] is None
        itemsize = {"bfloat16": 2, "float16": 2}.get(line["dtype"]) or np.dtype(line["dtype"]).itemsize
        assert line["count"] * (3 if line["op"] in SLICED else 1) * itemsize == line["bytes"] == 3072
        assert 0 < line["min_us"] <= line["average_us"] <= line["max_us"]
        assert line["time_us"] == line["average_us"]
        size_over_time = line["bytes"] / line["average_us"] / 1e3
        assert line["algorithm_gb_s"] == pytest.approx(size_over_time, rel=0.01, abs=1e-3)
        assert line["bus_gb_s"] == pytest.approx(size_over_time * BUS[line["op"]], rel=0.01, abs=1e-3)


def test_no_figure_of_a_communicator_that_is_wrong_is_printed(capsys):
    assert main([*THREADS, "all_gather", "broadcast", "--place", "in", "-c", "4"], wrap=wronged) == 1
    printed = capsys.readouterr().out.splitlines()
    gathers = [line.split() for line in printed if line.startswith("  thread all_gather")]
    assert len(gathers) == 2
    for words in gathers:  # of the words 8 say what it is, then come three times and two bandwidths
        assert words[8:13] == ["-"] * 5 and words[13] == "4"  # an element in each of 4 rounds
    broadcasts = [line.split() for line in printed if line.startswith("  thread broadcast")]
    assert len(broadcasts) == 2 and all(float(words[8]) > 0 and words[13] == "0" for words in broadcasts)
    assert "wrong elements: 8 " in printed[-1] and "OK" not in printed[-1]
    assert main([*THREADS, "all_gather", "--place", "in", "--csv"], wrap=wronged) == 1
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    figures = [name for name in rows[0] if name.endswith(("_us", "_gb_s", "ratio"))]
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
    fill(here, target[:count], lambda indices: values(1, indices, 1, "bfloat16"))
    assert 0.8 * count < wrong(target) <= count
    for dtype in ("float32", "int64", "uint16"):
        array = np.zeros(7, dtype)
        poison(array)
        assert count_wrong(here, array, lambda start, stop, dtype=dtype: np.full(stop - start, 7, dtype)) == 7


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


def test_a_missing_factor_of_a_product_is_found():
    case = Case(OPS["all_reduce"], "int8", "out", 999, 3, "prod")
    for rank in range(3):
        others = [case.given(peer, np.arange(999, dtype=np.uint64), 1) for peer in range(3) if peer != rank]
        wrong = count_wrong(device.get("cpu"), others[0] * others[1], lambda a, b: case.expected(0, a, b, 1))
        assert wrong > 250


def planned(line, ranks=2):
    """What a command line would run."""
    return cases(parse(line.split()), ranks)


def test_flags_of_nccl_tests_mean_what_they_mean_there():
    doubled = planned("all_reduce_perf -b 8 -e 128M -f 2 -g 1 -t 2 -p 1 -G 0 -m 1 --place out")
    assert [case.nbytes for case in doubled] == [8 << k for k in range(25)]
    added = planned("alltoall -t 2 -b 1K -e 4K -i 1.5K -d half")
    assert [(case.op.name, case.dtype, case.nbytes) for case in added] == [
        ("all_to_all", "float16", nbytes) for nbytes in (1024, 2560, 4096)
    ]
    (mean,) = planned("reduce_scatter -t 2 -b 1M -e 1M -o avg -d double --place in")
    assert (mean.reduction, mean.dtype, mean.root) == ("avg", "float64", -1)
    roots = planned("broadcast -t 2 -b 1M -e 1M -r all --place out")
    assert [case.root for case in roots] == [0, 1]
    assert [case.root for case in planned("broadcast -t 2 -b 1M -e 1M -r 1")] == [1, 1]
    options = parse("-t 2 -a 3 -z 2 -N 4 -J result.json".split())
    assert (options.average, options.blocking, options.run_cycles) == (3, 2, 4)
    assert str(options.output) == "result.json"
    everything = planned("-t 2")
    assert min(case.nbytes for case in everything) == 1 << 10  # and ends in seconds
    assert max(case.nbytes for case in everything) <= 32 << 20


def test_sizes_are_rounded_to_slices_as_in_nccl_tests():
    gather, reduce = OPS["all_gather"], OPS["all_reduce"]
    assert rounded(gather, "float32", 1 << 20, 3) == 3 * (((1 << 20) // 4 // 3) & ~3) * 4
    assert rounded(gather, "float32", 20, 3) == 12 and rounded(gather, "float32", 8, 3) == 0
    assert rounded(reduce, "float64", 1001, 3) == 992
    found = planned("all_gather -t 3 -b 8 -e 32 -f 2 --place in", ranks=3)
    assert [case.nbytes for case in found] == [12, 24]  # 8 bytes are nothing for each of 3


def test_the_time_over_ranks_is_the_one_that_was_asked_for(capsys):
    words = "-t 2 all_reduce -b 1K -e 1K -z 1 -N 2 --place in --json -a 3".split()
    assert main([*words, *ONCE]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert len(lines) == 2 and all(line["time_us"] == line["max_us"] for line in lines)  # of two cycles
    seconds = np.array([2.0, 1.0, 6.0])  # by rank
    found = [Effort(1, 1, 1, 1, over_ranks=which).one(seconds) for which in range(4)]
    assert found == [2.0, 3.0, 1.0, 6.0]


NONSENSE = {
    "op": (["allgatherv"], "op: unknown 'allgatherv'; known: all_gather"),
    "reduction": (["-o", "mulsum"], "-o: unknown 'mulsum'; known: sum, prod, min, max, avg"),
    "dtype": (["-d", "f8e4m3"], "-d: unknown 'f8e4m3'"),
    "root": (["-t", "2", "-r", "2", "broadcast"], "-r: must be a rank of 2 (0 to 1) or all, got '2'"),
    "GPUs": (["-g", "8"], "-g, --ngpus: only 1 is taken here: a rank has one GPU"),
    "groups": (["-m", "4"], "-m, --agg_iters: only 1 is taken here"),
    "graphs": (["-G", "1"], "-G, --cudagraph: only 0 is taken here"),
    "both steps": (["-i", "1K", "-f", "2"], "not allowed with argument"),
    "endless": (["-N", "0"], "-N: must be at least 1, got 0"),
    "no raw call": (
        ["-t", "2", "reduce"],
        "reduce: not offered for -d float32 -o sum --place out,in by shardrt",
    ),
    "no neighbour": (["sendrecv"], "sendrecv: not offered"),
    "communicator": (["-k", "gloo"], "-k: 'gloo' is unknown"),
    "no peer": (["-k", "mpi"], "'mpi' has no peer to talk to: this run is of one rank"),
    "not threads": (["-t", "2", "-k", "shm"], "-k: 'shm' does not fit ranks that are threads"),
    "no thread": (["-t", "0"], "-t: must be at least 1, got 0"),
    "half an element": (["-e", "2", "broadcast"], "2 bytes are less than one element"),
    "no size": (["-b", "1Q"], "must be a size such as 4096, 4K, 16M or 1G, got '1Q'"),
    "backwards": (["-b", "1M", "-e", "1K"], "-e: 1024 bytes is less than -b"),
    "factor": (["-f", "1"], "-f: must be at least 2, got 1"),
    "nothing timed": (["-n", "0"], "-n: must be at least 1, got 0"),
    "not offered": (["all_to_all", "--place", "in"], "all_to_all: not offered"),
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
    words = ["-k", "mpi,shm", "-b", "1K", "-e", "64K", "-f", "8", "-d", "float,int8,bfloat16", "-r", "1"]
    done = mpirun(2, ["-m", "bench.collectives", *words, *ONCE, "--csv", "-J", str(file)], **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    result = json.loads(file.read_text())
    assert len(rows) == len(result["lines"]) == 2 * 3 * (16 + 16 + 11)
    for row in rows:
        ours = row["op"] != "reduce"  # which shardrt has not
        raw = row["op"] != "reduce_scatter" or row["dtype"] != "bfloat16"  # which MPI does not add
        assert row["wrong"] == ("0" if ours else "") and bool(row["time_us"]) == ours
        assert row["raw_wrong"] == ("0" if raw else "") and bool(row["raw_us"]) == raw
        assert bool(row["overhead_us"]) == bool(row["ratio"]) == (ours and raw)
        assert not ours or float(row["time_us"]) > 0
    assert {(row["of"], row["communicator"]) for row in result["fits"]} == {
        (who, name) for who in ("ours", "raw") for name in ("mpi", "shm")
    }
    assert "-m bench.collectives" in result["command"] and result["ranks"] == 2
    refused = mpirun(2, ["-m", "bench.collectives", "-k", "single"], **ONE_THREAD)
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1
    assert "'single' is of one rank" in refused.stderr and not refused.stdout
