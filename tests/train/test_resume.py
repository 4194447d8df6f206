"""A run that was interrupted, however it was, goes on as if it had not been."""

import contextlib
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from models import train
from shardrt.comm import thread
from shardrt.train import config as settings
from shardrt.train import job, loop
from shardrt.train.errors import DATA
from tests.checkpoint.test_damage import body, write
from tests.lab import jobs
from tests.lab.jobs import (
    CONFIG,
    OPEN_MPI,
    STEPS,
    TINY,
    arguments,
    curves,
    furnish,
    launch,
    lines_of,
    records,
    remove_after,
)
from tests.ranks import BACKSTOP, clean_environment, mpirun_path


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_resumed_run_leaves_what_the_uninterrupted_one_does(folder, precision):
    sixteen = settings.PrecisionConfig(param=settings.Precision[precision])
    launch(2, "whole", precision=sixteen)
    launch(2, "cut", precision=sixteen, steps=7)  # it evaluates and saves at 7, too
    remove_after(folder / "runs" / "cut", 6)
    launch(2, "cut", precision=sixteen, resume="auto")
    assert curves(folder, "cut") == curves(folder, "whole")
    assert [record["step"] for record in records(folder, "cut", "step")] == list(range(1, STEPS + 1))


def test_a_checkpoint_can_be_continued_in_another_run(folder):
    launch(2, "whole")
    launch(2, "branch", resume="runs/whole/checkpoints/step-00000009")
    assert curves(folder, "branch")[0] == curves(folder, "whole")[0][9:]
    assert curves(folder, "branch")[2] == curves(folder, "whole")[2]


class Cut(Exception):
    """The run ends here, as if it had been killed."""


def cut(patch, what, number):
    """The run of one rank ends before the `number`-th call of a function of the loop."""
    calls, original = [], getattr(loop, what)

    def counted(*args):
        calls.append(args)
        if len(calls) == number:
            raise Cut
        return original(*args)

    patch.setattr(loop, what, counted)


def kinds(folder, name):
    """(kind, step) of all records that belong to steps, in their order."""
    return [(r["kind"], r["step"]) for r in lines_of(folder, name) if r["kind"] in ("step", "evaluation")]


# Evaluations at 4, 8 and 12, records of steps at 1, 5, 10 and 12, checkpoints at 2, 4, ..., 12.
SPARSE = {
    "report": replace(TINY.report, log_interval=5, eval_interval=4),
    "checkpoint": settings.CheckpointConfig(every=2, in_background=False),
}


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    """A folder with a run, `whole`, that no test has cut."""
    folder = furnish(tmp_path_factory.mktemp("alone"))
    with contextlib.chdir(folder):
        launch(1, "whole", **SPARSE)
    return folder


@pytest.mark.parametrize(
    ("what", "number"),
    [
        *[("evaluate", 1), ("evaluate", 2), ("evaluate", 3), ("report", 2), ("report", 3), ("report", 4)],
        *[("keep", 3), ("keep", 4), ("keep", 5), ("keep", 12), ("check_weights", 1)],
    ],
)
def test_wherever_a_run_is_cut_each_record_is_there_once(left_alone, monkeypatch, what, number):
    monkeypatch.chdir(left_alone)
    name = f"{what}-{number}"
    with monkeypatch.context() as patch:
        cut(patch, what, number)
        with pytest.raises(Cut):
            launch(1, name, **SPARSE)
    launch(1, name, resume="auto", **SPARSE)
    assert curves(left_alone, name) == curves(left_alone, "whole")
    assert kinds(left_alone, name) == kinds(left_alone, "whole")


def test_a_finished_run_that_is_started_again_has_its_last_evaluation_once(left_alone, monkeypatch):
    monkeypatch.chdir(left_alone)
    launch(1, "twice", **SPARSE)
    launch(1, "twice", resume="auto", **SPARSE)
    assert kinds(left_alone, "twice") == kinds(left_alone, "whole")
    assert curves(left_alone, "twice") == curves(left_alone, "whole")


def test_a_run_that_never_clips_goes_on(folder, capfd):
    """Its settings have an infinity, which JSON has not."""
    unclipped = replace(CONFIG.optimizer, clip_norm=float("inf"), clip_type=float("inf"))
    launch(1, "cut", optimizer=unclipped, steps=6)
    launch(1, "cut", optimizer=unclipped, resume="auto")
    assert "not the run that was saved" not in capfd.readouterr().out
    assert [record["step"] for record in records(folder, "cut", "step")] == list(range(1, STEPS + 1))


def test_without_a_checkpoint_auto_begins(folder, capfd):
    launch(1, "new", resume="auto")
    assert "no checkpoint yet: from the beginning" in capfd.readouterr().out
    assert len(curves(folder, "new")[0]) == STEPS


