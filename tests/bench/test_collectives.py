"""The benchmark of collectives: everything checked, no figure of what is wrong, nonsense is refused."""

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from bench.collectives import report, schema
from bench.collectives.__main__ import Collectives, main
from bench.collectives.ops import DTYPES, OPS, REDUCTIONS, Case, rounded
from bench.collectives.splits import colors
from bench.collectives.traffic import spread, traffic
from bench.harness import benchmark, communicators
from bench.harness.timing import Effort, measured
from bench.harness.values import count_wrong, fill, values
from bench.peers.launch import ONE_THREAD
from shardrt import device
from shardrt.comm.interceptors import Interceptor
from tests.bench.nonsense import assert_refused
from tests.ranks import mpirun

ANALYSER = Path(__file__).parent / "nccl_tests" / "analyze_perf_json.py"
ONCE = ["-n", "2", "--rounds", "2", "-w", "1"]
THREADS = ["-t", "3", "-b", "1536", "-e", "3072", "-f", "2", *ONCE]
# Bus over algorithm bandwidth at 3 ranks: nccl-tests' doc/PERFORMANCE.md, and GetBw of its src/*.cu.
BUS = {"all_gather": 2 / 3, "reduce_scatter": 2 / 3, "all_reduce": 4 / 3, "broadcast": 1, "all_to_all": 2 / 3}
BUS |= {"reduce": 1, "gather": 2 / 3, "scatter": 2 / 3, "sendrecv": 1, "alltoallv": 2 / 3}
SLICED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "alltoallv")  # count: of a slice
MOVING = ("all_gather", "broadcast", "all_to_all", "alltoallv", "gather", "scatter", "sendrecv")
WHOLE = {name for name in DTYPES if "float" not in name}


class Wrong(Interceptor):
    """Changes one element of what rank 1 gathers."""

    def intercept(self, call, run):
        def wrong(buffer, what):
            run(buffer, what)
            buffer[-1] += 1

        return wrong if call.name == "all_gather" and self.communicator.rank == 1 else run


def rows(printed):
    """The lines of a table, as words."""
    return [line.split() for line in printed.splitlines() if line and not line.startswith("#")]


def wronged(communicator):
    Wrong(communicator)
    return communicator


