"""Runs that are asked to stop, meet numbers that are none, or whose ranks differ: the right code, a line."""

import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.gpt import GPT
from models.language import Language
from shardrt.checkpoint.disk import Disk
from shardrt.comm import PeerFailed, thread
from shardrt.faults.failure import OUT_OF_MEMORY
from shardrt.fsdp import ShardingStrategy
from shardrt.train import config as settings
from shardrt.train import job as jobs
from shardrt.train import loop
from shardrt.train.errors import COPIES, DIFFERS, NONFINITE
from shardrt.train.stop import STOPPED
from tests.lab.jobs import CONFIG, STEPS, curves, furnish, launch, records
from tests.ranks import BACKSTOP
from tests.train.test_resume import ranks_of, started


def stops(name, **changes):
    """The code with which a run on one rank exits."""
    (code,) = codes({"name": name, **changes})
    return code


def codes(*changes):
    """Those with which the ranks of a run exit, of which each has changes of its own."""

    def rank():
        with pytest.raises(SystemExit) as stop:  # here: one of several threads that exits ends all
            own = changes[jobs.init_device_mesh("auto").rank]
            jobs.launch(replace(CONFIG, **{"data": (Path("text.txt"),), **own}))
        return stop.value.code

    return thread.run(len(changes), rank)


def at_step(monkeypatch, number, action):
    """Call `action(rank)` before the update of a step, on every rank."""
    original = loop.update

    def update(job, done):
        if done == number:
            action(job)
        return original(job, done)

    monkeypatch.setattr(loop, "update", update)


@pytest.mark.parametrize("every", [0, 5])
def test_a_stop_file_saves_exits_and_the_run_goes_on(folder, monkeypatch, capfd, every):
    launch(1, "whole")
    checkpoint = settings.CheckpointConfig(every=every)
    with monkeypatch.context() as patch:
        at_step(patch, 5, lambda job: (folder / "runs" / "cut" / "stop").touch())
        assert stops("cut", checkpoint=checkpoint) == STOPPED == 75
    assert "stopped by the stop file after step 5" in capfd.readouterr().out
    assert not (folder / "runs" / "cut" / "stop").exists()
    assert (folder / "runs" / "cut" / "checkpoints" / "step-00000005" / "manifest.json").exists()
    launch(1, "cut", resume="auto")
    assert curves(folder, "cut") == curves(folder, "whole")


def test_a_stop_whose_last_checkpoint_failed_saves_once_more(folder, monkeypatch, capfd):
    """At a step where a checkpoint was due, but could not be written."""
    failed, write = [], Disk.write

    def fail_once(self, file, data):
        if not failed:
            failed.append(True)
            raise OSError(28, "No space left on device")
        write(self, file, data)

    monkeypatch.setattr(Disk, "write", fail_once)
    at_step(monkeypatch, 3, lambda job: (folder / "runs" / "cut" / "stop").touch())
    assert stops("cut", checkpoint=settings.CheckpointConfig(every=3)) == STOPPED
    assert "warning: step 3 was not saved" in capfd.readouterr().out
    assert (folder / "runs" / "cut" / "checkpoints" / "step-00000003" / "manifest.json").exists()


def test_a_time_limit_stops(folder, monkeypatch, capfd):
    at_step(monkeypatch, 2, lambda job: time.sleep(0.15))
    assert stops("cut", checkpoint=settings.CheckpointConfig(stop_after=0.1 / 60)) == STOPPED
    assert re.search(r"stopped by the time limit after step [12]", capfd.readouterr().out)


