"""deterministic = 'world-invariant': a run leaves the same bits on 1, 2, 4 and 8 ranks, and if it moves.

That bits differ without the mode is in tests/fsdp/test_world_invariant.py, parts of sequences are in
tests/parallel/test_context.py.
"""

from functools import partial

import pytest
from safetensors.numpy import load_file

import shardrt
from shardrt.checkpoint import read_manifest
from shardrt.kernels import cpu as kernels
from tests.lab import jobs
from tests.lab.jobs import arguments, curves, records, start

INVARIANT = ("--deterministic", "world-invariant", "--micro-batches", "8", "--batch-size", "16")
INVARIANT += ("--model.dropout", "0.1", "--checkpoint.every", "2", "--report.eval-interval", "6")


run = partial(jobs.run, common=INVARIANT)
alone = jobs.folder_of({"alone": (1, ("--steps", "6"))}, INVARIANT)


@pytest.fixture(scope="module")
def folder(alone):
    """A folder with the run of one rank in it, which the others are compared with."""
    before = kernels.threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(alone)
        yield alone
    shardrt.set_threads(before)


def left(folder, name):
    """All that a run of 6 steps leaves but times: losses, norms, and at its end evaluation, sample, state."""
    steps, evaluations, weights = curves(folder, name)
    (end,) = records(folder, name, "end")
    assert len(steps) == 6
    return (
        steps,
        evaluations[-1],
        weights,
        end["sample"],
        state(folder / "runs" / name / "checkpoints" / "step-00000006"),
    )


def state(folder):
    """kind/parameter -> all elements in a checkpoint, of the weights and the moments."""
    manifest = read_manifest(folder)
    arrays = [load_file(folder / file.name) for file in manifest.files]
    found = {}
    for piece in sorted(manifest.pieces, key=lambda piece: piece.runs.first):
        name = f"{piece.kind}/{piece.parameter}"
        found[name] = found.get(name, b"") + arrays[piece.file][name].tobytes()
    assert {name.partition("/")[0] for name in found} == {"parameter", "m", "v"}
    return found


def test_every_number_of_ranks_leaves_the_same(folder):
    for ranks in (2, 4, 8):
        run(ranks, f"on {ranks}", "--steps", "6")
        assert left(folder, f"on {ranks}") == left(folder, "alone")


@pytest.mark.mpi
@pytest.mark.slow
def test_processes_that_go_on_where_threads_of_other_numbers_were_leave_the_same(folder, capfd):
    resumed = ("--steps", "6", "--resume", "auto")
    run(4, "moved", "--steps", "2")
    run(1, "moved", "--steps", "4", *resumed[2:])
    done = start(
        "tests.train.plain", *arguments(*INVARIANT, "--name", "moved", *resumed), ranks=2, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert "not the run" not in capfd.readouterr().out + done.stdout
    assert left(folder, "moved") == left(folder, "alone")


def test_another_number_of_micro_batches_is_reported(folder, capfd):
    run(1, "told", "--steps", "2")
    run(1, "told", "--steps", "3", "--resume", "auto", "--micro-batches", "4")
    message = "warning: not the run that was saved: micro_batches was 8, is 4"
    assert message in capfd.readouterr().out
    run(1, "told", "--steps", "4", "--resume", "auto", "--micro-batches", "4", "--deterministic", "per-world")
    assert "deterministic was world-invariant, is per-world" in capfd.readouterr().out


test_what_does_not_go_together_is_told_before_anything_is_written = jobs.one_line_tests(
    ("micro_batches must be a power of two, got 12", "--micro-batches", "12", "--batch-size", "12"),
    ("batch_size must divide equally among", "--batch-size", "12"),
    ("has its gradients on the host", "--memory.offload-gradients", "True"),
    ("reduces each part: leave reduce_each off", "--reduce-each", "True"),
    ("optimizer.clip_type must be 1, 2 or inf", "--optimizer.clip-type", "3"),
    ("threads must be at least 0, got -1", "--threads", "-1"),
    common=INVARIANT,
)