test_what_cannot_be_resumed_is_reported = jobs.one_line_tests(
    ("resume = 'auto' needs the name of a run", "--resume", "auto"),
    ("runs/none/manifest.json: No checkpoint here", "--resume", "runs/none"),
)


def test_a_run_whose_checkpoints_are_all_damaged_is_reported(folder, capfd):
    launch(1, "whole")
    for path in (folder / "runs" / "whole" / "checkpoints").glob("*/manifest.json"):
        path.write_text(path.read_text().replace("parameter", "parametre"))
    words = arguments("--resume", "auto", "--name", "whole")
    assert "no checkpoint could be restored: " in jobs.refused(capfd, DATA, train.main, words)


def test_a_loss_scale_that_no_run_has_is_told_in_one_line(folder, capfd):
    """Of a checkpoint that somebody has written by hand, its checksum too."""
    sixteen = settings.PrecisionConfig(param=settings.Precision.float16)
    launch(1, "whole", precision=sixteen)
    for path in (folder / "runs" / "whole" / "checkpoints").glob("*/manifest.json"):
        content = body(path.parent)
        content["extra"]["scaler"]["scale"] = 0.0
        write(path, content)
    words = arguments("--resume", "auto", "--name", "whole", "--precision.param", "float16")
    message = "error: the loss scale of the checkpoint can't be used: GradScaler: scale must be"
    assert jobs.refused(capfd, DATA, train.main, words).startswith(message)


def test_a_disk_that_is_full_ends_no_run(folder, capfd, monkeypatch):
    def full(self, file, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardrt.checkpoint.disk.Disk.write", full)
    launch(2, "full")
    assert capfd.readouterr().out.count("warning: step 3 was not saved: rank 0: OSError") == 1
    assert len(curves(folder, "full")[0]) == STEPS


@pytest.mark.parametrize("what", ["removed", "moved"])
def test_a_folder_that_goes_away_is_made_again_with_all_records(folder, capfd, monkeypatch, what):
    run, update = folder / "runs" / "cut", loop.update

    def away(job, done):
        if done == 5:  # rmtree fails where the checkpoint of step 3 gets its name meanwhile
            loop.report_saved(job.run, job.checkpoints.wait)
        if done == 5 and what == "removed":
            shutil.rmtree(run)
        elif done == 5:
            run.rename(folder / "elsewhere")
        return update(job, done)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "update", away)
        launch(1, "cut")
    message = capfd.readouterr().out
    assert message.count("warning: runs/cut was moved or removed: made again, with the records so far") == 1
    launch(1, "whole")
    assert curves(folder, "cut") == curves(folder, "whole")
    assert [path.name[-2:] for path in sorted((run / "checkpoints").iterdir())] == ["06", "09", "12"], message


@pytest.mark.mpi
@pytest.mark.slow
def test_runs_that_are_killed_at_any_time_end_with_the_same_bits(tmp_path):
    assert killed_and_resumed(tmp_path, runs=1, kills=2) == 2


def killed_and_resumed(folder, runs, kills):
    """Kill each of some runs several times, at random times, and resume it; gives how many kills there were.

    Every loss, norm, evaluation and weight at the end must be that of the run that nobody killed.
    """
    furnish(folder)
    recipe = replace(CONFIG, steps=80, data=(Path("text.txt"),))
    settings.dump(recipe, folder / "tiny.toml")
    with contextlib.chdir(folder):
        thread.run(2, job.launch, replace(recipe, name="whole"))
    chooser, done = random.Random(0), 0
    for run in range(runs):
        name = f"killed-{run}"
        for _ in range(kills):
            done += kill(started(folder, name), folder, name, chooser)
        assert started(folder, name).wait(timeout=BACKSTOP) == 0
        assert curves(folder, name) == curves(folder, "whole"), name
    return done


def kill(process, folder, name, chooser):
    """End both ranks without warning once the run has got on a little; False if it was done before that."""
    begun = len(lines_of(folder, name))
    deadline = time.monotonic() + 200
    while len(lines_of(folder, name)) < begun + 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(chooser.uniform(0, 0.15))
    ranks = ranks_of(process) if process.poll() is None else []
    for pid in ranks:
        subprocess.run(["kill", "-KILL", pid], check=False)
    process.wait(timeout=BACKSTOP)
    return bool(ranks)


def started(folder, name):
    command = [mpirun_path(), "-n", "2", sys.executable, "-m", "tests.train.plain", "--config", "tiny.toml"]
    return subprocess.Popen(
        [*command, "--name", name, "--resume", "auto"],
        cwd=folder,
        env=clean_environment(**OPEN_MPI),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def ranks_of(process):
    """The process ids of the ranks below a launcher."""
    import psutil

    below = psutil.Process(process.pid).children(recursive=True)
    return [str(child.pid) for child in below if "tests.train.plain" in " ".join(child.cmdline())]