def test_a_signal_stops_a_run_alone(folder, monkeypatch, capfd):
    at_step(monkeypatch, 2, lambda job: os.kill(os.getpid(), signal.SIGUSR1))
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as stop:  # in this thread: Python lets no other see signals
        jobs.launch(replace(CONFIG, name="cut", data=(Path("text.txt"),)))
    assert stop.value.code == STOPPED
    assert "stopped by SIGUSR1 after step 2" in capfd.readouterr().out
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.mpi
def test_a_signal_to_one_rank_stops_all(tmp_path):
    furnish(tmp_path)
    long = replace(CONFIG, steps=100_000, report=replace(CONFIG.report, eval_interval=100_000))
    settings.dump(replace(long, data=(Path("text.txt"),)), tmp_path / "tiny.toml")
    process = started(tmp_path, "long")
    deadline = time.monotonic() + 200
    while not list((tmp_path / "runs" / "long").glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(int(ranks_of(process)[-1]), signal.SIGTERM)
    assert process.wait(timeout=BACKSTOP) == STOPPED
    steps = [int(p.name[5:]) for p in (tmp_path / "runs" / "long" / "checkpoints").glob("step-*")]
    assert max(steps) == records(tmp_path, "long", "step")[-1]["step"] >= 3


def poison(rank):
    """Make a gradient of one rank nan."""

    def act(job):
        if job.mesh.rank == rank:
            parameter = next(p for n, p in job.model.named_parameters() if n == "blocks.1.mlp.up.weight")
            parameter.grad[:3] = np.nan

    return act


def test_gradients_that_are_no_numbers_stop_all_ranks_before_the_update(folder, monkeypatch, capfd):
    at_step(monkeypatch, 2, poison(1))
    assert codes({"name": "bad"}, {"name": "bad"}) == [NONFINITE] * 2 == [80] * 2
    (line,) = capfd.readouterr().err.splitlines()
    message = "error: step 2: the norm of the gradients is nan: that of 'blocks.1.mlp.up.weight' first, "
    assert line == message + "in the part of rank 1"
    assert [record["step"] for record in records(folder, "bad", "step")] == [1]


def test_such_updates_can_be_skipped(folder, monkeypatch, capfd):
    at_step(monkeypatch, 5, poison(1))
    launch(2, "skipping", optimizer=replace(CONFIG.optimizer, on_nonfinite=settings.Nonfinite.skip))
    assert (
        capfd.readouterr().out.count("step 5: the norm of the gradients is nan, so this update is skipped")
        == 1
    )
    steps = records(folder, "skipping", "step")
    assert len(steps) == STEPS and steps[4]["norm"] is None
    assert all(np.isfinite(step["loss"]) for step in steps)


def test_a_loss_that_is_no_number_stops_too(folder, monkeypatch, capfd):
    forward = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, *how, **more: forward(self, *how, **more) * float("nan"))
    unclipped = replace(CONFIG.optimizer, clip_norm=float("inf"), in_backward=True)
    assert stops("bad", optimizer=unclipped) == NONFINITE
    what = "error: step 1: the loss is nan; weights are nan or infinite: "  # the gradients have been applied
    assert what in capfd.readouterr().err


SKIP = replace(CONFIG.optimizer, on_nonfinite=settings.Nonfinite.skip)
UNCLIPPED = replace(SKIP, clip_norm=float("inf"), in_backward=True)


def spoil(job):
    """Make a weight nan, as a fault of memory would."""
    weight = dict(job.model.named_parameters())["blocks.1.mlp.up.weight"]
    weight.storage.shard[weight.storage.range_of(weight)[0] + 3] = np.nan


@pytest.mark.parametrize(
    ("step", "every", "kept"), [(4, 3, [3]), (4, 0, []), (STEPS, 1, [11]), (STEPS, 0, [])]
)
def test_weights_that_are_no_numbers_stop_a_run_that_skips_and_are_not_saved(
    folder, monkeypatch, capfd, step, every, kept
):
    """At the end, too, when no forward meets them any more."""
    at_step(monkeypatch, step, spoil)
    if step == STEPS:
        monkeypatch.setattr(loop, "evaluate", lambda *args: None)
    checkpoint = settings.CheckpointConfig(every=every, keep_last=1)
    assert stops("bad", optimizer=SKIP, checkpoint=checkpoint) == NONFINITE
    (line,) = capfd.readouterr().err.splitlines()
    what = "weights are nan or infinite: 'blocks.1.mlp.up.weight' first, in the part of rank 0"
    if step == STEPS and every:
        what = "was not saved: rank 0: NotFinite: 'blocks.1.mlp.up.weight' has NaN or infinite values"
        assert line == f"error: step {STEPS} {what}"
    else:
        assert line == f"error: step {min(step + 1, STEPS)}: {what}"  # whose forward meets it
    found = [int(path.name[5:]) for path in (folder / "runs" / "bad").glob("checkpoints/*")]
    assert found == kept
    assert not (folder / "runs" / "bad" / "checkpoint").exists()


def test_a_loss_in_float16_that_is_no_number_names_the_weight_or_the_learning_rate(
    folder, monkeypatch, capfd
):
    half = settings.PrecisionConfig(param=settings.Precision.float16)
    report = replace(CONFIG.report, log_interval=5)
    at_step(monkeypatch, 4, spoil)
    assert stops("bad", precision=half, report=report) == NONFINITE
    what = (
        "the loss is nan; weights are nan or infinite: 'blocks.1.mlp.up.weight' first, in the part of rank 0"
    )
    assert f"error: step 5: {what}" in capfd.readouterr().err
    forward = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, *how, **more: forward(self, *how, **more) * float("nan"))
    assert stops("worse", precision=half, report=report) == NONFINITE
    assert "error: step 1: the loss is nan; lower optimizer.lr" in capfd.readouterr().err


