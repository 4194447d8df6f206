"""bench.exchanges: what is sent, that both are checked, and how it refuses."""

import json

import numpy as np
import pytest

from bench import exchanges
from tests.bench.test_compare import python
from tests.ranks import mpirun_path, run_ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_sends_its_bytes_and_the_last_gets_most_where_it_is_skewed(size):
    for pattern in exchanges.PATTERNS:
        table = exchanges.Case(pattern, "ordinary", 40_000).counts(size)
        assert (table.sum(axis=1) == 10_000).all()
        assert table[0, -1] == (
            pytest.approx(10_000 / size, abs=1) if pattern == "balanced" else max(9_000, 10_000 // size)
        )


def test_an_element_that_is_wrong_is_found():
    def body():
        own, case = exchanges.create(), exchanges.Case("skewed", "ordinary", 4000)
        exchanges.ours_of(own, case)()
        right = np.concatenate(
            [exchanges.given(case, s)[own.rank * 100 :][: (100, 900)[own.rank]] for s in range(2)]
        )
        exchanges.check("right", right, case, own)
        right[-1] += 1
        with pytest.raises(RuntimeError, match=f"wrong Case.* is wrong on rank {own.rank}"):
            exchanges.check("wrong", right, case, own)

    run_ranks(2, body)


@pytest.mark.mpi
@pytest.mark.torch
def test_both_are_timed_by_turns():
    mpirun_path()
    pytest.importorskip("torch")
    words = ["-b", "64", "-e", "1K", "--rounds", "2", "--memory", "allocated", "--patience", "0", "--json"]
    done = python("-m", "bench.exchanges", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(row["pattern"], row["nbytes"]) for row in found["rows"]] == [
        (pattern, nbytes) for pattern in exchanges.PATTERNS for nbytes in (64, 256, 1024)
    ]
    assert all(row["us"] > 0 and row["pytorch_us"] > 0 and row["ratio"] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("words", "told"), [(["--patterns", "odd"], "'odd' is unknown"), (["-f", "1"], "at least 2")]
)
def test_nonsense_is_refused_before_anything_is_started(words, told, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["exchanges", *words])
    with pytest.raises(SystemExit) as caught:
        exchanges.main()
    assert caught.value.code == 2 and told in capsys.readouterr().err
