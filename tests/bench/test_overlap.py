"""The benchmark of overlap finds overlap where there is some, none where there is none, and wrong results."""

import json
import time
from functools import partial

import pytest

from bench.collectives.ops import OPS
from bench.collectives.started import InStream
from bench.harness.benchmark import main
from bench.overlap import WAYS, Matmuls, Overlap
from bench.peers.launch import ONE_THREAD
from shardrt import device
from shardrt.comm.delay import CollectiveDelay
from shardrt.comm.interceptors import Interceptor
from shardrt.device.cpu import CPUDevice
from shardrt.kernels.cpu import matmul as kernel
from tests.bench.nonsense import assert_refused
from tests.ranks import mpirun

# Seconds of a matmul, and half of those of a collective: far above their work, and a sleep needs no core.
SLEEP = 0.03
FEW = ["-n", "1", "--rounds", "3", "-w", "0"]
SLEEPING = ["-t", "2", "all_gather", "-b", "4K", "-e", "4K", "--side", "16", *FEW, "--json"]
FIGURES = [*(f"{way}_us" for way in WAYS), "overlap_pct", "min_pct", "max_pct"]
FIGURES += ["bus_gb_s", "bus_together_gb_s", "gflop_s", "gflop_together_s"]


class Wrong(Interceptor):
    """Changes one element of what rank 1 gathers."""

    def intercept(self, call, run):
        def wrong(buffer, tag):
            run(buffer, tag)
            buffer[-1] += 1

        return wrong if call.name == "all_gather" and self.communicator.rank == 1 else run


def overlap(interceptor=None):
    """The benchmark, its communicators with an interceptor."""

    def wrap(communicator):
        if interceptor is not None:
            interceptor(communicator)
        return communicator

    benchmark = Overlap()
    benchmark.wrap = wrap
    return benchmark


def lines_of(words, capsys, benchmark=None, code=0):
    """The lines of a run."""
    assert main(benchmark or Overlap(), words) == code
    return json.loads(capsys.readouterr().out)["lines"]


@pytest.fixture
def sleeping(monkeypatch):
    """Matmuls take SLEEP, and the collectives of the given benchmark as long as two."""
    matmul = kernel.matmul

    def slow(*arrays):
        time.sleep(SLEEP)
        matmul(*arrays)

    monkeypatch.setattr(kernel, "matmul", slow)
    return overlap(partial(CollectiveDelay, delay=2 * SLEEP))


def test_sleeping_collectives_and_matmuls_overlap_whole(sleeping, capsys):
    (line,) = lines_of([*SLEEPING, "--matmuls", "2"], capsys, sleeping)
    assert line["matmuls"] == 2 and line["wrong"] == 0
    assert 50 < line["overlap_pct"] < 150
    assert line["together_us"] < 0.75 * line["serial_us"]


def test_a_collective_in_the_compute_stream_does_not_overlap(sleeping, capsys, monkeypatch):
    monkeypatch.setattr(CPUDevice, "new_stream", lambda self, name: self.current_stream)
    (line,) = lines_of([*SLEEPING, "--matmuls", "2"], capsys, sleeping)
    assert -50 < line["overlap_pct"] < 50
    assert line["together_us"] > 0.75 * line["serial_us"]


def test_a_collective_that_starts_after_the_matmuls_does_not_overlap(sleeping, capsys, monkeypatch):
    """As where nothing makes progress between the start of a non-blocking call and the wait for it."""
    start, finish = InStream.start, InStream.finish
    monkeypatch.setattr(InStream, "start", lambda self, call: setattr(self, "late", call))
    monkeypatch.setattr(InStream, "finish", lambda self: (start(self, self.late), finish(self)))
    (line,) = lines_of([*SLEEPING, "--matmuls", "2"], capsys, sleeping)
    assert -50 < line["overlap_pct"] < 50


def test_as_many_matmuls_as_take_about_as_long_as_the_collective(sleeping, capsys):
    slower = overlap(partial(CollectiveDelay, delay=4 * SLEEP))
    (line,) = lines_of([*SLEEPING, "--rounds", "1"], capsys, slower)
    assert 2 <= line["matmuls"] <= 6


def test_calls_of_test_are_spread_over_the_matmuls(monkeypatch):
    called, matmul = [], kernel.matmul
    monkeypatch.setattr(kernel, "matmul", lambda *arrays: (called.append("matmul"), matmul(*arrays)))
    matmuls = Matmuls(device.get("cpu"), 4)
    for count, tests, expected in ((3, 0, "mmm"), (3, 2, "mmtmt"), (2, 5, "mttmttt")):
        called.clear()
        matmuls.run(count, lambda: called.append("test"), tests)
        assert "".join(name[0] for name in called) == expected


