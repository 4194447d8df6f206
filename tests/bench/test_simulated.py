"""bench/simulated.py: rows beside published ones, of a small model; and that ranks cost nothing."""

from dataclasses import replace

import pytest

from bench import simulated
from bench.simulated import Source, Training
from shardrt.simulate.machine import Machine

SMALL = Training("8B", 8, 2, 64)


@pytest.fixture
def small(monkeypatch):
    tiny = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "n_hidden": 128, "vocab_size": 128}
    models = {name: replace(config, **tiny) for name, config in simulated.MODELS.items()}
    monkeypatch.setattr(simulated, "MODELS", models)


def test_the_first_row_of_a_source_sets_its_factor_and_the_others_are_held_against_it(
    small, monkeypatch, capsys
):
    machine = Machine.load("h100-8")
    told, _ = simulated.simulated(SMALL, machine)
    each = told.tokens_per_s / told.ranks
    hybrid = replace(SMALL, ranks=16, strategy="HYBRID_SHARD", again="half", micro_batches=2)
    other, _ = simulated.simulated(hybrid, machine)
    assert other.tokens == 16 * 2 * 2 * 64
    given = 2 * other.tokens_per_s / other.ranks / 1.25  # as 2 is the factor, 25 % too much is simulated
    source = Source("somebody", machine, [(SMALL, 2 * each), (hybrid, given)], ["much"])
    monkeypatch.setattr(simulated, "sources", lambda: [source])
    assert simulated.main([]) == 0
    text = capsys.readouterr().out
    assert "somebody (much)" in text and " 2.000" in text and "+25.0%" in text
    assert "1 rows: median 25.0 %, worst 25.0 %" in text


def test_the_sources_have_rows_to_be_tested_by():
    for source in simulated.sources():
        assert len(source.rows) > 1 and source.assumed
        assert all(training.model in simulated.MODELS for training, _ in source.rows)


def test_more_ranks_issue_no_more_items_and_recomputation_is_work_but_no_use(small):
    machine = Machine.load("h100-8")
    (few, one), (many, other) = (
        simulated.simulated(replace(SMALL, ranks=ranks, again="full"), machine) for ranks in (128, 16384)
    )
    assert len(other[0].items) <= len(one[0].items)
    assert many.hfu > many.mfu
    assert few.hfu / few.mfu == pytest.approx(many.hfu / many.mfu)
