"""What benchmarks share: percentiles as nccl-tests counts them, contestants that alternate, cheap clocks."""

import json
import time

import numpy as np
import pytest

from bench.barrier import Barrier
from bench.harness import command_line
from bench.harness.benchmark import Benchmark, main
from bench.harness.fit import fit
from bench.harness.stats import nearest, slowest, spikes, stats, straggler
from bench.harness.timing import Contestant, Effort, HostReadings, measured, one_by_one
from bench.harness.values import FLOAT8, count_wrong, decoded, encoded, poison, sparse, values
from shardrt import device
from shardrt.comm import thread
from shardrt.comm.backends import create
from shardrt.comm.interceptors import Interceptor


def test_percentiles_are_nccl_tests():
    """computeIterStats and percentileIndex of its src/util.cu, by hand."""
    found = stats(range(100, 0, -1))
    assert (found.min, found.max, found.avg) == (1, 100, 50.5)
    assert (found.p50, found.p90, found.p95, found.p99) == (51, 90, 95, 99)  # p50: sorted[n / 2]
    assert found.stdev == pytest.approx(np.std(np.arange(1, 101))) and found.cv_pct == pytest.approx(
        57.16, abs=0.01
    )
    few = stats([3.0, 1.0, 2.0])
    assert few.p99 == few.max == 3.0 and few.p50 == 2.0
    assert [nearest(20, percent) for percent in (50, 90, 95, 99)] == [9, 17, 18, 19]
    assert stats([4.0]).p50 == 4.0 and stats([0.0, 0.0]).cv_pct == 0.0


def test_spikes_and_the_straggler_are_found():
    each = np.full((3, 10), 10.0)
    each[:, 4] = 40.0  # all ranks
    each[2, 7] = 30.0  # one
    assert spikes(each) == {4: [0, 1, 2], 7: [2]}
    assert slowest(each).tolist() == [10.0] * 4 + [40.0] + [10.0] * 2 + [30.0] + [10.0] * 2
    late = straggler(each)
    assert late.rank == 2 and late.spread == pytest.approx(15 / 13 - 1)
    assert not spikes(np.full((2, 5), 3.0))


def test_contestants_alternate_and_each_call_is_timed():
    order = []

    def rank():
        here, control = device.get("cpu"), create("auto")
        names = ("a", "b") if control.rank == 0 else ()
        calls = {name: Contestant(lambda name=name: order.append(name) if names else None) for name in "ab"}
        found = measured(calls, here, control, Effort(warmup=1, calls=3, rounds=2, each=True))
        assert found["a"].seconds.shape == (2, 2) and found["a"].each.shape == (2, 6)
        assert (found["b"].each > 0).all() and found["a"].wrong is None
        means = found["a"].each.reshape(2, 2, 3).mean(axis=2)
        np.testing.assert_allclose(found["a"].seconds, means)

    thread.run(2, rank)
    assert "".join(order) == "ab" + "aaabbb" * 2


def test_the_slow_call_of_many_is_the_one_that_is_found():
    pauses = iter([0.0, 0.0, 0.05, 0.0, 0.0])
    found = one_by_one(lambda: time.sleep(next(pauses)), 5, HostReadings())
    assert int(np.argmax(found)) == 2 and found[2] >= 0.05


def test_timing_a_call_costs_no_more_than_a_few_readings_of_the_clock():
    """Both in processor time of this thread, so that others on the machine do not count."""

    def nothing():
        pass

    def cost(function):
        start = time.thread_time()
        function()
        return time.thread_time() - start

    def readings():
        for _ in range(50_000):
            time.perf_counter_ns()

    ratios = [cost(lambda: one_by_one(nothing, 50_000, HostReadings())) / cost(readings) for _ in range(5)]
    assert min(ratios) < 12


@pytest.mark.parametrize("checks, wrong", [(0, None), (2, 9)])
def test_what_each_rank_finds_wrong_is_added(checks, wrong):
    def rank():
        control = create("auto")
        rival = Contestant(lambda: None, lambda round_: control.rank * round_)
        found = measured({"a": rival}, device.get("cpu"), control, Effort(calls=1, rounds=1, checks=checks))
        assert found["a"].wrong == wrong and found["a"].each is None

    thread.run(3, rank)


class Squares(Benchmark):
    """A benchmark of one column."""

    name = "squares"
    columns = {"case": "6", "time_us": "10.2f", "what": "<6", "wrong": "5"}

    def add_options(self, add):
        add("numbers", nargs="*", type=int)

    def cases(self, options, ranks):
        if not options.numbers:
            raise ValueError("numbers: there is none")
        return options.numbers

    def lines(self, options, cases, control):
        for case in cases:
            rival = Contestant(lambda case=case: case**2, lambda round_, case=case: int(case < 0))
            found = measured({"a": rival}, device.get("cpu"), control, options.effort)["a"]
            figure = None if found.wrong else 1e6 * found.seconds.mean()
            yield {"case": case, "time_us": figure, "what": "square", "wrong": found.wrong}


def test_a_benchmark_prints_its_table_and_no_figure_of_what_is_wrong(capsys):
    assert main(Squares(), ["-t", "2", "3", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3].split() == ["#", "case", "time_us", "what", "wrong"]
    assert printed[-2].split()[2:] == ["square", "0"] and printed[-1] == "# wrong: 0 OK"
    assert main(Squares(), ["3", "--", "-1"]) == 1
    assert [line.split()[1] == "-" for line in capsys.readouterr().out.splitlines()[-3:-1]] == [False, True]
    for words, message in (
        ([], "numbers: there is none"),
        (["1", "-n", "0"], "-n: must be at least 1, got 0"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(Squares(), words)
        assert ended.value.code == 2 and capsys.readouterr().err == f"error: {message}\n"


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


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint16", *FLOAT8, "bfloat16"])
def test_nothing_that_is_poisoned_is_taken_for_a_value(dtype):
    array = values(0, np.arange(7, dtype=np.uint64), 1, dtype)
    right = array.copy()
    poison(array)
    assert count_wrong(device.get("cpu"), array, lambda start, stop: right[start:stop]) == 7


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_sums_of_sparse_values_are_exact_in_8_bits_in_any_order(dtype, ranks):
    indices = np.arange(500, dtype=np.uint64)
    parts = [sparse(rank, ranks, indices, 3) for rank in range(ranks)]
    exact = np.sum(parts, axis=0)
    assert len(set(exact.tolist())) > 3
    for order in (parts, parts[::-1]):
        total = encoded(np.zeros(500), dtype)
        for part in order:
            total = encoded(decoded(total, dtype) + part, dtype)
        np.testing.assert_array_equal(decoded(total, dtype), exact)


def test_sizes_are_read_as_they_are_written():
    assert [command_line.nbytes(text) for text in ("12", "1K", "1KiB", "16MB", "2g")] == [
        *(12, 1024, 1024),
        *(16 << 20, 2 << 30),
    ]


class Open(Interceptor):
    """A barrier that waits for no rank."""

    def intercept(self, call, run):
        return (lambda *args: None) if call.name == "barrier" else run


def opened(communicator):
    Open(communicator)
    return communicator


def test_a_barrier_that_does_not_wait_is_found(capsys):
    words = ["-t", "3", "-n", "5", "--rounds", "1", "-c", "3", "--json"]
    assert main(Barrier(), words) == 0
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert line["wrong"] == 0 < line["p50_us"] <= line["p99_us"] <= line["max_us"]
    broken = Barrier()
    broken.wrap = opened
    assert main(broken, words) == 1
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert line["wrong"] > 0 and line["p50_us"] is None
