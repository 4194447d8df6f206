"""Runs with `--parallel.cp` are the runs without: same samples, losses, figures and text, on any axes."""

import numpy as np
import pytest

from tests.train.test_command import furnish, records
from tests.train.test_parallel import SEQUENCE, check_alike, curves, run, weights

CP = ("--parallel.cp", "2")
RUNS = {  # name: ranks, options
    "alone": (1, ()),
    "cp 4": (4, ("--parallel.cp", "4")),
    "cp 2, dp 2": (4, CP),
    "cp 2, copies 2, dp 2": (8, (*CP, "--fsdp.strategy", "HYBRID_SHARD", "--fsdp.copies", "2")),
    "cp 2, tp 2, sp": (4, (*CP, *SEQUENCE)),
    "cp 2, pp 2": (4, (*CP, "--parallel.pp", "2", "--model.dropout", "0.0")),
}
MOVED = {
    "recomputation, activations on the host": ("--memory.recompute", "full", "--memory.offload-activations"),
    "recomputation but products": ("--memory.recompute", "matmul"),
    "NO_SHARD": ("--fsdp.strategy", "NO_SHARD"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = furnish(tmp_path_factory.mktemp("context"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(1, "no dropout", "--model.dropout", "0.0", "--micro-batches", "4")
        for name, (ranks, options) in RUNS.items():
            run(ranks, name, *options)
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "alone"])
def test_a_run_over_parts_of_sequences_is_the_run_over_whole_ones(folder, name):
    expected = "no dropout" if "pp" in name else "alone"
    check_alike(folder, name, expected, 1e-5)
    (ours,), (theirs,) = (records(folder, run, "end") for run in (name, expected))
    assert ours["sample"] == theirs["sample"]
    whole = weights(folder, expected)
    for key, values in weights(folder, name).items():
        np.testing.assert_allclose(values, whole[key], rtol=0, atol=2e-5, err_msg=key)


def test_the_record_names_the_axes(folder):
    assert records(folder, "cp 2, dp 2", "run")[0]["axes"] == {"dp_shard": 2, "cp": 2}
    assert records(folder, "cp 2, tp 2, sp", "run")[0]["axes"] == {"dp_shard": 1, "cp": 2, "tp": 2}


@pytest.mark.parametrize("what", MOVED)
def test_what_saves_memory_changes_no_bit(folder, what):
    run(4, what, *CP, *MOVED[what])
    for ours, theirs in zip(curves(folder, what), curves(folder, "cp 2, dp 2"), strict=True):
        assert ours.tolist() == theirs.tolist()


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
        np.testing.assert_allclose(losses, expected[first:], rtol=1e-5, err_msg=name)


def test_a_run_moves_from_mesh_to_mesh(folder):
    every = ("--checkpoint.every", "1", "--resume", "auto")
    for step, (ranks, options) in enumerate([(2, CP), (1, ()), (4, (*CP, *SEQUENCE))], start=1):
        run(ranks, "moved", *every[: 2 if step == 1 else 4], *options, "--steps", str(step))
    np.testing.assert_allclose(curves(folder, "moved")[0], curves(folder, "alone")[0][:3], rtol=1e-5)
