"""Runs with `--parallel.cp` are the runs without: same samples, losses, figures and text, on any axes."""

from functools import partial

import pytest

from tests import lab
from tests.lab import jobs
from tests.lab.jobs import curves, records

pytestmark = pytest.mark.usefixtures("here")

SEQUENCE = ("--parallel.tp", "2", "--parallel.sequence", "True")
COMMON = ("--steps", "4", "--model.dropout", "0.1", "--sample.temperature", "0")
CP = ("--parallel.cp", "2")
RUNS = {  # name: ranks, options
    "alone": (1, ()),
    "no dropout": (1, ("--model.dropout", "0.0", "--micro-batches", "4")),
    "cp 4": (4, ("--parallel.cp", "4")),
    "cp 2, dp 2": (4, CP),
    "cp 2, copies 2, dp 2": (8, (*CP, *jobs.HYBRID)),
    "cp 2, tp 2, sp": (4, (*CP, *SEQUENCE)),
    "cp 2, pp 2": (4, (*CP, "--parallel.pp", "2", "--model.dropout", "0.0")),
}
MOVED = {
    "recomputation, activations on the host": ("--memory.recompute", "full", "--memory.offload-activations"),
    "recomputation but products": ("--memory.recompute", "matmul"),
    "NO_SHARD": ("--fsdp.strategy", "NO_SHARD"),
}


run = partial(jobs.run, common=COMMON)
folder = jobs.folder_of(RUNS, COMMON)


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("cp")])
def test_a_run_over_parts_of_sequences_is_the_run_over_whole_ones(folder, name):
    jobs.assert_alike(folder, name, "no dropout" if "pp" in name else "alone", 1e-5, atol=2e-5)


def test_the_record_names_the_axes(folder):
    assert records(folder, "cp 2, dp 2", "run")[0]["axes"] == {"dp_shard": 2, "cp": 2}
    assert records(folder, "cp 2, tp 2, sp", "run")[0]["axes"] == {"dp_shard": 1, "cp": 2, "tp": 2}


@pytest.mark.parametrize("what", MOVED)
def test_what_saves_memory_changes_no_bit(folder, what):
    run(4, what, *CP, *MOVED[what])
    assert curves(folder, what) == curves(folder, "cp 2, dp 2")


def test_ten_steps_on_all_axes_at_once_and_on_one_rank_in_between(folder):
    """Sixteen ranks; the run moves to one rank and back, by its checkpoints."""
    ten = ("--model.dropout", "0.0", "--micro-batches", "4", "--batch-size", "8", "--checkpoint.every", "4")
    ten += ("--report.eval-interval", "10", "--sample.length", "1")  # the runs above have more of these
    axes = (*CP, *SEQUENCE, "--parallel.pp", "2")
    run(1, "ten steps", *ten, "--steps", "10")
    run(16, "all axes", *ten, *axes, "--steps", "10")
    assert records(folder, "all axes", "run")[0]["axes"] == {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2}
    fourth = "runs/all axes/checkpoints/step-00000004"
    run(1, "to and fro", *ten, "--resume", fourth, "--steps", "6")
    run(16, "to and fro", *ten, *axes, "--resume", "auto", "--steps", "10")
    expected = curves(folder, "ten steps")[0]
    for name, first in (("all axes", 0), ("to and fro", 4)):
        losses = curves(folder, name)[0]
        assert len(losses) == 10 - first and len(expected) == 10
        lab.assert_close(losses, expected[first:], name, rtol=1e-5)