def test_an_evaluation_that_is_no_number_is_written_as_none(folder, monkeypatch, capfd):
    monkeypatch.setattr(Language, "evaluation", lambda self, figures: {"held_out_loss": float("inf")})
    monkeypatch.setattr(Language, "close", lambda *args: {})
    launch(1, "odd")
    assert [record["held_out_loss"] for record in records(folder, "odd", "evaluation")] == [None] * 3


@pytest.mark.parametrize("step", [5, STEPS])
def test_gradients_that_are_no_numbers_and_were_applied_in_backward_stop_the_run(
    folder, monkeypatch, capfd, step
):
    done, forward = [], GPT.forward

    def wrong(self, *how, **more):
        done.append(self.training)
        return forward(self, *how, **more) * (float("nan") if sum(done) == step + 1 else 1.0)

    monkeypatch.setattr(GPT, "forward", wrong)  # its first call is the dry run of the plan
    assert stops("bad", optimizer=UNCLIPPED) == NONFINITE
    assert re.search(rf"error: step {step}: weights are nan or infinite: '.*' first", capfd.readouterr().err)
    steps = [int(path.name[5:]) for path in (folder / "runs" / "bad").glob("checkpoints/*")]
    assert max(steps) == step - 2 + (step == STEPS) * -1  # 3 of 5, 9 of 12


def test_copies_that_differ_stop_the_run(folder, monkeypatch):
    """A bit of a moment: nothing else would ever show it."""

    def flip(job):
        if job.mesh.rank == 1:
            piece = next(p for p in job.optimizer.slices if p.name.startswith("blocks.1."))
            piece.state["v"].view(np.uint32)[7] ^= 1

    at_step(monkeypatch, 5, flip)
    fsdp = replace(CONFIG.fsdp, strategy=ShardingStrategy.NO_SHARD, check_copies=4)
    with pytest.raises(SystemExit) as stop:
        launch(2, "bad", fsdp=fsdp, checkpoint=settings.CheckpointConfig(every=3))
    assert stop.value.code == COPIES == 82
    assert [path.name for path in (folder / "runs" / "bad").glob("checkpoints/*")] == ["step-00000003"]


def test_what_else_fails_in_the_update_is_no_matter_of_the_gradients(folder, monkeypatch):
    def lost(*args, **kwargs):
        raise PeerFailed("rank 1 left")

    monkeypatch.setattr(loop.nn.utils, "clip_grad_norm_", lost)
    monkeypatch.delattr(loop.nn.utils, "grad_norm")  # a collective, for which nobody would be there
    with pytest.raises(PeerFailed, match="rank 1 left"):
        launch(1, "lost")
    assert not [thread for thread in threading.enumerate() if thread.name == "shardrt-batches"]


def test_nothing_need_be_held_out(folder, monkeypatch):
    monkeypatch.setattr(Language, "held_out", lambda *args: iter(()))
    monkeypatch.setattr(Language, "close", lambda *args: {})  # it tells the last evaluation
    launch(1, "all")
    assert len(records(folder, "all", "step")) == STEPS and not records(folder, "all", "evaluation")


def test_ranks_with_other_settings_are_reported(folder, capfd):
    other = replace(CONFIG.optimizer, lr=0.5)
    assert codes({}, {}, {"optimizer": other}) == [DIFFERS] * 3 == [78] * 3
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "error: ranks differ: settings.optimizer.lr: 0.001 on rank 0, 0.5 on rank 2"


def test_ranks_with_other_data_are_reported(folder, capfd):
    paths = [folder / rank / "text.txt" for rank in ("0", "1")]
    for path, text in zip(paths, ("to be or not", "to be or nor"), strict=True):
        path.parent.mkdir()
        path.write_text(text * 100)
    assert codes(*({"data": (path,)} for path in paths)) == [DIFFERS] * 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ranks differ: ")


def test_a_run_alone_that_is_out_of_memory_has_the_code_and_the_plan(folder, monkeypatch, capfd):
    at_step(monkeypatch, 2, lambda job: np.empty(1 << 50))
    with pytest.raises(SystemExit) as stop:  # in this thread: a world of one, not one of threads
        jobs.launch(replace(CONFIG, name="big", data=(Path("text.txt"),)))
    assert stop.value.code == OUT_OF_MEMORY == 81
    message = capfd.readouterr().err
    assert "Unable to allocate 8.00 PiB" in message and "MB are resident" in message
    assert re.search(r"^device  optimizer state +\d", message, re.M)
