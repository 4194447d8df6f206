"""What a run leaves behind, and the lines that it prints."""

import json
import mmap
import os
import re
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest

from shardrt.comm import init_device_mesh, thread
from shardrt.train import metrics, progress, screen
from shardrt.train.metrics import RunLog, new_run_directory, over_ranks, plot_losses, read_metrics
from shardrt.train.progress import (
    Ranks,
    Stopwatch,
    clock,
    evaluation_line,
    expert_figures,
    memory_mb,
    step_line,
)
from shardrt.train.screen import Screen

STEP = {
    "step": 1,
    "loss": 5.5,
    "norm": 1.25,
    "lr": 1e-3,
    "ms": 12.5,
    "tokens_per_s": 1e5,
    "memory_mb": 150.0,
    "eta_s": 61.0,
}
EVALUATION = {"step": 1, "held_out_loss": 2.0, "held_out_bits_per_byte": 2.885, "held_out_bytes": 240}


@pytest.fixture(scope="module", autouse=True)
def plain_runs():
    """With their picture."""


@pytest.fixture(autouse=True)
def _away(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_line_of_the_metrics_is_json_and_there_at_once(tmp_path):
    run = RunLog(tmp_path)
    records = [("run", {"data": 'a "file"\nü'}), ("step", STEP), ("evaluation", EVALUATION)]
    for number, (kind, record) in enumerate(records, 1):
        run.write(kind, record)
        lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == number
        assert json.loads(lines[-1]) == {"kind": kind, **record}
    run.finish({"seconds": 1.0})
    assert [record["kind"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [
        *("run", "step", "evaluation", "end")
    ]
    assert (tmp_path / "loss.png").exists()


def test_a_number_that_json_has_not_is_refused(tmp_path):
    with pytest.raises(ValueError):
        RunLog(tmp_path).write("step", {"loss": float("nan")})
    assert not (tmp_path / "metrics.jsonl").read_text()


class Full:
    """A disk of which `room` bytes are left; takes the place of os.write."""

    def __init__(self, room):
        self.room, self.write = room, os.write

    def __call__(self, file, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.write(file, data[: self.room])
        self.room -= written
        return written


def test_records_that_a_full_disk_does_not_take_are_written_when_it_has_room(tmp_path, monkeypatch, capfd):
    run, disk = RunLog(tmp_path), Full(10)
    monkeypatch.setattr(metrics.os, "write", disk)
    for step in (1, 2, 3):
        run.write("step", {**STEP, "step": step})
    assert (tmp_path / "metrics.jsonl").stat().st_size == 10
    disk.room = 1 << 20
    run.write("step", {**STEP, "step": 4})
    disk.room = 0
    run.write("step", {**STEP, "step": 5})
    run.close()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    message = capfd.readouterr().out
    assert message.count("metrics.jsonl: No space left on device; training goes on") == 2  # once each time
    assert "warning: 1 records of metrics.jsonl could not be written" in message


def test_an_output_on_a_full_disk_ends_no_run(tmp_path, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        RunLog(tmp_path).say("step 1")
        monkeypatch.undo()
        with pytest.raises(OSError):
            full.close()


def test_a_picture_that_cannot_be_written_is_reported(tmp_path, capfd):
    (tmp_path / "loss.png").mkdir()
    RunLog(tmp_path).finish({"seconds": 1.0})
    assert "loss.png: Is a directory" in capfd.readouterr().out


def test_metrics_are_never_overwritten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("kept")
    with pytest.raises(FileExistsError):
        RunLog(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "kept"


def test_a_rank_without_a_directory_prints_and_writes_nothing(tmp_path, capfd):
    run = RunLog(None)
    run.say("line")
    run.write("step", STEP)
    run.finish({})
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "records",
    [[], [{"kind": "step", **STEP}], [{"kind": "step", **STEP}, {"kind": "evaluation", **EVALUATION}]],
)
def test_the_picture_is_a_png(tmp_path, records):
    from matplotlib.image import imread

    plot_losses(records, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert imread(tmp_path / "loss.png").shape == (480, 920, 4)


def test_a_run_goes_to_the_folder_of_its_name(tmp_path):
    assert new_run_directory("mine").resolve() == tmp_path / "runs" / "mine"
    assert (tmp_path / "runs" / "mine").is_dir()


def test_runs_without_a_name_that_begin_in_one_second_have_a_folder_each(monkeypatch):
    monkeypatch.setattr(metrics.time, "strftime", lambda form: "now")
    assert [new_run_directory("").name for _ in range(3)] == ["now", "now_2", "now_3"]


def test_a_name_that_is_taken_is_refused(tmp_path):
    new_run_directory("mine")
    with pytest.raises(FileExistsError, match="runs/mine exists already: pass another --name"):
        new_run_directory("mine")


@pytest.mark.parametrize("name", [".", "..", "a/b", "../a", "/a", "a/"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="must be a plain folder name"):
        new_run_directory(name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", (3.0, 30.0)), ("max", (2.0, 20.0)), ("min", (0.0, 0.0))]
)
def test_numbers_are_combined_over_ranks(op, expected):
    def combined():
        mesh = init_device_mesh()
        return over_ranks(mesh, op, mesh.rank, 10 * mesh.rank)

    assert thread.run(3, combined) == [expected] * 3


def test_the_load_of_experts_is_that_of_all_ranks_and_of_the_layer_where_it_is_most():
    def figures():
        mesh = init_device_mesh()
        first = [3, 1, 0, 0] if mesh.rank == 0 else [3, 0, 1, 0]
        return expert_figures(mesh, {"0": np.array(first), "1": np.full(2, 4)}), expert_figures(mesh, {})

    assert thread.run(2, figures) == [({"expert_load": 3.0, "empty_experts": 1 / 6}, {})] * 2


def test_step_lines_fit_the_terminal_and_are_aligned():
    message = STEP | {"mfu": 0.62, "slowest_rank": 1, "lag_ms": 2.5}
    records = [message, message | {"step": 1000, "loss": 12.25, "norm": 100.0, "ms": 1e4, "eta_s": 3600.0}]
    for width in (40, 80, 100, 200):
        lines = [step_line(record, 1000, width=width) for record in records]
        assert len({len(line) for line in lines}) == 1 and len(lines[0]) <= width
    assert step_line(message, 1000) == (
        "step    1/1000  loss  5.5000  norm   1.250  100.0k tok/s  mfu 62%  left    1:01"
    )
    mixed = message | {"expert_load": 2.46, "empty_experts": 0.125}
    assert step_line(mixed, 1000) == (
        "step    1/1000  loss  5.5000  norm   1.250  load  2.5x  12% empty  100.0k tok/s"
    )
    whole = lines[0]
    for part in ("loss", "norm", "lr", "ms", "tok/s", "mfu", "MB", "left", "rank 1   2.5 ms late"):
        assert len({line.index(part.split()[0]) for line in lines}) == 1 and part in whole, part


def test_sentences_take_as_many_lines_as_they_need(capsys):
    Screen().explain("word " * 60)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3 and all(len(line) < 80 for line in lines)
    assert all(line.startswith("    ") for line in lines[1:])


def test_what_takes_long_says_so_where_no_line_can_move(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(screen.time, "perf_counter", lambda: now[0])
    shown, silent = Screen(), Screen(shown=False)
    for done in range(30):
        for each in (shown, silent):
            each.show("evaluating", done, 30, lines=True)
            each.show("training", done, 30)
        now[0] += 1.0
    assert capsys.readouterr().out.splitlines() == ["evaluating: 10/30", "evaluating: 20/30"]


def test_a_terminal_has_a_line_that_moves_below_whole_lines():
    """In a pseudo-terminal."""
    code = (
        "import time\nfrom shardrt.train.screen import Screen\nscreen = Screen()\n"
        "with screen.moving():\n    screen.show('training', 0, 3)\n"
        "    for done in range(3):\n        time.sleep(0.11)\n"
        "        screen.show('training', done + 1, 3)\n        screen.say(f'step {done} loss 1.5')\n"
    )
    master, slave = os.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=slave, env=environment) as process:
        os.close(slave)
        drawn = b""
        with suppress(OSError):  # the other end is closed
            while more := os.read(master, 4096):
                drawn += more
    os.close(master)
    assert process.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.decode())
    message = [line for line in text.splitlines() if line.startswith("step")]
    assert message == [f"step {number} loss 1.5" for number in range(3)]
    assert "training" in text and "1/3" in text and "3/3" in text and "\x1b[1;36m1.5" in drawn.decode()


def test_an_evaluation_has_one_line():
    line = evaluation_line(EVALUATION, 1000)
    assert line == "step    1/1000  held-out loss 2.0000, 2.8850 bits per byte"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599.4, "59:59"), (3600, "1:00:00"), (90061, "25:01:01")],
)
def test_times_read_as_a_clock(seconds, text):
    assert clock(seconds) == text


def test_the_stopwatch_gives_the_mean_since_it_was_read_and_leaves_evaluations_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    stopwatch = Stopwatch(total_steps=10, per_step=50)
    now[0] += 4
    assert stopwatch.read(2) == {"ms": 2000.0, "tokens_per_s": 25.0, "eta_s": 16.0}
    now[0] += 100  # an evaluation
    stopwatch.restart(2)
    now[0] += 8
    assert stopwatch.read(10) == {"ms": 1000.0, "tokens_per_s": 50.0, "eta_s": 0.0}


def test_the_first_step_says_nothing_of_those_to_come_and_a_busy_machine_has_no_mfu(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    stopwatch = Stopwatch(total_steps=10, per_step=50, ideal=1.0)
    stopwatch.restart(4)  # resumed
    lines = []
    for step, seconds in (
        (5, 40),
        (6, 2),
        (7, 0.5),
    ):  # compiled; as it is; faster than was measured to be possible
        now[0] += seconds
        lines.append(step_line(STEP | stopwatch.read(step) | {"step": step}, 10))
    for line, shown in zip(
        lines, ("mfu  --  left      --", "mfu 50%  left    0:08", "mfu  --  left    0:02"), strict=True
    ):
        assert line.endswith(shown) and line.index("tok/s") == lines[0].index("tok/s")


def test_the_rank_that_was_in_collectives_least_is_the_one_the_others_waited_for():
    def read():
        mesh = init_device_mesh()
        seconds = iter([0.0, 10.0, 10.0 + [0.4, 0.1, 0.3][mesh.rank], 20.0])
        ranks = Ranks(mesh, lambda: next(seconds))
        ranks.restart(4)
        return ranks.read(6)

    for found in thread.run(3, read):
        assert found["slowest_rank"] == 1 and found["lag_ms"] == pytest.approx(150.0)  # over two steps
        assert found["memory_mb"] > 0 and found["memory_rank"] in (0, 1, 2)


def test_memory_is_that_of_this_process():
    before = memory_mb()
    block = np.frombuffer(mmap.mmap(-1, 200_000_000), np.uint8)  # new pages, whatever the heap has left
    block.fill(1)
    assert memory_mb() - before == pytest.approx(block.nbytes / 1e6, rel=0.1)


def test_said_lines_end_at_once(tmp_path, capfd):
    RunLog(tmp_path).say("step 1")
    assert re.fullmatch("step 1\n", capfd.readouterr().out)
