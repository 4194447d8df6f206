"""Runs with `--parallel.cp` are the runs without: same samples, losses, figures and text, on any axes."""

import pytest

from tests.lab import jobs
from tests.lab.jobs import curves, records

pytestmark = pytest.mark.usefixtures("here")

SEQUENCE = ("--parallel.tp", "2", "--parallel.sequence", "True")
COMMON = ("--steps", "4", "--model.dropout", "0.1", "--sample.temperature", "0")
COMMON += ("--report.eval-interval", "4")
CP = ("--parallel.cp", "2")
RUNS = {  # name: ranks, options
    "alone": (1, ()),
    "no dropout": (1, ("--model.dropout", "0.0", "--micro-batches", "4")),
    "cp 4": (4, ("--parallel.cp", "4")),
    "cp 2, dp 2": (4, CP),
    "cp 2, copies 2": (4, (*CP, *jobs.HYBRID)),
    "cp 2, tp 2, sp": (4, (*CP, *SEQUENCE)),
    "cp 2, pp 2": (4, (*CP, "--parallel.pp", "2", "--model.dropout", "0.0")),
}


folder = jobs.folder_of(RUNS, COMMON)


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("cp")])
def test_a_run_over_parts_of_sequences_is_the_run_over_whole_ones(folder, name):
    jobs.assert_alike(folder, name, "no dropout" if "pp" in name else "alone", 1e-5, atol=2e-5)


def test_the_record_names_the_axes(folder):
    assert records(folder, "cp 2, dp 2", "run")[0]["axes"] == {"dp_shard": 2, "cp": 2}
    assert records(folder, "cp 2, tp 2, sp", "run")[0]["axes"] == {"dp_shard": 1, "cp": 2, "tp": 2}


def test_what_saves_memory_changes_no_bit(folder):
    saving = ("--memory.recompute", "full", "--memory.offload-activations")
    jobs.run(4, "saving", *CP, *saving, common=COMMON)
    assert curves(folder, "saving") == curves(folder, "cp 2, dp 2")