def test_every_op_type_reduction_place_and_root_is_right_in_a_thread_world(capsys):
    assert main([*THREADS, "-b", "3072", "-d", "all", "-o", "all", "-r", "all", "-c", "2", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    for op in MOVING:
        roots = {0, 1, 2} if op in ("broadcast", "gather", "scatter") else {-1}
        places = {"out"} if op in ("all_to_all", "alltoallv", "sendrecv") else {"out", "in"}
        found = {(line["dtype"], line["place"], line["root"]) for line in lines if line["op"] == op}
        assert found == {(dtype, place, root) for dtype in DTYPES for place in places for root in roots}
    added = [line for line in lines if line["op"] not in MOVING]
    assert {line["op"] for line in added} == {"reduce_scatter", "all_reduce"}  # shardrt has no reduce
    for dtype in DTYPES:  # a mean of integers is not offered, nor the least of what travels with another sign
        found = {each["reduction"] for each in added if (each["op"], each["dtype"]) == ("all_reduce", dtype)}
        lacking = {"avg"} if dtype in WHOLE else set()
        lacking |= {"min", "max"} if dtype in ("int8", "uint32", "uint64") else set()
        assert found == set(REDUCTIONS) - lacking, dtype
    for line in lines:
        assert line["communicator"] == "thread" and line["wrong"] == 0 and line["raw_us"] is None
        itemsize = int(re.search(r"8|16|32|64", line["dtype"])[0]) // 8
        assert line["count"] * (3 if line["op"] in SLICED else 1) * itemsize == line["bytes"] == 3072
        assert 0 < line["min_us"] <= line["average_us"] <= line["max_us"]
        assert line["time_us"] == line["average_us"]
        size_over_time = line["bytes"] / line["average_us"] / 1e3
        assert line["algorithm_gb_s"] == pytest.approx(size_over_time, rel=0.01, abs=1e-3)
        assert line["bus_gb_s"] == pytest.approx(size_over_time * BUS[line["op"]], rel=0.01, abs=1e-3)


def test_no_figure_of_a_communicator_that_is_wrong_is_printed(capsys):
    assert main([*THREADS, "all_gather", "broadcast", "--place", "in", "-c", "4"], wrap=wronged) == 1
    printed = capsys.readouterr().out
    gathers, broadcasts = (rows(part) for part in printed.split("# thread: Broadcast"))
    assert len(gathers) == len(broadcasts) == 2
    for words in gathers:  # of the words 5 say what it is, 4 are out of place and 4 in place
        assert words[5:9] == ["-", "-", "-", "N/A"]
        assert words[9:13] == ["-", "-", "-", "4"]  # an element in each of 4 rounds
    assert all(float(words[9]) > 0 and words[12] == "0" for words in broadcasts)
    assert re.search(r"^# Out of bounds values : 8 FAILED", printed, re.MULTILINE)
    assert main([*THREADS, "all_gather", "--place", "in", "--csv"], wrap=wronged) == 1
    found = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    figures = [name for name in found[0] if name.endswith(("_us", "_gb_s", "ratio"))]
    assert len(figures) >= 9 and all(not row[name] for row in found for name in figures)


def test_a_wrong_raw_call_is_exit_code_1(monkeypatch, capsys):
    def with_raw(bound, *more):
        found = measured(bound, *more)
        return found | {"raw": replace(found["ours"], wrong=1)}

    monkeypatch.setattr("bench.collectives.__main__.measured", with_raw)
    assert main(["-t", "2", "all_gather", "-b", "64", "-e", "64", *ONCE]) == 1
    assert (
        "# Out of bounds values : 0 FAILED (2 of 2 places checked; raw calls: 2)" in capsys.readouterr().out
    )


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


def test_a_missing_factor_of_a_product_is_found():
    case = Case(OPS["all_reduce"], "int8", "out", 999, 3, "prod")
    for rank in range(3):
        others = [case.given(peer, np.arange(999, dtype=np.uint64), 1) for peer in range(3) if peer != rank]
        wrong = count_wrong(device.get("cpu"), others[0] * others[1], lambda a, b: case.expected(0, a, b, 1))
        assert wrong > 250


def parsed(line):
    """The options of a command line, and a benchmark that has checked none of them."""
    made = Collectives()
    options = benchmark.parser_of(made).parse_args(line.split())
    communicators.check(options)
    options.effort = benchmark.effort_of(options)
    return made, options


def planned(line, ranks=2):
    """The cases that a command line would run."""
    made, options = parsed(line)
    return [case for group in made.cases(options, ranks) for case in group]


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
    made, options = parsed("-t 2 -a 3 -z 2 -N 4 -J none.json")
    made.cases(options, 2)
    assert (options.effort.over_ranks, options.effort.blocking, options.run_cycles) == (3, 2, 4)
    assert str(options.output_file) == "none.json"
    everything = planned("-t 2")
    assert min(case.nbytes for case in everything) == 1 << 10  # and ends in seconds
    assert max(case.nbytes for case in everything) <= 32 << 20


# Of its README and of src/alltoallv.cu, with fewer bytes at -e. Its mpirun line is one of mpirun's.
README = (
    "all_reduce_perf -b 8 -e 128 -f 2 -g 8",
    "all_reduce_perf -b 8 -e 8K -f 2 -g 1 -t 2",
    "alltoallv_perf -b 1M -e 2M -f 2 -t 2",
)


@pytest.mark.parametrize("line", README)
def test_command_lines_of_its_readme_run(line, capsys):
    assert main([*line.split(), *ONCE]) == 0
    printed = capsys.readouterr().out
    ranks = 8 if "-g 8" in line else 2
    assert len(re.findall(r"^#  Rank +\d+ Group +0 Pid +\d+ on +\S+ device", printed, re.MULTILINE)) == ranks
    assert all(float(words[5]) > 0 and words[8] == "0" for words in rows(printed))
    assert re.search(r"^# Out of bounds values : 0 OK", printed, re.MULTILINE)
    assert re.search(r"^# Avg bus bandwidth    : [\d.e-]+$", printed, re.MULTILINE)


def test_sizes_for_which_there_is_no_memory_are_left_out_as_in_nccl_tests(monkeypatch, capsys):
    """-e 8G of its README."""
    free = SimpleNamespace(available=2 * 7 * 1024 / 0.9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert main("all_reduce -b 8 -e 8G -f 2 -t 2 -c 0 -w 0 -n 1 --rounds 1".split()) == 0
    printed = capsys.readouterr().out
    assert "# Reducing maxBytes to 1024 due to memory limitation" in printed
    assert [words[0] for words in rows(printed)] == [str(8 << k) for k in range(8)]
    free.available /= 2
    assert_refused(main, ["-b", "2K"], "-b: 2048 bytes are more than 1024, for which there is", capsys)


def test_the_columns_are_nccl_tests_own(capsys):
    """Its head, from src/util.cu, with and without -I."""
    place, each = "time algbw busbw #wrong", "i_min i_max i_p99 i_cv%"
    for more, columns in (((), place), (("-I", "1"), f"{place} {each}")):
        assert main(["-t", "2", "all_reduce", "-b", "64", "-e", "64", *ONCE, *more]) == 0
        printed = capsys.readouterr().out
        (head,) = [line.split() for line in printed.splitlines() if line.startswith("#       size")]
        assert head == f"# size count type redop root {columns} {columns}".split()
        ((*what, _, _, _, wrong), *_) = [words[: 5 + 4] for words in rows(printed)]
        assert (what, wrong) == (["64", "16", "float", "sum", "-1"], "0")
        assert len(rows(printed)[0]) == 5 + 2 * len(columns.split())


def test_sizes_are_rounded_to_slices_as_in_nccl_tests():
    gather, reduce = OPS["all_gather"], OPS["all_reduce"]
    assert rounded(gather, "float32", 1 << 20, 3) == 3 * (((1 << 20) // 4 // 3) & ~3) * 4
    assert rounded(gather, "float32", 20, 3) == 12 and rounded(gather, "float32", 8, 3) == 0
    assert rounded(reduce, "float64", 1001, 3) == 1000  # whole elements: it has no slices
    assert rounded(gather, "float64", 1001, 3) == 3 * 320
    found = planned("all_gather -t 3 -b 8 -e 32 -f 2 --place in", ranks=3)
    assert [case.nbytes for case in found] == [12, 24]  # 8 bytes are nothing for each of 3


def test_the_time_over_ranks_is_the_one_that_was_asked_for(capsys):
    words = "-t 2 all_reduce -b 1K -e 1K -z 1 -N 2 --place in --json -a 3".split()
    assert main([*words, *ONCE]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert len(lines) == 2 and all(line["time_us"] == line["max_us"] for line in lines)  # of two cycles
    assert main(["-t", "2", "all_reduce", "-b", "1K", "-e", "1K", "-z", "3", "-I", "1", "--json", *ONCE]) == 0
    assert len(json.loads(capsys.readouterr().out)["lines"][0]["each"]["times"][0]) == 4
    seconds = np.array([2.0, 1.0, 6.0])  # by rank
    found = [Effort(1, 1, 1, 1, over_ranks=which).one(seconds) for which in range(4)]
    assert found == [2.0, 3.0, 1.0, 6.0]


NONSENSE = {
    "op": (["allgatherv"], "op: unknown 'allgatherv'; known: all_gather"),
    "skips all": (["-I", "1", "-K", "60"], "-K: must be from 0 to 59 of 60 calls, got 60"),
    "skips nothing": (["-K", "3"], "-K: leaves calls out of the figures of -I"),
    "no folder": (["-J", "none/result.json"], "-J: none/result.json can't be written: No such file"),
    "no JSON": (["-J", "result.csv"], "-J: the name must end in .json, got result.csv"),
    "no power of two": (["-t", "3", "hypercube"], "3 ranks are no power of two"),
    "reduction": (["-o", "xor"], "-o: unknown 'xor'; known: sum, prod, max, min, avg, mulsum"),
    "dtype": (["-d", "f4e2m1"], "-d: unknown 'f4e2m1'"),
    "root": (["-t", "2", "-r", "2", "broadcast"], "-r: must be a rank of 2 (0 to 1) or all, got '2'"),
    "no GPU": (["-g", "0"], "-g: must be at least 1, got 0"),
    "groups": (["-m", "4"], "-m, --agg_iters: only 1 is taken here"),
    "graphs": (["-G", "1"], "-G, --cudagraph: only 0 is taken here"),
    "both steps": (["-i", "1K", "-f", "2"], "not allowed with argument"),
    "less than none": (["-N", "-1"], "-N: must be at least 0, got -1"),
    "no raw call": (
        ["-t", "2", "reduce"],
        "reduce: not offered for -d float32 -o sum --place out,in: shardrt has no reduce",
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
    "mean of integers": (["all_reduce", "-d", "int32", "-o", "avg"], "shardrt has no mean of integers"),
}


@pytest.mark.parametrize("words, message", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_one_line_and_exit_code_2(words, message, capsys):
    assert_refused(main, words, message, capsys)


def test_single_calls_are_printed_and_nvidias_analyser_reads_them(tmp_path, capsys):
    """Its own tool, unchanged, on a run of two ops."""
    file = tmp_path / "result.json"
    words = "-t 2 all_reduce all_gather -b 64 -e 1K -f 4 -I 1 -K 2 -S 1".split()
    assert main([*words, "-n", "5", "--rounds", "2", "-J", str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"# Writing JSON output to {file}" in printed
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", " ".join(row[-2:])) for row in rows(printed))
    assert (
        len(re.findall(r"^# thread all_\w+ .* ours .* [01] by [\d.]+ %$", printed, re.MULTILINE)) == 2 * 2 * 3
    )
    found = json.loads(file.read_text())
    assert found["version"] == 3 and found["config"]["iterations"] == 10
    assert [result["experiment_name"] for result in found["results"]] == ["AllReduce"] * 3 + ["AllGather"] * 3
    for result in found["results"]:
        for place in ("out_of_place", "in_place"):
            each = result[f"{place}_per_iter"]
            assert result[place]["nwrong"] == 0 and result[place]["time"] > 0
            assert np.shape(each["per_process_max_times_us"]) == (2, 10) and len(each["times_us"]) == 10
            counted = sorted(each["times_us"][2:])
            assert (each["min_us"], each["p50_us"], each["max_us"]) == (counted[0], counted[4], counted[-1])
            assert each["p99_us"] == each["max_us"] and each["skipped_iterations"] == 2
    for more in (["--all"], ["--all", "--in-place"]):
        read = [sys.executable, ANALYSER, file, *more]
        text = subprocess.run(read, capture_output=True, text=True, check=True).stdout
        assert "Consistency" in text and "PASS" in text and "FAIL" not in text
        for part in ("OVERVIEW", "PER-ITERATION STATS", "STRAGGLER", "SPIKE", "WARMUP", "PER-NODE"):
            assert part in text
        assert "Process rows: 2" in text and "(1 nodes" in text
    assert schema.free(file).name == "result.json.0"


def test_each_sweep_has_its_lines_in_the_file(tmp_path, capsys):
    file = tmp_path / "result.json"
    words = ["-t", "2", "all_gather", "all_to_all", "-b", "64", "-e", "64", "-N", "3", "-J", str(file)]
    assert main([*words, *ONCE]) == 0
    found = json.loads(file.read_text())["results"]
    assert [result["experiment_name"] for result in found] == ["AllGather", "AlltoAll"] * 3
    assert all(result["out_of_place"]["time"] > 0 for result in found)
    assert [result["in_place"] is None for result in found] == [False, True] * 3


def test_types_of_all_widths_run_at_an_odd_size(capsys):
    """-d all over a size that is no multiple of the widest type."""
    assert main(["-t", "3", "all_reduce", "gather", "-d", "int8,double", "-b", "33", "-e", "33", *ONCE]) == 0
    found = [words[:3] for words in rows(capsys.readouterr().out)]
    assert found[:2] == [["33", "33", "int8"], ["32", "4", "double"]]
    assert found[2:] == [["33", "11", "int8"], ["24", "1", "double"]]


def test_a_figure_is_as_wide_as_in_nccl_tests():
    """Its getFloatStr; the widths are those of time and of algbw."""
    long = {7: "1.2e+07 9999999 1234.50 0.00".split(), 6: ["1e+07", "1e+07", "1234.5", "0.00"]}
    for width, texts in long.items():
        assert [report._short(value, width) for value in (1.24e7, 9999999, 1234.5, 0.001)] == texts


def test_the_file_names_no_secret_of_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    file = tmp_path / "result.json"
    assert main(["-t", "2", "broadcast", "-b", "64", "-e", "64", "-J", str(file), *ONCE]) == 0
    assert "hunter2" not in file.read_text() and "NCCL_ALGO=Ring" in json.loads(file.read_text())["env"]


@pytest.mark.parametrize("least, code, word", [("1e-9", 0, "OK"), ("1e9", 1, "FAILED")])
def test_a_run_below_the_least_bandwidth_fails(least, code, word, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", least)
    file = tmp_path / "result.json"
    assert main(["-t", "2", "broadcast", "-b", "64", "-e", "64", "-J", str(file), *ONCE]) == code
    assert re.search(rf"^# Avg bus bandwidth    : \S+ {word}$", capsys.readouterr().out, re.MULTILINE)
    assert json.loads(file.read_text())["average_bus_bandwidth"]["okay"] == (
        "true" if word == "OK" else "false"
    )
    monkeypatch.setenv("NCCL_TESTS_MIN_BW", "fast")
    assert_refused(main, ["-t", "2", "broadcast"], "NCCL_TESTS_MIN_BW: must be GB/s, got 'fast'", capsys)


SPLITS = {
    "AND 0x1": [0, 1, 0, 1],
    "&1": [0, 1, 0, 1],
    "mod 2": [0, 1, 0, 1],
    "OR 0b1": [1, 1, 3, 3],
    "DIV 2": [0, 0, 1, 1],
    "/ 4": [0, 0, 0, 0],
}


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_are_split_as_nccl_tests_splits_them(split, monkeypatch):
    assert colors(4) == [0] * 4
    monkeypatch.setenv("NCCL_TESTS_SPLIT", split)
    assert colors(4) == SPLITS[split]
    monkeypatch.setenv("NCCL_TESTS_SPLIT_MASK", "2")  # hexadecimal, and stronger
    assert colors(4) == [0, 0, 2, 2]


@pytest.mark.parametrize(
    "split, message", {"XOR 1": "must be AND, OR", "MOD 0": "divides by 0", "DIV 3": "of one size"}.items()
)
def test_splits_that_make_no_sense_are_refused(split, message, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_TESTS_SPLIT", split)
    assert_refused(main, ["-t", "4", "all_reduce"], message, capsys)


def test_groups_run_at_once_and_each_is_right(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_TESTS_SPLIT", "MOD 2")
    assert main(["-t", "4", "-b", "1K", "-e", "1K", "all_reduce", "all_gather", "hypercube", *ONCE]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^#  Rank +(\d) Group +(\d)", printed, re.MULTILINE) == [
        ("0", "0"),
        ("1", "1"),
        ("2", "0"),
        ("3", "1"),
    ]
    factor = [float(words[7]) / float(words[6]) for words in rows(printed) if float(words[6]) > 0.05]
    assert all(each == pytest.approx(1.0, abs=0.6) for each in factor)  # 2 * (2 - 1) / 2, of two ranks
    assert main(["-t", "4", "-b", "1K", "-e", "1K", "all_gather", *ONCE], wrap=wronged) == 1


def test_uneven_traffic_is_nccl_tests(tmp_path, monkeypatch):
    """AlltoAllvGetPeerBytesDistanceWeighted, by hand: 4 ranks, 6 distances in all."""
    found = spread(4, 1.0, 6 * 1024)
    assert found.rows[0] == (0, 1024, 2048, 3072) and found.rows[1] == (3072, 0, 1024, 2048)
    assert found.largest == 6 * 1024 and found.per_pair == 1536
    assert spread(4, 0.0, 6 * 1024).rows[2] == (1536,) * 4
    assert spread(1, 1.0, 100).rows == ((96,),)
    assert spread(3, 0.3, 1024).rows[0] == (224, 336, 432)  # in its order of operations: else 320
    monkeypatch.setenv("NCCL_TESTS_ALLTOALLV_SPREAD", "0.5")
    assert traffic(4)(6 * 1024).rows[0] == (768, 1280, 1792, 2304)
    file = tmp_path / "matrix"
    file.write_text("100 200 150\n50 100 75\n300 150 200\n")
    monkeypatch.setenv("NCCL_TESTS_ALLTOALLV_MATRIX_FILE", str(file))
    assert traffic(3)(1).rows == ((96, 192, 144), (48, 96, 64), (288, 144, 192))
    assert traffic(2)(1).received(1) == (192, 96)
    assert main(["-t", "3", "alltoallv", "-b", "4K", "-e", "4K", *ONCE]) == 0
    (case,) = planned("alltoallv -t 3", ranks=3)  # one line, for all sizes of -b to -e
    assert (case.nbytes, case.count) == (624, 0)
    for text in ("1 2\n3", "1 -2\n3 4", "1 x\n2 3", "", "nan 1\n1 1", "1e30 1\n1 1"):
        file.write_text(text)
        with pytest.raises(ValueError, match="MATRIX_FILE"):
            traffic(2)
    monkeypatch.delenv("NCCL_TESTS_ALLTOALLV_MATRIX_FILE")
    monkeypatch.setenv("NCCL_TESTS_ALLTOALLV_SPREAD", "2")
    with pytest.raises(ValueError, match="SPREAD: must be a number from 0 to 1, got '2'"):
        traffic(2)


@pytest.mark.mpi
def test_two_processes_beside_mpi4py(tmp_path):
    file = tmp_path / "result.json"
    words = ["-k", "mpi,shm", "-b", "1K", "-e", "64K", "-f", "8", "-d", "float,int8,bfloat16", "-r", "1"]
    done = mpirun(2, ["-m", "bench.collectives", *words, *ONCE, "--csv", "--output", str(file)], **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    found = list(csv.DictReader(done.stdout.splitlines()))
    result = json.loads(file.read_text())
    places = sum(len(op.places) for op in OPS.values())
    assert len(found) == len(result["lines"]) == 2 * 3 * (3 * places - 2)  # MPI alone reduces, not bfloat16
    for row in found:
        ours = row["op"] != "reduce"  # which shardrt has not
        raw = row["dtype"] != "bfloat16" or row["op"] not in ("reduce_scatter", "all_reduce")
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


@pytest.mark.mpi
def test_groups_of_processes_next_to_mpi4py():
    words = [
        "-m",
        "bench.collectives",
        "all_reduce",
        "hypercube",
        "alltoallv",
        "-k",
        "mpi",
        "-b",
        "1K",
        "-e",
        "1K",
    ]
    done = mpirun(4, [*words, *ONCE], NCCL_TESTS_SPLIT="DIV 2", **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert len(rows(done.stdout)) == 3
    for words in rows(done.stdout):
        assert words[8] == "0" and float(words[13]) > 0  # the raw call's time
    assert "raw calls: 0" in done.stdout and os.environ.get("NCCL_TESTS_SPLIT") is None


@pytest.mark.mpi
@pytest.mark.serial
def test_a_call_takes_as_long_as_in_a_loop_of_mpi4pys_own():
    """Quiet, medians are within 3 %; here the bounds are those of a machine that others use."""
    done = mpirun(2, ["-m", "tests.bench.own_loop", "9", "100"], **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    for case in json.loads(done.stdout)["cases"]:
        assert 0.7 < case["p50"] < 1.4, case
