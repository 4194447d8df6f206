"""Trackers get a run's figures and settings, and none can stop or slow the run, whatever it does."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import closing, suppress
from pathlib import Path
from unittest.mock import MagicMock, call

import psutil
import pytest

from shardrt.train import config, trackers
from shardrt.train.metrics import RunLog
from shardrt.train.trackers import TrackedRun, Tracking, delivery
from shardrt.train.trackers.protocol import tracker_of

SETTINGS = {"steps": 3, "optimizer": {"lr": 0.5}, "name": "a"}
STEP = {"step": 1, "loss": 5.5, "norm": 1.25, "lr": 1e-3, "ms": 12.5, "eta_s": 61.0, "memory_rank": 0}
EVALUATION = {"step": 3, "held_out_loss": 2.0}

OWN = '''
import json, os, signal, subprocess, sys, time

class Notes:
    """Writes its calls to a file."""

    def start(self, run):
        self.file = run.folder / "notes"
        self.note("start", run.name, run.settings, run.resumed, run.step)

    def log(self, values, step):
        self.note("log", values, step)

    def finish(self, status):
        self.note("finish", status)

    def note(self, *call):
        with self.file.open("a") as file:
            print(json.dumps(call), file=file)

class Environment(Notes):
    def start(self, run):
        self.file = run.folder / "notes"
        self.note(sorted(os.environ), os.getpgrp() == os.getppid(), "mpi4py" in sys.modules)

class Leaving(Notes):
    """Starts a process in a session of its own, and one whose parent ends at once."""

    def start(self, run):
        super().start(run)
        started = subprocess.Popen(["sleep", "600"], start_new_session=True)
        daemon = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)"
        out = subprocess.run([sys.executable, "-c", daemon], start_new_session=True, stdout=subprocess.PIPE)
        with (run.folder / "left").open("a") as file:
            print(started.pid, int(out.stdout), file=file)

def fault(method, do, kind=Notes):
    def act(self, *given):
        getattr(kind, method)(self, *given)
        do()
    return type("Faulty", (kind,), {method: act})

def refuse():
    raise RuntimeError("no\\nserver")

def full():
    raise OSError(28, "No space left on device")

def sleep():
    while True:
        time.sleep(60)

def leave():
    sys.exit(3)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def shout():
    print("x" * 100_000)
    print("y" * 100_000, file=sys.stderr)

for do in (refuse, full, sleep, leave, kill, shout):
    for method in ("start", "log", "finish"):
        globals()[f"{do.__name__.capitalize()}In{method.capitalize()}"] = fault(method, do)
LeavingAndKilled = fault("log", kill, Leaving)
LeavingAndLate = fault("finish", sleep, Leaving)
'''


@pytest.fixture(scope="module", autouse=True)
def plain_runs():
    """Nothing here has what it leaves out."""


@pytest.fixture(autouse=True)
def _own_module(tmp_path, monkeypatch):
    """A module of a user's own; libraries that are asked for keep their files here."""
    (tmp_path / "own_trackers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr(delivery, "PATIENCE", 60.0)


def tracked(folder, names, *, resumed=False, step=0):
    """The log of a run with these trackers."""
    folder.mkdir(exist_ok=True)
    run = RunLog(folder, resumed=resumed)
    if resumed:
        run.rewind(step)
    run.track(names, SETTINGS, step)
    return run


def delivered(folder, names, *, resumed=False, step=0, losses=(5.0, 4.0, 3.0)):
    """A run of a few steps from its start to its end."""
    with closing(tracked(folder, names, resumed=resumed, step=step)) as run:
        for number, loss in enumerate(losses, start=step + 1):
            run.write("step", {**STEP, "step": number, "loss": loss})
        run.write("step", {**STEP, "step": number + 1, "loss": None})
        run.write("evaluation", EVALUATION)
        run.close("finished")


def notes(folder):
    if not (folder / "notes").exists():
        return []
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


def test_a_tracker_gets_settings_all_numbers_and_the_status(tmp_path, capfd):
    delivered(tmp_path / "a", ["own_trackers:Notes"], losses=(5.0,))
    numbers = {f"train/{name}": value for name, value in STEP.items() if name != "step"}
    without_loss = {name: value for name, value in numbers.items() if name != "train/loss"}
    assert notes(tmp_path / "a") == [
        ["start", "a", SETTINGS, False, 0],
        ["log", numbers | {"train/loss": 5.0}, 1],
        ["log", without_loss, 2],
        ["log", {"evaluation/held_out_loss": 2.0}, 3],
        ["finish", "finished"],
    ]
    assert capfd.readouterr() == ("", "")


def test_a_run_that_raises_has_failed_and_one_that_is_resumed_says_so(tmp_path):
    with pytest.raises(KeyError), closing(tracked(tmp_path / "a", ["own_trackers:Notes"])):
        raise KeyError
    tracked(tmp_path / "a", ["own_trackers:Notes"], resumed=True, step=2).close("stopped")
    assert notes(tmp_path / "a")[1:] == [
        *(["finish", "failed"], ["start", "a", SETTINGS, True, 2], ["finish", "stopped"])
    ]


def test_its_process_has_nothing_of_the_job(tmp_path, monkeypatch):
    for name in ("PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID", "HYDI_X"):
        monkeypatch.setenv(name, "1")
    tracked(tmp_path / "a", ["own_trackers:Environment"]).close()
    names, leads_a_group, has_mpi = notes(tmp_path / "a")[0]
    assert {"WANDB_MODE", "MLFLOW_DISABLE_TELEMETRY", "GRADIO_ANALYTICS_ENABLED", "HOME"} <= {*names}
    assert not [name for name in names if name.startswith(("PMI", "OMPI_", "MPI_", "HYDI_"))]
    assert leads_a_group
    assert not has_mpi


WORDS = {
    "Refuse": "RuntimeError: no server",
    "Full": "OSError: [Errno 28] No space left on device",
    "Leave": "SystemExit: 3",
}


@pytest.mark.parametrize("do", [*WORDS, "Sleep", "Kill", "Shout"])
def test_a_run_ends_in_time_with_a_faulty_tracker(tmp_path, monkeypatch, capfd, do):
    """In each method at once, so that the three waits are one; each is named in its own lines."""
    if do == "Sleep":
        monkeypatch.setattr(delivery, "PATIENCE", 3.0)
    names = [f"own_trackers:{do}In{method}" for method in ("Start", "Log", "Finish")]
    began = time.monotonic()
    said = []
    run = TrackedRun("a", tmp_path, SETTINGS, False, 0)
    tracking = Tracking(names, run, said.append)
    tracking.write("step", STEP)
    tracking.close("finished")
    in_start, in_log, in_finish = (
        [line.removeprefix(f"warning: tracker {name}: ") for line in said if f" {name}:" in line]
        for name in names
    )
    if do in WORDS:
        words = WORDS[do]
        assert in_start == [f"start: {words}", "1 of 1 records are not there"]
        assert in_log == [f"log: {words}", "1 of 1 records are not there"]
        assert in_finish == [f"finish: {words}"]
    elif do == "Shout":
        assert not said
        assert sorted(call[0] for call in notes(tmp_path)) == [
            *(3 * ["finish"] + 3 * ["log"] + 3 * ["start"])
        ]
    else:
        why = "not done in 3 s: ended" if do == "Sleep" else "its process ended (SIGKILL)"
        for lines in (in_start, in_log, in_finish):
            assert lines == [why, "up to 1 of 1 records are not there"]
    assert len(said) == sum(map(len, (in_start, in_log, in_finish)))
    assert capfd.readouterr() == ("", "")
    assert not own_children()
    if do == "Sleep":
        assert time.monotonic() - began > 3  # it did wait


def own_children():
    """Processes of trackers that are there still."""
    return [
        p for p in psutil.Process().children(recursive=True) if "trackers/process.py" in " ".join(p.cmdline())
    ]


def left(folder):
    """Processes that trackers have left running."""
    started = [int(pid) for pid in (folder / "left").read_text().split()]
    assert started
    return [pid for pid in started if psutil.pid_exists(pid)]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no subreaper")
def test_what_a_tracker_started_ends_with_it_also_in_another_session(tmp_path, monkeypatch):
    """However it ends: by itself, killed, or late; the last waits, so that all have started."""
    monkeypatch.setattr(delivery, "PATIENCE", 5.0)
    monkeypatch.setattr(delivery, "_GRACE", 60.0)
    said = []
    names = [f"own_trackers:Leaving{how}" for how in ("", "AndKilled", "AndLate")]
    tracking = Tracking(names, TrackedRun("a", tmp_path, SETTINGS, False, 0), said.append)
    tracking.write("step", STEP)
    until(lambda: len(notes(tmp_path)) >= 6)  # start and log of each
    assert len(left(tmp_path)) >= 4
    tracking.close("finished")
    assert any("AndKilled: its process ended (SIGKILL)" in line for line in said)
    assert any("AndLate: not done in 5 s: ended" in line for line in said)
    assert not left(tmp_path)


def until(true):
    """Wait for something that comes on a busy machine, too."""
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_tracker_that_never_takes_a_record_takes_no_step_of_the_run(tmp_path, monkeypatch):
    """A step is a few system calls that never wait; memory is bounded, and dropped records are counted."""
    room, steps = 10_000, 2000
    monkeypatch.setattr(delivery, "ROOM", room)
    monkeypatch.setattr(delivery, "PATIENCE", 0.2)
    calls = []
    for name in ("write", "read"):
        monkeypatch.setattr(delivery.os, name, counted(getattr(os, name), calls))
    said, names = [], ["own_trackers:SleepInStart", "own_trackers:SleepInLog"]
    tracking = Tracking(names, TrackedRun("a", tmp_path, SETTINGS, False, 0), said.append)
    calls.clear()
    waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for number in range(steps):
        tracking.write("step", {**STEP, "step": number})
    waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - waits
    assert waits < steps / 10
    assert len(calls) <= 3 * len(names) * steps
    assert all(len(each._waiting) <= room for each in tracking._deliveries)
    slow = "it is slower than the run: records are dropped"
    assert said == [f"warning: tracker {name}: {slow}" for name in names]
    tracking.close("finished")
    for name in names:
        assert f"warning: tracker {name}: up to {steps} of {steps} records are not there" in said


def counted(call, calls):
    def counting(*given):
        calls.append(call)
        return call(*given)

    return counting


def test_a_class_that_is_not_there_is_one_warning(tmp_path, capfd):
    delivered(tmp_path / "a", ["own_trackers:Nothing"])
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(
        "warning: tracker own_trackers:Nothing: start: AttributeError: module 'own_trackers'"
    )
    assert lines[1] == "warning: tracker own_trackers:Nothing: 5 of 5 records are not there"


def test_a_process_that_cannot_be_started_is_one_warning(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    delivered(tmp_path / "a", ["own_trackers:Notes"])
    assert capfd.readouterr().out == (
        "warning: tracker own_trackers:Notes: could not start: No such file or directory\n"
        "warning: tracker own_trackers:Notes: 5 of 5 records are not there\n"
    )


def test_the_process_finishes_when_the_run_is_killed(tmp_path):
    program = (
        "import os, signal\nfrom pathlib import Path\nfrom shardrt.train.metrics import RunLog\n"
        "run = RunLog(Path('a'))\nrun.track(['own_trackers:Leaving'], {}, 0)\n"
        "run.write('step', {'step': 1, 'loss': 2.5})\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "a").mkdir()
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{root}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: len(notes(tmp_path / "a")) == 3)
    if sys.platform == "linux":
        until(lambda: not left(tmp_path / "a"))
    assert notes(tmp_path / "a")[1:] == [["log", {"train/loss": 2.5}, 1], ["finish", "failed"]]


@pytest.mark.parametrize("name", ["Wandb", "wandb ", "", ":", "a:", ":b", "a-b:c", "../a:b", "a:b:c"])
def test_a_name_that_is_no_tracker_is_refused(name):
    with pytest.raises(ValueError, match=r"^report.trackers must be one of trackio, .* got "):
        config.ReportConfig(trackers=("wandb", name))


@pytest.mark.parametrize("name", ["trackio", "wandb", "mlflow", "tensorboard"])
def test_without_its_package_a_tracker_is_refused_in_one_line(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    wanted = rf"^report.trackers: the package {name} is missing: pip install 'shardrt\[{name}\]'$"
    with pytest.raises(ValueError, match=wanted):
        trackers.check([name])
    with pytest.raises(ValueError, match="^report.trackers: the package not_there is missing$"):
        trackers.check(["not_there.deep:Class"])


def test_tensorboard_reads_the_same_curves_also_of_a_run_that_was_resumed(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    delivered(tmp_path / "a", ["tensorboard"])
    delivered(tmp_path / "a", ["tensorboard"], resumed=True, step=2, losses=(1.5,))
    events = EventAccumulator(str(tmp_path / "a" / "tensorboard"))
    events.Reload()
    curves = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert curves["train/loss"] == [(1, 5.0), (2, 4.0), (3, 1.5)]
    assert curves["train/norm"] == [(step, 1.25) for step in (1, 2, 3, 4)]
    assert curves["evaluation/held_out_loss"] == [(3, 2.0)]
    assert {"train/lr", "train/ms"} <= curves.keys()
    assert not {"train/step", "train/eta_s", "train/kind"} & curves.keys()


def test_mlflow_has_one_run_with_all_values_also_of_a_run_that_was_resumed(tmp_path, monkeypatch, capfd):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    delivered(tmp_path / "a", ["mlflow"])
    delivered(tmp_path / "a", ["mlflow"], resumed=True, step=3, losses=(1.5,))
    assert capfd.readouterr().out == ""
    client = MlflowClient()
    experiment = client.get_experiment_by_name("shardrt").experiment_id
    (run,) = client.search_runs([experiment])
    assert (run.info.run_name, run.info.status) == ("a", "FINISHED")
    assert run.data.params == {"steps": "3", "optimizer.lr": "0.5", "name": "a"}
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((each.step, each.value) for each in losses) == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 1.5)]
    assert run.data.metrics["evaluation/held_out_loss"] == 2.0


@pytest.mark.parametrize("server", ["refuses", "black hole"])
def test_a_dead_server_of_mlflow_holds_up_nothing(tmp_path, monkeypatch, capfd, server):
    pytest.importorskip("mlflow")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if server == "black hole":
            listening.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        if server == "black hole":
            monkeypatch.setattr(delivery, "PATIENCE", 3.0)
        delivered(tmp_path / "a", ["mlflow"])
    first, last = capfd.readouterr().out.splitlines()
    if server == "refuses":
        assert first.startswith("warning: tracker mlflow: start: MlflowException: API request to")
        assert last == "warning: tracker mlflow: 5 of 5 records are not there"
    else:
        assert first == "warning: tracker mlflow: not done in 3 s: ended"
    assert not own_children()


def test_trackio_has_one_run_with_all_values_also_of_a_run_that_was_resumed(tmp_path, monkeypatch, capfd):
    pytest.importorskip("trackio")
    delivered(tmp_path / "a", ["trackio"])
    delivered(tmp_path / "a", ["trackio"], resumed=True, step=3, losses=(1.5,))
    assert capfd.readouterr().out == ""
    program = (
        "import json, trackio\nfrom trackio.sqlite_storage import SQLiteStorage\n"
        "runs = list(trackio.Api().runs('shardrt'))\n"
        "logs = SQLiteStorage.get_logs('shardrt', 'a')\n"
        "print(json.dumps([[run.name for run in runs], runs[0].config, logs], default=str))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names, settings, logs = json.loads(done.stdout.splitlines()[-1])
    assert names == ["a"]
    assert SETTINGS.items() <= settings.items()
    losses = [(each["step"], each["train/loss"]) for each in logs if "train/loss" in each]
    assert losses == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 1.5)]


def test_wandb_has_one_id_and_all_values_offline_also_of_a_run_that_was_resumed(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    delivered(tmp_path / "a", ["wandb"])
    delivered(tmp_path / "a", ["wandb"], resumed=True, step=3, losses=(1.5,))
    assert capfd.readouterr().out == ""
    files = sorted((tmp_path / "a" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert {file.name for file in files} == {f"run-{(tmp_path / 'a' / 'wandb_id').read_text().strip()}.wandb"}
    found = [each for file in files for each in history(file)]
    assert [(int(e["_step"]), e["train/loss"]) for e in found if "train/loss" in e] == [
        *((1, 5.0), (2, 4.0), (3, 3.0), (4, 1.5))
    ]


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid(), reason="root alone can mount a small disk")
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_full_disk_that_the_library_hides_is_one_line(tmp_path, monkeypatch, capfd, name):
    pytest.importorskip(name)
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let root mount")
    try:
        monkeypatch.setenv("TRACKIO_DIR", str(disk / "trackio"))
        run = Tracking([name], TrackedRun("a", disk, SETTINGS, False, 0), print)
        run.write("step", {**STEP, "step": 1})
        until(lambda: [*disk.glob("wandb/*/run-*.wandb"), *disk.glob("trackio_name")])
        with suppress(OSError), (disk / "full").open("wb", buffering=0) as full:
            while True:
                full.write(bytes(4096))
        for number in range(2, 300):
            run.write("step", {**STEP, "step": number})
        run.close("finished")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    words = {
        "wandb": "writer: failed to save record: .*no space left",
        "trackio": "trackio failed .*disk is full",
    }
    assert re.match(rf"warning: tracker {name}: \w+: RuntimeError: {words[name]}", capfd.readouterr().out)


def test_wandb_is_called_as_its_version_0_31_takes_it_and_its_log_is_read(tmp_path, monkeypatch):
    """The lines of its log are that version's on a full tmpfs, the last cut where the disk was full."""
    library = MagicMock()
    library.init.return_value.dir = str(tmp_path / "wandb" / "run" / "files")
    monkeypatch.setitem(sys.modules, "wandb", library)
    log = tmp_path / "wandb" / "run" / "logs" / "debug-internal.log"
    log.parent.mkdir(parents=True)
    log.write_text('{"time":"2026-11-29T09:10:14.1Z","level":"INFO","msg":"handler: started"}\n')
    tracker = tracker_of("wandb")
    tracker.start(TrackedRun("a", tmp_path, SETTINGS, False, 0))
    begun = library.init.call_args.kwargs
    kept = (tmp_path / "wandb_id").read_text().strip()
    assert begun | {"settings": 0} == {
        **{"project": "shardrt", "name": "a", "id": kept, "resume": "allow", "config": SETTINGS},
        **{"dir": str(tmp_path), "settings": 0},
    }
    tracker.log({"train/loss": 2.5}, 1)
    full = "writer: failed to save record: transactionlog: error writing: no space left on device"
    with log.open("a") as file:
        file.write('{"time":"2026-11-29T09:10:15Z","level":"ERROR","msg":"error writing requirements"}\n')
        file.write(f'{{"time":"2026-11-29T09:10:15.0Z","level":"ERROR","msg":"{full}')
    for act in (lambda: tracker.log({"train/loss": 2.25}, 2), lambda: tracker.finish("failed")):
        with pytest.raises(RuntimeError, match=f"^{full}$"):
            act()
    run = library.init.return_value
    assert run.mock_calls == [
        call.log({"train/loss": 2.5}, step=1),
        call.log({"train/loss": 2.25}, step=2),
        call.finish(exit_code=1),
    ]
    assert library.teardown.called
    tracker.start(TrackedRun("a", tmp_path, SETTINGS, True, 2))
    assert library.init.call_args.kwargs["id"] == kept


def test_a_warning_of_trackio_0_43_that_it_could_not_write_is_raised(tmp_path, monkeypatch):
    library = MagicMock()
    monkeypatch.setitem(sys.modules, "trackio", library)
    full = "trackio failed to flush metric logs for run 'a': database or disk is full."
    with warnings.catch_warnings():
        tracker = tracker_of("trackio")
        tracker.start(TrackedRun("a", tmp_path, SETTINGS, False, 0))
        warnings.warn("trackio.init() could not inspect existing runs", stacklevel=1)
        tracker.log({"train/loss": 2.5}, 1)
        library.log.side_effect = lambda *_, **__: warnings.warn(full, stacklevel=1)
        for act in (lambda: tracker.log({"train/loss": 2.25}, 2), lambda: tracker.finish("finished")):
            with pytest.raises(RuntimeError, match=f"^{full}$"):
                act()
        tracker.start(TrackedRun("a", tmp_path, SETTINGS, True, 2))
    assert [begun.kwargs["resume"] for begun in library.init.call_args_list] == ["never", "allow"]
    assert library.log.call_args_list == [
        call({"train/loss": 2.5}, step=1),
        call({"train/loss": 2.25}, step=2),
    ]
    assert library.finish.call_count == 1


def test_mlflow_is_called_as_its_version_3_takes_it(tmp_path, monkeypatch):
    library, entities = MagicMock(), MagicMock()
    entities.Metric = entities.Param = lambda *given: given
    monkeypatch.setitem(sys.modules, "mlflow", library)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    client = library.MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.create_experiment.return_value = "7"
    client.create_run.return_value.info.run_id = "r1"
    settings = {f"option{number}": number for number in range(150)} | {"data": {"files": "x" * 600}}
    tracker = tracker_of("mlflow")
    tracker.start(TrackedRun("a", tmp_path, settings, False, 0))
    given = [(f"option{number}", str(number)) for number in range(150)] + [("data.files", "x" * 500)]
    assert client.mock_calls == [
        call.get_experiment_by_name("shardrt"),
        call.create_experiment("shardrt"),
        call.create_run("7", run_name="a"),
        call.log_batch("r1", params=given[:100]),
        call.log_batch("r1", params=given[100:]),
    ]
    client.reset_mock()
    tracker.start(TrackedRun("a", tmp_path, settings, True, 2))
    tracker.log({"train/loss": 2.5}, 3)
    tracker.finish("stopped")
    resumed, logged, finished = client.mock_calls
    ((name, value, _, step),) = logged.kwargs["metrics"]
    assert (resumed, logged.args) == (call.update_run("r1", status="RUNNING"), ("r1",))
    assert (name, value, step) == ("train/loss", 2.5, 3)
    assert finished == call.set_terminated("r1", "KILLED")


def chunks(path):
    """The records of a .wandb file: LevelDB's log format, in blocks of 32 KiB, behind seven bytes.

    The library reads such files in its service alone.
    """
    content, place, record = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while place + 7 <= len(content):
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        left = -place % 32768
        if 0 < left < 7 or not kind:  # the rest of a block is empty
            place += left or 32768
            continue
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def history(path):
    """The values that a .wandb file holds, by the library's own protocol."""
    from wandb.proto import wandb_internal_pb2

    for data in chunks(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
