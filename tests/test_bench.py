"""The benchmarks: what they print, that contestants do the same work, and how they refuse."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from bench import compare, workload
from bench.peers.launch import ONE_THREAD, launch, one_thread
from tests.ranks import ROOT, mpirun

TINY = workload.Workload(layers=1, dim=16, heads=2, seq=8, batch=2, vocab=17)
ARGUMENTS = [*TINY.arguments(), "--steps", "3", "--warmup", "1"]
REQUIRED = {"step_ms_median", "tokens_per_s", "peak_rss_mb", "world_size", "parameters", "loss", "settings"}


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, cwd=ROOT, env=one_thread()
    )


def figures_of(done):
    """The last line of a run that succeeded."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def step_on_two_ranks(*arguments):
    """The figures of bench.step under mpirun."""
    return figures_of(mpirun(2, ["-m", "bench.step", *arguments], timeout=120, **ONE_THREAD))


def check(figures, ranks):
    """A figures object is whole and agrees with itself."""
    assert REQUIRED <= figures.keys()
    assert figures["world_size"] == ranks
    assert len(figures["step_ms"]) == 3 and len(figures["losses"]) == 4
    assert figures["step_ms_median"] == sorted(figures["step_ms"])[1]
    tokens = ranks * TINY.batch * TINY.seq
    assert figures["tokens_per_s"] == pytest.approx(1e3 * tokens / figures["step_ms_median"], rel=1e-2)
    assert figures["loss"] == figures["losses"][-1] == pytest.approx(np.log(TINY.vocab), rel=0.05)
    assert 30 < figures["peak_rss_mb"] < 5000


def test_batches_are_a_function_of_step_and_rank():
    tokens, targets = TINY.batch_of(3, 1)
    assert tokens.shape == targets.shape == (TINY.batch, TINY.seq)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(tokens, TINY.batch_of(3, 1)[0])
    assert (tokens != TINY.batch_of(3, 0)[0]).any() and (tokens != TINY.batch_of(2, 1)[0]).any()


def test_a_step_without_mpirun_ends_with_one_json_line():
    done = python("-m", "bench.step", *ARGUMENTS)
    check(figures_of(done), ranks=1)


def test_with_json_nothing_else_is_printed():
    done = python("-m", "bench.step", *ARGUMENTS, "--json")
    assert len(done.stdout.splitlines()) == 1, done.stderr
    check(json.loads(done.stdout), ranks=1)


@pytest.mark.mpi
@pytest.mark.parametrize("clip", [[], ["--clip", "0.5"]], ids=["", "clipped"])
def test_a_step_on_two_ranks_counts_the_tokens_of_both(clip):
    check(step_on_two_ranks(*ARGUMENTS, *clip, "--json"), ranks=2)


@pytest.mark.mpi
@pytest.mark.torch
def test_contestants_have_the_same_losses(tmp_path):
    pytest.importorskip("torch")
    assert python("-m", "bench.step", *ARGUMENTS, "--save", str(tmp_path)).returncode == 0
    words = [*ARGUMENTS, "--weights", str(tmp_path), "--json"]
    ours = step_on_two_ranks(*words)
    theirs = json.loads(launch(["-m", "bench.peers.torch_step", *words], 2, one_thread()).splitlines()[-1])
    check(theirs, ranks=2)
    assert theirs["parameters"] == ours["parameters"]
    assert theirs["settings"]["threads_per_rank"] == ours["settings"]["threads_per_rank"] == 1
    assert compare.difference(ours["losses"], theirs["losses"]) < 1e-6


def test_a_width_that_the_heads_do_not_divide_is_one_line_from_two_ranks():
    done = mpirun(2, ["-m", "bench.step", "--dim", "17", "--heads", "2"], timeout=60)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and "n_embd" in lines[0] and "17" in lines[0]


def test_an_unknown_strategy_is_refused_with_the_known_ones():
    done = python("-m", "bench.step", "--strategy", "HALF_SHARD")
    assert done.returncode == 2 and "HALF_SHARD" in done.stderr and "FULL_SHARD" in done.stderr


