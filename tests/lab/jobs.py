"""Runs of models.train on ranks that are threads of this process, in the present folder; what they leave."""

import numpy as np
from safetensors.numpy import load_file

from models import train
from shardrt.comm import thread
from shardrt.train import job
from shardrt.train.errors import USAGE, one_line
from tests.train.test_command import arguments, records


def run(common, ranks, name, *options):
    """One with options that override those in `common`."""
    with one_line(USAGE):
        config = train.parse(arguments("--name", name, *common, *options))
    thread.run(ranks, job.launch, config)


def curves(folder, name):
    """(losses and norms of steps, held-out losses)."""
    steps = [(r["loss"], r["norm"]) for r in records(folder, name, "step")]
    return np.array(steps), np.array([r["held_out_loss"] for r in records(folder, name, "evaluation")])


def weights(folder, name, file="checkpoint"):
    return load_file(folder / "runs" / name / file / "model.safetensors")


def check_alike(folder, name, other, rtol):
    """Runs with the same numbers, to rounding."""
    for ours, theirs in zip(curves(folder, name), curves(folder, other), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol)
