"""`shardrt run`: which ends are followed by another start, with which command, and what is logged.

The job is a script that takes mpirun's options, saves as it is told, and ends with one code after the other.
tests/hosts/test_restarts.py has real ones.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from shardrt.__main__ import main
from shardrt.faults import reach
from shardrt.tools import run as tools
from shardrt.tools.launched import Command
from shardrt.tools.run import AGAIN
from shardrt.untrusted import Refused
from tests.ranks import BACKSTOP

JOB = """
import json, sys
from pathlib import Path
plan = Path("plan.json")
ends = json.loads(plan.read_text())
with open("starts", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
code, step = ends.pop(0)
plan.write_text(json.dumps(ends))
if step:
    saved = Path(f"runs/a/checkpoints/step-{step:08}")
    saved.mkdir(parents=True)
    (saved / "manifest.json").touch()
sys.exit(code)
"""


@pytest.fixture
def start(tmp_path, monkeypatch, capfd):
    """Run a job that ends so; gives the exit code, arguments of all starts, what was logged, and said."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)

    def run(ends, *options, arguments=("--name", "a", "--resume", "auto")):
        (tmp_path / "plan.json").write_text(json.dumps(ends))
        options = ["--back-off", "0.01", "--log", "log.jsonl", *options]
        code = main(["run", *options, "--", sys.executable, "job.py", *arguments])
        read = [(tmp_path / name).read_text().splitlines() for name in ("starts", "log.jsonl")]
        starts, log = ([json.loads(line) for line in lines] for lines in read)
        return code, starts, log, capfd.readouterr().err

    return run


@pytest.fixture
def stops():
    """Signals that find nobody else end no test."""
    before = {n: signal.signal(n, lambda *_: None) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_job_is_started_again_until_it_is_done(start):
    code, starts, log, said = start([(124, 4), (9, 0), (1, 6), (0, 8)])
    assert code == 0
    assert starts == [["--name", "a", "--resume", "auto"]] * 4
    assert [(row["what"], row["start"]) for row in log] == [
        (w, i) for i in range(4) for w in ("start", "end")
    ]
    ends = [(row["code"], row["step"]) for row in log if row["what"] == "end"]
    assert ends == [(124, 4), (9, 4), (1, 6), (0, 8)]
    assert "start 0: ended with exit code 124; step 4 is saved; again in 0.01 s" in said
    assert "start 1: ended with exit code 9; step 4 is saved; again in 0.02 s" in said  # nothing was saved
    assert "start 2: ended with exit code 1; step 6 is saved; again in 0.01 s" in said


@pytest.mark.parametrize("code", AGAIN)
def test_what_would_come_again_is_not_started_again(start, code):
    found, starts, log, said = start([(code, 4)])
    assert (found, len(starts)) == (code, 1)
    assert f"ended with exit code {code}; step 4 is saved; it is not started again: {AGAIN[code]}" in said


def test_a_job_that_saves_nothing_is_started_three_times(start):
    code, starts, _, said = start([(1, 0)] * 3)
    assert (code, len(starts)) == (1, 3)
    assert "3 starts in a row have saved nothing" in said


def test_a_job_waits_for_the_lock_of_one_that_is_gone_with_as_many_ranks(start, monkeypatch):
    """A file server may keep it for longer than three starts take."""
    without(monkeypatch, *"ddddd")
    code, starts, log, said = start([(69, 0)] * 4 + [(0, 2)], arguments=LISTED)
    assert code == 0
    assert [words[1] for words in starts] == ["6"] * 5
    assert "start 3: ended with exit code 69; step 0 is saved; again in 0.08 s" in said


def test_a_job_does_not_wait_for_a_lock_for_ever(start):
    code, starts, _, said = start([(69, 0)] * 6, "--restarts", "5")
    assert (code, len(starts)) == (69, 6)
    assert "of --restarts 5 none is left" in said


def test_restarts_are_counted_from_the_newest_checkpoint(start):
    code, starts, _, said = start([(9, 2), (9, 4), (9, 0)], "--restarts", "1")
    assert (code, len(starts)) == (9, 3)
    assert "start 2: ended with exit code 9; step 4 is saved; it is not started again" in said
    assert "of --restarts 1 none is left" in said


def test_a_checkpoint_without_a_manifest_is_none(start, tmp_path):
    """As one in a bucket is while it is written."""
    (tmp_path / "runs/a/checkpoints/step-00000009").mkdir(parents=True)
    _, _, log, _ = start([(9, 4), (0, 6)])
    assert [row["step"] for row in log if row["what"] == "end"] == [4, 6]


def test_a_log_that_can_not_be_begun_is_refused_and_one_that_is_full_ends_nothing(start, capfd):
    with pytest.raises(FileNotFoundError):  # nothing was started
        start([], "--log", "nowhere/log.jsonl")
    assert "error: nowhere/log.jsonl: No such file or directory" in capfd.readouterr().err
    with pytest.raises(FileNotFoundError):  # the other log
        start([(9, 2), (0, 4)], "--log", "/dev/full")
    said = capfd.readouterr().err
    assert "start 1: done" in said
    assert said.count("the log lacks this line: /dev/full: No space left on device") == 4


def started(tmp_path, *words, job=("--name", "a", "--resume", "auto"), **how):
    """How `shardrt run` of the job ends as a process of its own."""
    command = [sys.executable, "-m", "shardrt", "run", *words, "--", sys.executable, "job.py", *job]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    return subprocess.run(command, cwd=tmp_path, env=environment, timeout=BACKSTOP, **how)


def test_a_job_goes_on_where_nobody_reads_what_is_said(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "plan.json").write_text("[[9, 2], [9, 4], [65, 0]]")
    read, write = os.pipe()
    os.close(read)
    done = started(tmp_path, "--restarts", "1", "--back-off", "0.01", stderr=write)
    os.close(write)
    assert (done.returncode, (tmp_path / "plan.json").read_text()) == (65, "[]")


UNTIL_SILENT = """
import time
end = time.monotonic() + 100
while '"silent"' not in Path("log.jsonl").read_text() and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.1)  # in which it would be told of once more
"""


def test_a_job_without_a_sign_of_life_is_told_of_once(start, tmp_path, monkeypatch):
    for name in ("_LOOK", "_SIGNS", "_QUIET"):
        monkeypatch.setattr(tools, name, 0.01)
    (tmp_path / "job.py").write_text(JOB.replace("sys.exit", UNTIL_SILENT + "sys.exit"))
    code, _, log, said = start([(0, 2)])
    assert (code, [row["what"] for row in log]) == (0, ["start", "silent", "end"])
    assert "no rank has given a sign of life in runs/a/flight for 0 s; it is not ended" in said


def test_a_launcher_that_waits_for_a_host_that_is_gone_is_ended_and_the_host_is_named(
    start, tmp_path, monkeypatch
):
    without(monkeypatch, "", "d", "d")
    for name in ("_LOOK", "_SIGNS", "_SILENCE"):
        monkeypatch.setattr(tools, name, 0.01)
    (tmp_path / "job.py").write_text("import time; time.sleep(200)")
    (tmp_path / "starts").touch()
    code, _, log, said = start([], "--restarts", "0", arguments=LISTED)
    assert (code, [row["what"] for row in log]) == (124, ["start", "silent", "end"])
    assert "no rank has given a sign of life in runs/a/flight for 0 s, and d does not answer" in said


@pytest.mark.parametrize(
    "words", ["--restarts -1", "--min-ranks 0", "--back-off -1", "--back-off nan", "--restarts many"]
)
def test_numbers_that_are_none_are_refused(words, capfd):
    with pytest.raises(SystemExit) as ended:
        main(["run", *words.split(), "--", "true"])
    assert ended.value.code == 2 and f"argument {words.split()[0]}: " in capfd.readouterr().err


STOPPED = """
import os, signal, sys, time
from pathlib import Path
with open("starts", "a") as file:
    file.write("[]\\n")
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, _: got.append(n))
number, code, group = map(int, sys.argv[1:4])
os.kill(-os.getpgid(os.getppid()) if group else os.getppid(), number)
end = time.monotonic() + 100
while not got and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.2)
sys.exit(code if got == [number] else 99)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 2), (signal.SIGTERM, 143), (signal.SIGTERM, 75)]
)
def test_what_was_asked_to_stop_is_not_started_again(start, stops, tmp_path, number, code):
    (tmp_path / "job.py").write_text(STOPPED)
    words = (str(int(number)), str(code), "0", "--name", "a", "--resume", "auto")
    found, starts, _, said = start([], arguments=words)
    assert (found, len(starts)) == (75 if code == 75 else 128 + number, 1)
    assert f"step 0 is saved; it is not started again: {number.name} asked it to stop" in said


def test_a_terminal_interrupts_a_job_once(tmp_path):
    (tmp_path / "job.py").write_text(STOPPED)
    done = started(
        tmp_path,
        job=("2", "1", "1", "--name", "a", "--resume", "auto"),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # of a terminal, not of nohup
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130, done.stderr
    assert "not started again: SIGINT asked it to stop" in done.stderr


def test_a_stop_ends_the_wait_for_the_next_start(start, stops, tmp_path):
    (tmp_path / "later.sh").write_text("sleep 0.3; kill -TERM $1")
    later = """
import os, subprocess
subprocess.Popen(["sh", "later.sh", str(os.getppid())], start_new_session=True)
"""
    (tmp_path / "job.py").write_text(JOB.replace("sys.exit", later + "sys.exit"))
    began = time.monotonic()
    code, starts, log, said = start([(9, 0), (0, 0)], "--back-off", "100")
    assert (code, len(starts)) == (143, 1)
    assert time.monotonic() - began < 100
    assert "start 1: is not started: SIGTERM asked it to stop" in said
    assert log[-1]["code"] == 143


LISTED = ("-n", "8", "-hosts", "a:2,b:2,c:2,d:2", "python", "--name", "a", "--resume", "auto")


def without(monkeypatch, *lost):
    """Of each time that hosts are asked, which do not answer; none after the last."""
    turns = [set(hosts) for hosts in lost]
    monkeypatch.setattr(reach, "addresses", lambda hosts: dict.fromkeys(hosts, "127.0.0.1"))
    monkeypatch.setattr(reach, "answering", lambda known, _: set(known) - (turns.pop(0) if turns else set()))


def test_a_job_that_fewer_ranks_can_not_share_has_fewer_yet(start, monkeypatch):
    without(monkeypatch, "", "d", "d", "d")
    code, starts, log, said = start([(124, 2), (2, 0), (9, 4), (0, 6)], arguments=LISTED)
    assert code == 0
    assert [(words[1], words[3]) for words in starts] == [
        ("8", "a:2,b:2,c:2,d:2"),
        ("6", "a:2,b:2,c:2"),
        ("4", "a:2,b:2,c:2"),
        ("4", "a:2,b:2,c:2"),  # 6 are not tried again
    ]
    assert "start 1: ended with exit code 2; step 2 is saved; is tried with fewer ranks than 6" in said
    assert [row["ranks"] for row in log if row["what"] == "start"] == [8, 6, 4, 4]


def test_a_host_whose_name_is_not_known_is_said_to_be(start, monkeypatch):
    without(monkeypatch)
    monkeypatch.setattr(reach, "addresses", lambda hosts: dict.fromkeys("abd", "127.0.0.1"))
    _, starts, _, said = start([(0, 2)], arguments=LISTED)
    assert starts[0][1] == "6"
    assert "start 0: starts without c (its name is not known here): " in said


def test_the_file_of_the_hosts_that_are_left_is_removed(start, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    without(monkeypatch, "b")
    (tmp_path / "hosts").write_text("a:2\nb:2\n")
    words = ("-n", "4", "-f", "hosts", "python", "--name", "a", "--resume", "auto")
    _, starts, _, _ = start([(0, 2)], arguments=words)
    assert starts[0][1] == "2" and starts[0][3].startswith(str(tmp_path / "shardrt-hosts-"))
    assert not list(tmp_path.glob("shardrt-hosts-*"))


def test_a_job_waits_for_hosts_that_it_needs(start, monkeypatch):
    without(monkeypatch, "", "d", "d")
    code, starts, log, said = start([(124, 2), (0, 4)], "--min-ranks", "8", arguments=LISTED)
    assert (code, len(starts)) == (0, 2)
    assert [row["what"] for row in log] == ["start", "end", "wait", "wait", "start", "end"]
    assert "start 1: can start 6 ranks without d, of at least 8; again in 0.02 s" in said
    assert "start 1: can start 6 ranks without d, of at least 8; again in 0.04 s" in said


def test_hosts_are_not_waited_for_for_ever(start, monkeypatch):
    without(monkeypatch, "", *"dddd")
    words = ("--min-ranks", "7", "--restarts", "3")
    code, starts, log, said = start([(124, 2)], *words, arguments=LISTED)
    assert (code, len(starts)) == (124, 1)
    assert [row["what"] for row in log] == ["start", "end", "wait", "wait", "wait"]
    assert "it is not started again: of --restarts 3 none is left" in said


def test_a_report_is_new_where_its_time_is_another(start, tmp_path, monkeypatch):
    """By a file server whose clock is an hour behind; the old one says nothing, be it of the future."""
    flight = tmp_path / "runs" / "a" / "flight"
    flight.mkdir(parents=True)
    (flight / "hang.txt").touch()
    for name in ("_LOOK", "_SIGNS", "_ENDING"):
        monkeypatch.setattr(tools, name, 0.01)
    ahead, behind = (time.time() + 3600,) * 2, (time.time() - 3600,) * 2
    os.utime(flight / "hang.txt", ahead)
    (tmp_path / "job.py").write_text(JOB.replace("sys.exit", "import time; time.sleep(0.3); sys.exit"))
    assert start([(7, 0)], "--restarts", "0")[0] == 7
    writes = f"import os, time; os.utime('runs/a/flight/hang.txt', {behind}); time.sleep(200); sys.exit"
    (tmp_path / "job.py").write_text(JOB.replace("sys.exit", writes))
    assert start([(7, 0)], "--restarts", "0")[0] == 124


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ("", "--name a", "the command needs --name NAME and --resume auto"),
        ("", "--resume auto", "the command needs --name NAME and --resume auto"),
        ("", "--name a --resume x", "the command needs --name NAME and --resume auto"),
        ("--min-ranks 9", " ".join(LISTED), "the command starts 8 ranks, fewer than --min-ranks 9"),
    ],
)
def test_a_command_that_would_begin_anew_or_starts_too_few_ranks_is_refused(
    start, capfd, options, arguments, message
):
    with pytest.raises(FileNotFoundError):  # nothing was started
        start([], *options.split(), arguments=arguments.split())
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "hosts", "expected"),
    [
        ("mpirun -n 4 -hosts a:2,b:2 python x", {"a": 2, "b": 2}, "mpirun -n 2 -hosts a:2 python x"),
        ("mpirun --host a:2,b:2 -n 3 python x", {"a": 2, "b": 2}, "mpirun --host a:2 -n 2 python x"),
        ("mpirun -n 1 -hosts a,b python x -n 9", {"a": 1, "b": 1}, "mpirun -n 1 -hosts a python x -n 9"),
        ("mpirun -hosts a,b -n 16 python x", {"a": 8, "b": 8}, "mpirun -hosts a -n 8 python x"),
        ("mpirun -hosts a,b,c -n 8 python x", dict(a=3, b=3, c=3), "mpirun -hosts a,c -n 6 python x"),
        (
            "mpirun -hosts a,b -ppn 8 -n 16 python x",
            {"a": 8, "b": 8},
            "mpirun -hosts a -ppn 8 -n 8 python x",
        ),
        (
            "mpirun --map-by ppr:4:node -H a:9,b:9 -n 8 python x",
            {"a": 4, "b": 4},
            "mpirun --map-by ppr:4:node -H a:9 -n 4 python x",
        ),
        ("mpirun --host a,a,b,b -np 4 python x", {"a": 2, "b": 2}, "mpirun --host a,a -np 2 python x"),
        ("mpirun -hosts=a,b -n=4 python x", {"a": 2, "b": 2}, "mpirun -hosts=a -n=2 python x"),
        ("mpirun -n 4 -hosts me@a:2,b:2 python x", {"a": 2, "b": 2}, "mpirun -n 2 -hosts me@a:2 python x"),
    ],
)
def test_a_command_without_a_host(tmp_path, words, hosts, expected):
    command = Command(words.split())
    assert command.hosts == hosts
    assert command.on([], command.ranks, tmp_path / "file") == words.split()
    assert " ".join(command.on(["b"], command.most(["b"]), tmp_path / "file")) == expected


@pytest.mark.parametrize("words", ["mpirun -n 16 python x -hosts a,b", "srun -c 4 -n 16 -N 2 python x"])
def test_a_command_that_names_no_hosts(words, tmp_path):
    command = Command(words.split())
    assert (command.hosts, command.ranks, command.most([])) == ({}, 16, 16)
    assert command.on([], 16, tmp_path / "file") == words.split()


@pytest.mark.parametrize("option", ["-f {}", "--hostfile={}"])
def test_a_host_file_without_a_host(tmp_path, option):
    file, left = tmp_path / "hosts", tmp_path / "left"
    file.write_text("# ours\na:4\nb slots=2 max_slots=9\nc\nc\n")
    command = Command(["mpirun", "-n", "8", *option.format(file).split(), "python", "x"])
    assert command.hosts == {"a": 4, "b": 2, "c": 2}
    words = command.on(["a"], command.most(["a"]), left)
    assert words == ["mpirun", "-n", "4", *option.format(left).split(), "python", "x"]
    assert left.read_text() == "b slots=2 max_slots=9\nc\nc\n"


def test_fewer_ranks_divide_the_command_s():
    command = Command("mpirun -hosts a,b,c,d -n 8 python x".split())
    found = [command.most("d", refused) for refused in ((), (6,), (6, 4), (6, 4, 2), (6, 4, 2, 1))]
    assert found == [6, 4, 2, 1, 0]
    assert command.most("", (6, 4)) == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no command"),
        ("mpirun -n four python x", "expected a number of ranks, got 'four'"),
        ("mpirun -n 0 python x", "expected a number of ranks, got '0'"),
        ("mpirun -hosts a,b python x", "needs -n"),
        ("mpirun -hosts a,b -n 4 -ppn some python x", "expected a number of ranks per host, got 'some'"),
        ("mpirun -hosts node[1-4] -n 4 python x", "is not a host"),
        ("mpirun --host +n1 -n 4 python x", "is not a host"),
        ("mpirun -hosts a,b -f hosts -n 4 python x", "one list or file of hosts"),
        ("mpirun --host a:2 --host b:2 -n 4 python x", "one list or file of hosts"),
        ("mpirun --hostfile x --hostfile y -n 4 python x", "one list or file of hosts"),
        ("mpirun -wdir there -n 4 python x", "start it in the folder there, which has runs/NAME"),
        ("srun --chdir=there -n 4 python x", "start it in the folder there, which has runs/NAME"),
        ("mpirun -hosts fe80::1,fe80::2 -n 4 python x", "'fe80::1' is not a host"),
        ("mpirun -hosts a,b -n 2 python x : -n 2 python y", "one program"),
        ("mpirun -hosts a,b -rankmap 0,1 -n 2 python x", "no map of ranks"),
        ("mpirun -n 4 -hosts", "-hosts has no value"),
    ],
)
def test_commands_that_can_not_be_read_are_refused(words, message):
    with pytest.raises(Refused, match=message):
        Command(words.split())