def test_rates_and_overlap_are_those_of_the_times(capsys):
    words = [
        "-t",
        "3",
        "-b",
        "3K",
        "-e",
        "12K",
        "-f",
        "4",
        "--side",
        "32",
        "-n",
        "2",
        "--rounds",
        "1",
        "--json",
    ]
    lines = lines_of(words, capsys)
    assert [(line["op"], line["bytes"]) for line in lines] == [
        (op, nbytes)
        for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        for nbytes in (3072, 12288)
    ]
    for line in lines:
        alone, compute, _, together = (line[f"{way}_us"] for way in WAYS)
        bus, flops = line["bytes"] * OPS[line["op"]].bus(3) / 1e3, line["matmuls"] * 2 * 32**3 / 1e3
        close = partial(pytest.approx, rel=0.01, abs=2e-3)
        assert line["bus_gb_s"] == close(bus / alone) and line["bus_together_gb_s"] == close(bus / together)
        assert line["gflop_s"] == close(flops / compute) and line["gflop_together_s"] == close(
            flops / together
        )
        assert line["overlap_pct"] == close(100 * (alone + compute - together) / min(alone, compute), abs=0.1)
        assert line["min_pct"] == line["overlap_pct"] == line["max_pct"]  # of one round
        assert line["by"] == "ours" and line["communicator"] == "thread" and line["wrong"] == 0


def test_no_figure_of_a_wrong_collective(capsys):
    words = ["-t", "2", "all_gather", "all_to_all", "-e", "64K", "--side", "16", *FEW, "-c", "3", "--json"]
    gathered, exchanged = lines_of(words, capsys, overlap(Wrong), code=1)
    assert gathered["wrong"] == 3 and all(gathered[name] is None for name in FIGURES)  # one in each round
    assert exchanged["wrong"] == 0 and all(exchanged[name] is not None for name in FIGURES)


def test_no_figure_of_a_wrong_matmul(capsys, monkeypatch):
    """Here: of one that has other bits in its third call and later, by one unit in the last place."""
    matmul, calls = kernel.matmul, []

    def off(a, b, out):
        matmul(a, b, out)
        calls.append(1)
        if len(calls) > 2:
            out.view("int32")[0, 0] += 1

    monkeypatch.setattr(kernel, "matmul", off)
    (line,) = lines_of(["-e", "64K", "all_reduce", "--side", "16", *FEW, "--json"], capsys, code=1)
    assert line["wrong"] == 1 and all(line[name] is None for name in FIGURES)


def test_a_picture_is_drawn_without_what_is_wrong(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "overlap.png"
    words = ["-t", "2", "all_gather", "all_to_all", "-b", "4K", "-e", "64K", "--side", "16", *FEW]
    assert main(overlap(Wrong), [*words, "--picture", str(file)]) == 1
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    printed = capsys.readouterr().out
    assert "# threads: " in printed and "for collectives, on each of 2 ranks of a node; " in printed


NONSENSE = {
    "op": (["gather"], "OP: unknown 'gather'; known: all_gather, reduce_scatter, all_reduce, all_to_all"),
    "backwards": (["-b", "1M", "-e", "1K"], "-e: 1024 bytes is less than -b, 1048576"),
    "factor": (["-f", "1"], "-f: must be at least 2, got 1"),
    "nothing": (["-b", "0"], "-b: must be at least 1, got 0"),
    "half an element": (["-t", "2", "-b", "4", "-e", "4"], "-b: 4 bytes are less than one float32 for each"),
    "side": (["--side", "0"], "--side: must be at least 1, got 0"),
    "no matmul": (["--matmuls", "0"], "--matmuls: must be at least 1, got 0"),
    "tests": (["--test-calls", "-1"], "--test-calls: must be at least 0, got -1"),
    "picture": (
        ["--picture", "no/such/folder.png"],
        "--picture: must be a .png or .svg file in a folder that exists",
    ),
    "no picture": (
        ["--picture", "overlap.txt"],
        "--picture: must be a .png or .svg file in a folder that exists",
    ),
    "communicator": (["-k", "gloo"], "-k: 'gloo' is unknown"),
    "rounds": (["--rounds", "0"], "--rounds: must be at least 1, got 0"),
}


@pytest.mark.parametrize("words, message", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_one_line_and_exit_code_2(words, message, capsys):
    assert_refused(partial(main, Overlap()), words, message, capsys)


@pytest.mark.mpi
def test_two_processes_next_to_non_blocking_calls(tmp_path):
    file = tmp_path / "result.json"
    words = ["-b", "8K", "-e", "8K", "--side", "32", "--matmuls", "3", "--test-calls", "7", "-k", "mpi,shm"]
    arguments = ["-m", "bench.overlap", *words, *FEW, "-c", "2", "-o", str(file)]
    done = mpirun(2, arguments, **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert [(line["communicator"], line["op"], line["by"]) for line in result["lines"]] == [
        (kind, op, by)
        for kind in ("mpi", "shm")
        for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
        for by in ("ours", "mpi4py")
    ]
    for line in result["lines"]:
        assert line["wrong"] == 0 and line["matmuls"] == 3 and all(line[name] is not None for name in FIGURES)
    assert result["threads"].startswith("1 for matmuls + 1 for collectives, on each of 2 ranks")
    refused = mpirun(2, ["-m", "bench.overlap", "--matmuls", "none"], **ONE_THREAD)
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1 and not refused.stdout