def test_a_rank_that_fails_ends_the_launch_with_its_error():
    program = (
        "import os, sys, time; sys.exit('rank one fell') if os.environ['RANK'] == '1' else time.sleep(60)"
    )
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code 1\n.*rank one fell"):
        launch(["-c", program], 2, one_thread(), timeout=30)


def fake(milliseconds, losses=(2.0, 1.0), other_load=0.0):
    return workload.figures(
        TINY,
        contestant="fake",
        step_seconds=[[milliseconds / 1e3] * 3, [milliseconds / 2e3] * 3],
        losses=[losses, losses],
        peak_rss_mb=[10.0, 20.0],
        parameters=5,
        settings={},
        versions={"blas": "none"},
    ) | {"other_load": other_load}


def test_the_slowest_rank_and_the_largest_memory_count():
    figures = fake(8)
    assert figures["step_ms_median"] == 8 and figures["peak_rss_mb"] == 20
    assert figures["tokens_per_s"] == 2 * TINY.batch * TINY.seq / 8e-3


def test_ratios_are_taken_within_a_round():
    contestants = [compare.Contestant("a", "", "FULL_SHARD"), compare.Contestant("b", "", "fsdp2")]
    rounds = [[fake(10), fake(20)], [fake(20), fake(30)], [fake(10), fake(30)]]
    result = compare.summary(contestants, rounds)
    assert result["contestants"][1]["ratios"] == [2.0, 1.5, 3.0]
    assert result["contestants"][1]["ratio"] == 2.0
    assert result["loss_difference"] == 0
    assert "2.00 (1.50 to 3.00)" in compare.table(result)


def test_losses_that_differ_show_unless_a_contestant_trained_alone():
    rounds = [[fake(10), fake(20, losses=(2.0, 1.1))]]
    for strategy, expected in (("fsdp2", 0.1 / 1.1), ("NONE", 0.0)):
        contestants = [compare.Contestant("a", "", "FULL_SHARD"), compare.Contestant("b", "", strategy)]
        assert compare.summary(contestants, rounds)["loss_difference"] == pytest.approx(expected)


@pytest.mark.parametrize(("other_load", "doubtful"), [(0.01, False), (0.5, True)])
def test_a_run_beside_busy_processes_is_called_doubtful(other_load, doubtful):
    contestants = [compare.Contestant("a", "", "FULL_SHARD"), compare.Contestant("b", "", "fsdp2")]
    rounds = [[fake(10), fake(20)], [fake(10), fake(20, other_load=other_load)]]
    assert ("doubtful" in compare.table(compare.summary(contestants, rounds))) == doubtful


def test_the_load_of_other_processes_is_seen():
    program = "import time; end = time.time() + 1.5\nwhile time.time() < end: pass"
    other = subprocess.Popen([sys.executable, "-c", program])
    load, _ = compare.load_of_others(lambda: time.sleep(1))
    other.wait()
    assert load > 0.3


def test_a_disturbed_run_is_repeated_while_patience_lasts(monkeypatch):
    loads = iter([0.5, 0.0, 0.7, 0.0, 0.02])  # wait, wait, disturbed run, wait, run
    monkeypatch.setattr(compare, "load_of_others", lambda action: (next(loads), {"run": 1}))
    contestant = compare.Contestant("a", "", "FULL_SHARD")
    assert compare.watched(contestant, [], 1, patience=60) == {"run": 1, "other_load": 0.02}
    loads = iter([0.7])
    assert compare.watched(contestant, [], 1, patience=0) == {"run": 1, "other_load": 0.7}


def test_compare_overwrites_nothing(tmp_path):
    output = tmp_path / "figures.json"
    output.write_text("mine")
    done = python("-m", "bench.compare", "--output", str(output))
    assert done.returncode == 2 and "exists" in done.stderr
    assert output.read_text() == "mine"
