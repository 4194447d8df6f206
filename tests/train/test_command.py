"""`python -m models.train` as a user runs it: what it leaves, and what it says to bad input."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.ranks import clean_environment, mpirun_path

SMALL = (
    "--steps 3 --batch-size 4 --model.n-layer 2 --model.n-head 2 --model.n-embd 16 --model.block-size 32 "
    "--sample.length 5 --report.log-interval 1"
).split()


@pytest.fixture
def place(tmp_path):
    """A folder to run in, with a text file of 4,000 bytes."""
    (tmp_path / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 90)
    return tmp_path


def run(place, ranks, *arguments, **variables):
    """The command in `place`, without mpirun for ranks = 0."""
    launcher = [mpirun_path(), "-n", str(ranks)] if ranks else []
    command = [*launcher, sys.executable, "-m", "models.train", *arguments]
    environment = clean_environment(**variables)
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=120)


def records(place, name):
    lines = (place / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.mpi
def test_a_run_leaves_all_it_promises_and_is_the_same_on_two_ranks(place):
    for ranks in (0, 2):
        done = run(place, ranks, *SMALL, "--data", "text.txt", "--name", f"r{ranks}")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert sum(line.startswith("step") and "tok/s" in line for line in lines) == 3
        assert any("bits per byte; gzip -9 needs" in line for line in lines)
        assert "--- sample ---" in lines
        folder = place / "runs" / f"r{ranks}"
        assert sorted(p.name for p in folder.iterdir()) == [
            "checkpoint",
            "config.toml",
            "loss.png",
            "metrics.jsonl",
        ]
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    one, two = records(place, "r0"), records(place, "r2")
    for kind, key in (("step", "loss"), ("step", "norm"), ("evaluation", "held_out_loss")):
        ours, theirs = ([r[key] for r in found if r["kind"] == kind] for found in (one, two))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    weights = [load_file(place / "runs" / name / "checkpoint" / "model.safetensors") for name in ("r0", "r2")]
    assert weights[0].keys() == weights[1].keys() and "wte.weight" in weights[0]
    for name in weights[0]:
        np.testing.assert_allclose(weights[0][name], weights[1][name], atol=2e-5)


@pytest.mark.mpi
def test_help_is_printed_once_with_and_without_mpirun():
    here = Path(__file__).parent
    for ranks in (0, 2):
        done = run(here, ranks, "--help")
        assert done.returncode == 0 and done.stdout.count("usage:") == 1, done.stdout + done.stderr
        assert "--optimizer.lr" in done.stdout and "--fsdp.strategy" in done.stdout


def assert_one_line(done, said, code=None):
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert said in lines[0]
    assert done.returncode != 0 and code in (None, done.returncode)


WRONG = {
    "missing file": (["--data", "nowhere.txt"], "nowhere.txt does not exist", 65),
    "empty file": (["--data", "empty.txt"], "empty.txt is empty", 65),
    "short file": (["--data", "short.txt"], "too short", 65),
    "heads": (["--data", "text.txt", "--model.n-head", "3"], "n_embd must be a multiple of n_head", 2),
    "batch": (["--data", "text.txt", "--batch-size", "3"], "cannot be shared equally by 2 ranks", 2),
    "strategy": (["--fsdp.strategy", "FULL"], "FULL", 2),
    "option": (["--optimiser.lr", "1"], "optimi", 2),
    "config": (["--config", "nowhere.toml"], "nowhere.toml", 2),
}


@pytest.mark.mpi
@pytest.mark.parametrize("case", WRONG)
def test_bad_input_gets_one_line_on_two_ranks_and_nothing_is_written(place, case):
    arguments, said, code = WRONG[case]
    (place / "empty.txt").write_bytes(b"")
    (place / "short.txt").write_bytes(b"short")
    done = run(place, 2, *SMALL, *arguments)
    assert_one_line(done, said)
    assert not (place / "runs").exists()
    if case != "batch":  # an error on one rank as well
        assert_one_line(run(place, 0, *SMALL, *arguments), said, code)


@pytest.mark.mpi
def test_a_run_that_exists_is_not_overwritten(place):
    (place / "runs" / "taken").mkdir(parents=True)
    (place / "runs" / "taken" / "metrics.jsonl").write_text("precious")
    done = run(place, 2, *SMALL, "--data", "text.txt", "--name", "taken")
    assert_one_line(done, "runs/taken exists already")
    assert [p.name for p in (place / "runs" / "taken").iterdir()] == ["metrics.jsonl"]
    assert (place / "runs" / "taken" / "metrics.jsonl").read_text() == "precious"


def test_a_world_size_without_mpirun_is_refused(place):
    done = run(place, 0, *SMALL, "--data", "text.txt", WORLD_SIZE="2", RANK="0")
    assert_one_line(done, "mpirun -n 2", 2)
    assert not (place / "runs").exists()
