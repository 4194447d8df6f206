"""Runs with `--parallel.pp` are the runs without: same samples, losses, checkpoints and text."""

import re
from itertools import pairwise
from json import loads

import numpy as np
import pytest

from models import train
from shardrt.comm import thread
from shardrt.train import job as jobs
from shardrt.train.errors import USAGE, one_line
from tests.train.test_command import arguments, furnish, records
from tests.train.test_parallel import check_alike, curves, weights

STEPS = 3
COMMON = ("--steps", str(STEPS), "--batch-size", "8", "--sample.temperature", "0", *("--model.dropout", "0.1"))
PP = ("--parallel.pp", "2", "--parallel.micro-batches", "4")
RUNS = {
    "data": (1, ("--micro-batches", "4")),
    "1F1B": (2, PP),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the runs in it that several tests look at."""
    folder = furnish(tmp_path_factory.mktemp("pipeline"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, (ranks, options) in RUNS.items():
            run(ranks, name, *options)
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def run(ranks, name, *options):
    with one_line(USAGE):
        config = train.parse(arguments("--name", name, *COMMON, *options))
    thread.run(ranks, jobs.launch, config)


def test_a_run_in_stages_is_the_run_in_one(folder):
    check_alike(folder, "1F1B", "data", 2e-6)
    (ours,), (theirs,) = (records(folder, run, "end") for run in ("1F1B", "data"))
    assert ours["sample"] == theirs["sample"]
