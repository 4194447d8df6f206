"""Quantised collectives in the training command: with other axes, held-out loss, resume, what is refused."""

import warnings

import numpy as np
import pytest

from shardrt.exchange.formats import own
from shardrt.train import config as settings
from tests.lab import jobs
from tests.lab.jobs import STEPS, curves, launch, records, remove_after

EIGHT = ("--precision.quantized-weights", "8", "--precision.quantized-gradients", "8")
BITS = (*EIGHT, "--precision.host-size")
RUNS = {
    "exact": (2, ()),
    "bits": (2, (*BITS, "1")),
    "4 bits": (4, ("--precision.quantized-weights", "4", *BITS[2:], "2")),
    "with a secondary copy": (4, (*EIGHT, "--precision.hpz-partition-size", "2")),
    "with tp": (4, (*BITS, "2", "--parallel.tp", "2")),
    "with pp": (4, (*BITS, "1", "--parallel.pp", "2", "--precision.error-feedback", "true")),
}
pytestmark = pytest.mark.usefixtures("here")
finished = jobs.folder_of(RUNS, ("--batch-size", "8"))


@pytest.mark.parametrize("name", [name for name in RUNS if name != "exact"])
def test_held_out_loss_stays_within_one_percent(finished, name):
    losses = {
        each: [line["held_out_loss"] for line in records(finished, each, "evaluation")]
        for each in ("exact", name)
    }
    assert len(losses[name]) > 0
    np.testing.assert_allclose(losses[name], losses["exact"], rtol=0.01)
    assert losses[name] != losses["exact"]


test_what_does_not_fit_is_refused_before_anything_is_written = jobs.one_line_tests(
    ("precision.quantized_weights must be 8, 4 or 0, got 3", "--precision.quantized-weights", "3"),
    ("precision.quantized_block must be a multiple of 32, got 1", *EIGHT, "--precision.quantized-block", "1"),
    ("precision.error_feedback needs quantized_gradients=8", "--precision.error-feedback", "true"),
    ("precision.hpz_partition_size needs quantized_weights=8 or 4", "--precision.hpz-partition-size", "2"),
    ("give one of them", *EIGHT, "--precision.host-size", "1", "--precision.hpz-partition-size", "2"),
    ("precision.quantized_*: NO_SHARD keeps whole", *EIGHT, "--fsdp.strategy", "NO_SHARD"),
    ("precision.quantized_*: blocks depend on the number", *EIGHT, *jobs.INVARIANT),
    ("leave memory.offload_parameters off", *EIGHT, "--memory.offload-parameters", "true"),
)


def fed_back(host_size, weights=8):
    return settings.PrecisionConfig(
        quantized_weights=weights, quantized_gradients=8, host_size=host_size, error_feedback=True
    )


HYBRID = settings.FSDPConfig(strategy=settings.ShardingStrategy.HYBRID_SHARD, copies=2)


@pytest.mark.parametrize(("fsdp", "weights"), [(settings.FSDPConfig(), 8), (HYBRID, 0)])
def test_a_resumed_run_with_error_feedback_leaves_what_the_uninterrupted_one_does(folder, fsdp, weights):
    run = {"precision": fed_back(2, weights), "fsdp": fsdp}
    launch(4, "whole", **run)
    launch(4, "cut", **run, steps=7)
    remove_after(folder / "runs" / "cut", 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch(4, "cut", **run, resume="auto")
    assert curves(folder, "cut") == curves(folder, "whole")


def test_errors_are_for_any_mesh_of_as_many_hosts_and_begin_with_zeros_elsewhere(folder):
    launch(4, "saved", precision=fed_back(2), steps=STEPS - 3)
    for ranks, precision, says in (
        (2, fed_back(1), []),  # as many hosts, so each has its errors again
        (4, fed_back(1), ["were saved for 2 hosts and are kept for 4 hosts"]),
        (1, settings.PrecisionConfig(), ["were saved for 2 hosts and are kept for none"]),
    ):
        name = f"{ranks} and {len(says)}"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            launch(ranks, name, precision=precision, resume=f"runs/saved/checkpoints/step-{STEPS - 3:08}")
        found = [str(each.message) for each in said if "quantisation errors" in str(each.message)]
        assert len(found) == len(says)
        assert all(one in other for one, other in zip(says, found, strict=True))
        assert records(folder, name, "step")[-1]["step"] == STEPS
    converted = own.read(folder / "runs" / "saved" / "checkpoints")
    count = len(converted.training.steps)
    assert converted.left == [f"quantisation errors of {count} parameters: they begin with zeros"]
    assert {kind for kind, _ in converted.tensors} == {"parameter", "exp_avg", "exp_avg_sq"}


def test_the_command_says_in_one_line_that_one_host_quantises_nothing(folder):
    done = jobs.start("models.train", *jobs.arguments("--name", "one", *EIGHT), cwd=folder)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "quantised" in line]
    expected = (
        "warning: fully_shard: collectives are not quantised, because all ranks share one host's memory"
    )
    assert len(lines) == 1 and lines[0].startswith(expected), lines
