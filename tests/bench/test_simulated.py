"""bench/simulated.py: rows beside published ones, of a small model; and that ranks cost nothing."""

import sys
from dataclasses import replace
from subprocess import run

import pytest

from bench import simulated
from bench.simulated import Source, Training
from shardrt import device
from shardrt.simulate.machine import Host, Machine

SMALL = Training("8B", 8, 2, 64)


@pytest.fixture
def small(monkeypatch):
    tiny = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "n_hidden": 128, "vocab_size": 128}
    models = {name: replace(config, **tiny) for name, config in simulated.MODELS.items()}
    monkeypatch.setattr(simulated, "MODELS", models)


def test_the_first_row_of_a_source_sets_how_fast_kernels_are_and_the_others_are_held_against_it(
    small, monkeypatch, capsys
):
    machine = Machine.load("h100-8")
    machine = replace(machine, host=Host(), device=replace(machine.device, constant=0.0))
    hybrid = replace(SMALL, ranks=16, strategy="HYBRID_SHARD", again="full", part=0.5, micro_batches=2)
    faster = [simulated._seconds(each.recorded(machine), machine, 0.01) for each in (SMALL, hybrid)]
    once, both = 2 * 64 / faster[0], 2 * 2 * 64 / faster[1]
    source = Source("somebody", machine, [(SMALL, once), (hybrid, both / 1.25)], ["much"])
    monkeypatch.setattr(simulated, "sources", lambda: [source])
    monkeypatch.setattr(simulated, "_SLOWEST", 1e-3)
    assert simulated.main([]) == 0
    text = capsys.readouterr().out
    assert "somebody (much)" in text and " 0.010" in text and "+25.0%" in text
    assert "1 rows: median 25.0 %, worst 25.0 %" in text


def test_what_is_recomputed_follows_from_the_operations_that_were_counted():
    """Llama 2 7B, without: 6 for each weight and 14 L C T. Whole blocks again: 2 and 4 more."""
    config, length = simulated.LLAMA2, 4096
    attention = 32 * 4096 * length
    blocks = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    once = 6 * (blocks + 4096 * 32000) + 14 * attention
    assert simulated.recomputed(config, length, once) == 0
    assert simulated.recomputed(config, length, once + blocks + 2 * attention) == pytest.approx(0.5)


def test_the_sources_have_rows_to_be_tested_by():
    for source in simulated.sources():
        assert len(source.rows) > 1 and source.assumed
        assert all(training.model in simulated.MODELS for training, _ in source.rows)


def test_more_ranks_issue_no_more_items_and_recomputation_is_work_but_no_use(small):
    machine = Machine.load("h100-8")
    (few, one), (many, other) = (
        simulated.simulated(replace(SMALL, ranks=ranks, again="full", part=1.0), machine)
        for ranks in (128, 16384)
    )
    assert len(other[0].items) <= len(one[0].items)
    assert many.hfu > many.mfu
    assert few.hfu / few.mfu == pytest.approx(many.hfu / many.mfu)


def test_20_plans_are_tried_and_none_is_dropped(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question. " * 500)
    tiny = "--batch-size 64 --model.n-layer 2 --model.block-size 32 --data text.txt --sample.length 0"
    before = device.current()
    simulated.plan(tiny.split())
    device.set_current(before)
    assert capsys.readouterr().out.startswith("20 plans on 64 ranks: ")


@pytest.mark.slow
def test_published_rows_on_few_ranks_are_within_10_percent(monkeypatch, capsys):
    """Those that miss by most (docs/simulate.md): of one source whose rows take little to record."""
    (few,) = (each for each in simulated.sources() if each.name.startswith("KempnerForge"))
    monkeypatch.setattr(simulated, "sources", lambda: [few])
    simulated.compare()
    *rows, last = capsys.readouterr().out.splitlines()
    errors = [float(row.split()[-1].rstrip("%")) for row in rows if row.endswith("%")]
    assert len(errors) == 2 and max(map(abs, errors)) < 10
    assert last.startswith("2 rows: ")


@pytest.mark.slow
def test_a_step_of_405_billion_parameters_on_16384_ranks_takes_little_memory_to_record():
    """In a process of its own, of which the report tells the peak."""
    done = run([sys.executable, "-m", "bench.simulated", "cost"], capture_output=True, text=True, check=True)
    large = done.stdout.splitlines()[-1]
    assert large.startswith("405B on 16,384 ranks: ")
    assert 0 < int(large.split("at most ")[1].split()[0]) < 2000
