"""`python -m shardrt doctor`: of a run that ended, was killed or never was; and of this machine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardrt.__main__ import main
from shardrt.faults.flight import ENTERED, Recorder
from shardrt.tools import machine
from shardrt.train import loop
from tests.lab.jobs import STEPS, furnish, launch
from tests.train.conftest import plain_runs  # noqa: F401, a fixture that all tests here use


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(furnish(tmp_path))
    return tmp_path


def message(capsys, *arguments):
    """(exit code, what was printed)"""
    capsys.readouterr()
    return main(["doctor", *arguments]), capsys.readouterr().out


def test_of_a_run_that_is_done_it_says_so(folder, capsys):
    launch(2, "whole")
    code, out = message(capsys, "runs/whole")
    assert code == 0
    assert out.startswith(f"runs/whole: done\nmetrics: last step {STEPS}, loss ")
    assert out.count(f"    step {STEPS}, end; ") == 2
    found = json.loads(message(capsys, "runs/whole", "--json")[1])
    assert [rank["state"] for rank in found["ranks"]] == ["done", "done"]
    assert (found["behind"], found["first"], found["errors"]) == ([], None, [])
    assert found["ranks"][1]["done"].startswith("all_gather_bytes #")  # of the sample's last token


def test_of_a_run_that_raised_it_says_who_and_what(folder, capsys, monkeypatch):
    def refuse(job, done):
        if job.mesh.rank == 1 and done == 3:
            raise ZeroDivisionError("in the middle of it")
        return original(job, done)

    original = loop.update
    monkeypatch.setattr(loop, "update", refuse)
    with pytest.raises(ZeroDivisionError):
        launch(3, "failed", batch_size=6)
    code, out = message(capsys, "runs/failed")
    assert code == 1
    assert out.startswith("runs/failed: rank 1 ended first (ZeroDivisionError: in the middle of it)")
    assert out.count("PeerFailed") == 2
    assert "    step 3, optimizer; " in out


def test_of_a_run_that_was_asked_to_stop_it_says_how_to_go_on(folder, capsys):
    (folder / "runs" / "asked").mkdir()
    with pytest.raises(SystemExit) as stop:
        (folder / "runs" / "asked" / "stop").touch()
        launch(1, "asked", resume="auto")
    assert stop.value.code == 75
    code, out = message(capsys, "runs/asked")
    assert code == 0
    assert "runs/asked: asked to stop, and saved: resume with --resume auto" in out


@contextmanager
def processes(folder, states):
    """Flight files of processes that live no more, or are stopped, or still run; gives those that live.

    They are killed at the end of the with block.
    """
    alive = []
    for rank, state in enumerate(states):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        recorder = Recorder(folder, rank, len(states))
        for number in range(1, 5 if state == "killed" else 6):
            recorder._write(ENTERED, *recorder.facts("gather", number, "all_gather", "blocks.0", None))
        data = bytearray((folder / f"rank-{rank}.bin").read_bytes())
        data[24:28] = process.pid.to_bytes(4, "little")
        (folder / f"rank-{rank}.bin").write_bytes(data)
        if state == "killed":
            process.kill()
            process.wait()
        else:
            alive.append(process)
    try:
        yield alive
    finally:
        for process in alive:
            process.kill()
            process.wait()


def test_of_a_run_of_which_a_rank_was_killed_it_says_which(tmp_path, capsys):
    with processes(tmp_path / "flight", ["waits", "killed", "waits"]):
        code, out = message(capsys, str(tmp_path))
        assert code == 1
        assert "rank 1 ended first (killed, it said nothing); rank 1 is behind: ranks 0,2 wait in" in out
        assert out.count(": alive") == 2
    code, out = message(capsys, str(tmp_path))
    assert out.count(": killed, it said nothing") == 3 and "rank 1 ended first" in out


def test_a_killed_rank_that_its_launcher_has_not_asked_after_yet_is_not_alive(tmp_path, capsys):
    with processes(tmp_path / "flight", ["killed later", "waits"]) as (killed, _):
        killed.kill()
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        assert message(capsys, str(tmp_path))[1].count(": alive") == 1


def test_ranks_of_other_hosts_live_if_they_go_on_while_it_listens(tmp_path, capsys, monkeypatch):
    first, second, gone = (Recorder(tmp_path / "flight", rank, 3) for rank in range(3))
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    over = threading.Event()

    def live():
        while not over.wait(0.1):
            first.beat()
            second.beat()

    beats = threading.Thread(target=live)
    beats.start()
    try:
        out = message(capsys, str(tmp_path))[1]
    finally:
        over.set()
        beats.join()
    assert re.findall(r"^rank (\d) on .*: alive", out, re.M) == ["0", "1"]
    assert f"rank {gone.rank} ended first (killed, it said nothing)" in out


def test_a_stopped_rank_is_alive_however_long_ago_it_gave_a_sign(tmp_path, capsys, monkeypatch):
    with processes(tmp_path / "flight", ["waits"]) as (process,):
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 60)
        out = message(capsys, str(tmp_path))[1]
        assert f", process {process.pid}: alive, its process is stopped" in out and out.count(": alive") == 1
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.1)
        assert message(capsys, str(tmp_path))[1].count(": alive") == 0


def test_what_cannot_be_read_is_told_in_a_line(tmp_path, capsys):
    assert message(capsys, str(tmp_path)) == (
        65,
        f"{tmp_path}: nothing is known\nwarning: {tmp_path}/flight: no flight files\n",
    )
    assert main(["doctor", str(tmp_path / "none")]) == 65
    assert capsys.readouterr().err == f"error: {tmp_path}/none: no such folder\n"
    (tmp_path / "metrics.jsonl").write_text('[1]\n{"kind": "step", "step": 3, "loss": 1.5}\n{"kind": "st')
    assert "metrics: last step 3, loss 1.5" in message(capsys, str(tmp_path))[1]


@pytest.mark.mpi
def test_of_this_machine_it_says_what_is_there(capsys):
    code, out = message(capsys, "--json")
    found = json.loads(out)
    assert found["mpi"]["threads"] == "multiple" and found["two ranks"] == "well", found
    assert found["cores"] >= 1 and found["memory"]["all"] > found["memory"]["free"] > 0
    assert found["packages"]["numpy"].count(".") == 2
    if found["for GPUs"]:
        assert {"runtime", "driver", "NCCL", "cuDNN"} == found["CUDA"].keys(), "loaded without a GPU, too"
    assert code == bool(found["lacking"])
    lines = machine.lines(found)
    named = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert named[:5] == ["shardrt", "packages", "for", "CUDA", "MPI"]
    assert all(len(line) <= 80 or len(line.split()) < 4 for line in lines), lines


def test_a_kernel_cache_that_others_may_write_or_nobody_can_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    assert "can be written by other users" in machine.kernel_cache(tmp_path)["lacking"][0]
    tmp_path.chmod(0o755)
    assert machine.kernel_cache(tmp_path)["lacking"] == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert "kernels are compiled again" in machine.kernel_cache(tmp_path)["lacking"][0]


def test_flights_of_an_earlier_run_go_when_it_is_resumed(folder, capsys):
    launch(3, "again", steps=3, batch_size=6)
    launch(2, "again", batch_size=6, resume="auto")
    found = json.loads(message(capsys, "runs/again", "--json")[1])
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1] and found["code"] == 0


def test_nothing_is_left_in_temporary_folders(folder, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    launch(2, "whole")
    with pytest.raises(SystemExit):
        launch(1, "bad", data=(Path("none.txt"),))
    assert list((tmp_path / "temporary").iterdir()) == []
