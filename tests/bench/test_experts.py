"""bench.experts: that what is wrong is found, how uneven it is, and how it refuses."""

import json

import numpy as np
import pytest

from bench import experts
from shardrt.comm import init_device_mesh
from shardrt.parallel import most_rows
from tests.bench.test_compare import python
from tests.ranks import mpirun_path, run_ranks


def test_a_result_that_differs_is_found_before_anything_is_timed():
    calls = []

    def contestant(name, value):
        return experts.Contestant(
            name, lambda: calls.append(name), lambda: None, lambda: {"output": np.array([1.0, value])}
        )

    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(RuntimeError, match="other: output is off by 1.0e-03 on rank 0"):
        experts.compared([contestant("first", 1.0), contestant("other", 1.001)], mesh, 3)
    assert calls == ["first", "other"]
    found = experts.compared([contestant("first", 1.0), contestant("other", 1.000001)], mesh, 3)
    assert found["peer"] == "other" and found["ratio"] > 0 and calls.count("other") == 1 + 1 + 4


def test_skewed_sends_nine_of_ten_rows_to_the_last_rank():
    def body():
        mesh = init_device_mesh("cpu", (2,), ("dp_shard",))
        found = []
        for routing in experts.ROUTINGS:
            given = experts.Given(experts.Size(512, 64, 8, 8, 2), routing, mesh)
            layer, ours = experts.layer_of(given, mesh)
            ours.call()
            found.append(most_rows(layer)["experts"])
        return found

    (even, least), (_, most) = run_ranks(2, body)
    assert even == pytest.approx(1, abs=0.15) and least < 0.3 and 1.7 < most < 1.95


@pytest.mark.parametrize(("routing", "counts"), [("balanced", [5, 5, 5, 5]), ("skewed", [10, 3, 3, 4])])
def test_products_have_all_rows(routing, counts):
    assert experts._counts(20, 4, routing) == counts
    assert sum(experts._counts(21, 4, routing)) == 21


@pytest.mark.mpi
@pytest.mark.torch
def test_it_times_both_from_the_same_weights_with_the_same_results():
    mpirun_path()
    pytest.importorskip("torch")
    words = ["--sizes", "tiny", "--routings", "skewed", "--rounds", "1", "--patience", "0", "--json"]
    done = python("-m", "bench.experts", *words)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    kinds = [(row["kind"], row["routing"]) for row in rows]
    assert kinds == [("layer", "skewed"), *2 * [("products", "skewed")], ("replicated", "balanced")]
    assert all(row["ms"] > 0 and row["ratio"] > 0 and row["processor_ratio"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--kinds", "odd"], "'odd' is unknown"), (["--ranks", "3"], "does not divide the experts of recipe")],
)
def test_nonsense_is_refused_before_anything_is_started(words, told, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["experts", *words])
    with pytest.raises(SystemExit) as caught:
        experts.main()
    assert caught.value.code == 2 and told in capsys.readouterr().err
