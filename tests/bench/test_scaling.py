"""bench.scaling: what it runs, what its figures mean, and how it refuses."""

import json

import pytest

from bench import scaling
from tests.bench.test_compare import TINY, python
from tests.ranks import mpirun_path


@pytest.mark.mpi
def test_a_row_has_the_traffic_of_the_formula():
    mpirun_path()
    words = ["--ranks", "2", "--only", "strong", "--steps", "2", "--patience", "0", "--json"]
    done = python("-m", "bench.scaling", *TINY.arguments(), *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("runs: 1, ")
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["kind"], row["ranks"], row["batch_per_rank"]) == ("strong", 2, 1)
    assert row["received_mb"] == pytest.approx(row["formula_mb"], abs=1e-3) and row["received_mb"] > 0


def test_strong_scaling_shares_the_batch_and_weak_scaling_repeats_it():
    jobs = [(kind, ranks, job.batch) for kind, ranks, job in scaling.planned(TINY, [1, 2], None)]
    assert jobs == [("strong", 1, 2), ("strong", 2, 1), ("weak", 1, 2), ("weak", 2, 2)]
    assert [ranks for _, ranks, _ in scaling.planned(TINY, [1, 3], "weak")] == [1, 3]


def fake(ranks, rate):
    keys = "step_ms_median", "received_mb", "formula_mb", "peak_rss_mb", "peak_pss_mb", "job_pss_mb"
    told = dict.fromkeys((*keys, "exposed_ms", "loss"), 1.0)
    return {**told, "world_size": ranks, "tokens_per_s": rate, "other_load": 0.0}


def test_efficiency_is_that_of_the_cores_that_are_there():
    rows = []
    for ranks, rate in ((1, 100.0), (2, 190.0), (4, 180.0)):
        rows.append(scaling.row("weak", fake(ranks, rate), TINY, 2, rows))
    rows.append(scaling.row("strong", fake(2, 50.0), TINY, 2, rows))  # speed counts within a kind
    assert [row["speedup"] for row in rows] == [1.0, 1.9, 1.8, 1.0]
    assert [row["possible"] for row in rows] == [1.0, 2.0, 2.0, 1.0]
    assert [row["efficiency"] for row in rows] == [1.0, 0.95, 0.9, 1.0]
    assert [row["ranks_per_core"] for row in rows] == [0.5, 1.0, 2.0, 1.0]
    told = scaling.table({"cores": 2, "strategy": "FULL_SHARD", "rows": rows}, TINY)
    assert "from 4 ranks on several share one of the 2 cores" in told
    few = scaling.table({"cores": 2, "strategy": "FULL_SHARD", "rows": rows[:2]}, TINY)
    assert "share one" not in few


def test_the_run_of_median_time_counts():
    runs = [{"step_ms_median": time} for time in (9.0, 1.0, 3.0)]
    assert scaling.typical(runs) == runs[2] and scaling.typical(runs[:2]) == runs[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--batch", "3"], "not divided by 2 ranks"),
        (["--ranks", "4,2"], "must grow"),
        (["--ranks", "0,2"], "at least 1"),
        (["--size", "huge"], "invalid choice"),
    ],
)
def test_nonsense_is_refused_in_one_line(words, told):
    done = python("-m", "bench.scaling", *words)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and told in done.stderr
