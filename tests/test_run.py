"""`shardrt run`: which ends are followed by another start, with which command, and what is logged.

The job is a script that takes mpirun's options, saves as it is told, and ends with one code after the other.
tests/hosts/test_run.py has real ones.
"""

import json
import sys

import pytest

from shardrt.__main__ import main
from shardrt.tools.launched import Command
from shardrt.tools.run import AGAIN
from shardrt.untrusted import Refused

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
    Path(f"runs/a/checkpoints/step-{step:08}").mkdir(parents=True)
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


def test_a_job_is_started_again_until_it_is_done(start):
    code, starts, log, said = start([(124, 4), (9, 0), (1, 6), (0, 8)])
    assert code == 0
    assert starts == [["--name", "a", "--resume", "auto"]] * 4
    assert [(row["what"], row["start"]) for row in log] == [
        (w, i) for i in range(4) for w in ("start", "end")
    ]
    assert [(row["code"], row["step"]) for row in log if row["what"] == "end"] == [
        (124, 4),
        (9, 4),
        (1, 6),
        (0, 8),
    ]
    assert "start 0: ended with exit code 124; step 4 is saved; again in 0.01 s" in said
    assert "start 1: ended with exit code 9; step 4 is saved; again in 0.02 s" in said  # nothing was saved
    assert "start 2: ended with exit code 1; step 6 is saved; again in 0.01 s" in said


@pytest.mark.parametrize("code", AGAIN)
def test_what_would_come_again_is_not_started_again(start, code):
    found, starts, log, said = start([(code, 4)])
    assert (found, len(starts)) == (code, 1)
    assert f"ended with exit code {code}, and is not started again: {AGAIN[code]}" in said


def test_a_job_that_saves_nothing_is_started_three_times(start):
    code, starts, _, said = start([(1, 0)] * 3)
    assert (code, len(starts)) == (1, 3)
    assert "3 starts in a row have saved nothing" in said


def test_restarts_have_a_limit(start):
    code, starts, _, said = start([(9, 2), (9, 4)], "--restarts", "1")
    assert (code, len(starts)) == (9, 2)
    assert "it has been restarted 1 times" in said


@pytest.mark.parametrize("arguments", ["--name a", "--resume auto", "--name a --resume x"])
def test_a_command_that_would_begin_anew_is_refused(start, capfd, arguments):
    with pytest.raises(FileNotFoundError):  # nothing was started
        start([], arguments=arguments.split())
    assert "the command needs --name NAME and --resume auto" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "hosts", "expected"),
    [
        ("mpirun -n 4 -hosts a:2,b:2 python x", {"a": 2, "b": 2}, "mpirun -n 2 -hosts a:2 python x"),
        ("mpirun --host a:2,b:2 -n 3 python x", {"a": 2, "b": 2}, "mpirun --host a:2 -n 2 python x"),
        ("mpirun -n 1 -hosts a,b python x -n 9", {"a": 1, "b": 1}, "mpirun -n 1 -hosts a python x -n 9"),
        ("mpirun -n 2 python x -hosts a,b", {}, "mpirun -n 2 python x -hosts a,b"),
    ],
)
def test_a_command_without_a_host(words, hosts, expected):
    command = Command(words.split())
    assert command.hosts == hosts
    assert command.without([]) == (words.split(), command.without([])[1])
    assert " ".join(command.without(["b"])[0]) == expected


def test_a_host_file_without_a_host(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\na:4\nb slots=2\n")
    command = Command(["mpirun", "-n", "6", "-f", str(file), "python", "x"])
    assert command.hosts == {"a": 4, "b": 2}
    words, ranks = command.without(["a"])
    assert ranks == 2 and words[:4] == ["mpirun", "-n", "2", "-f"]
    with open(words[4]) as left:
        assert left.read() == "b slots=2\n"


def test_commands_that_are_none_are_refused():
    with pytest.raises(Refused, match="no command"):
        Command([])
    with pytest.raises(Refused, match="'four' is no number of ranks"):
        Command("mpirun -n four python x".split())
