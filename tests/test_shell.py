"""The command `shardrt`: its page, its commands, and `shardrt train` as another name of `models.train`."""

import re
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest

from shardrt import __main__ as shell
from shardrt.simulate.script import NoScript, expanded, record
from shardrt.tools.launched import Command
from tests.lab import jobs
from tests.ranks import python

KNOWN = [command for commands in shell.COMMANDS.values() for command in commands]
NAMES = [command.name for command in KNOWN]


def test_the_page_has_each_command_once_on_one_line_of_a_terminal():
    lines = shell.page().splitlines()
    assert max(map(len, lines)) <= 100 and len(lines) <= 40
    listed = [line.split()[0] for line in lines if re.match(r"  [a-z-]+ {2,}\S", line)]
    assert listed == NAMES and len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_is_the_page(words, capsys):
    assert shell.main(words) == 0
    assert capsys.readouterr().out == shell.page() + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_help_of_its_own(name, capsys):
    with suppress(SystemExit):
        assert shell.main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: shardrt {name} ")


@pytest.mark.parametrize("command", KNOWN, ids=lambda command: command.name)
def test_the_module_of_a_command_adds_it_or_takes_all_its_words(command):
    module = import_module(command.module)
    if not hasattr(module, "main"):
        parser = shell.parser_of(command)
        assert f"{{{command.name}}}" in parser.format_usage()


def test_a_command_that_is_not_there_is_told_with_the_nearest(capsys):
    assert shell.main(["trian", "--steps", "1"]) == 2
    assert capsys.readouterr().err == "error: shardrt has no command 'trian'; perhaps you meant train\n"
    assert shell.main(["x\x1b[1m"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_help_loads_no_command_and_a_command_loads_no_other():
    code = "import sys; from shardrt.__main__ import main; main({}); print(*sys.modules)"
    helped = python("-c", code.format(["--help"])).stdout.split()
    assert not {command.module for command in KNOWN} & set(helped)
    assert not {"shardrt.train", "shardrt.tools", "shardrt.models", "numba", "matplotlib"} & set(helped)
    done = python("-c", code.format(["watch", "--once", "none"]))
    assert "shardrt.tools.watch" in done.stdout.split()
    assert not {"shardrt.tools.plan", "shardrt.models", "shardrt.checkpoint.command"} & set(
        done.stdout.split()
    )


def test_damaged_input_is_one_line_and_code_65(tmp_path, capsys):
    assert shell.main(["watch", "--once", str(tmp_path)]) == 65
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and str(tmp_path) in line


# --- shardrt train ------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(jobs.furnish(tmp_path))
    return tmp_path


def test_train_takes_the_options_of_models_train_and_leaves_the_same_run(here):
    assert shell.main(["train", *jobs.arguments("--name", "a")]) == 0
    jobs.train.main(jobs.arguments("--name", "b"))
    assert jobs.curves(here, "a") == jobs.curves(here, "b")


@pytest.mark.parametrize(
    ("code", "words"),
    [(2, ["--stepps", "3"]), (65, ["--data", "none.txt"]), (2, ["--config", "unknown.toml"])],
)
def test_train_refuses_as_models_train_does(here, capfd, code, words):
    told = [
        jobs.refused(capfd, code, call, [*first, *jobs.arguments(*words)])
        for call, first in ((shell.main, ["train"]), (jobs.train.main, []))
    ]
    assert told[0] == told[1]


def test_train_s_unexpected_errors_keep_their_traceback(monkeypatch):
    def broken(arguments, program):
        raise OSError("not the user's")

    monkeypatch.setattr(jobs.train, "main", broken)
    with pytest.raises(OSError, match="not the user's"):
        shell.main(["train"])


@pytest.mark.mpi
def test_train_runs_under_mpirun_outside_of_the_checkout(here):
    """The program in the environment's folder, as a user starts it."""
    program = Path(sys.executable).with_name("shardrt")
    if not program.exists():
        pytest.skip("no command `shardrt` beside this Python")
    words = ["train", *jobs.arguments("--name", "two", "--sample.length", "0")]
    done = jobs.mpirun(2, [str(program), *words], cwd=here, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout and (here / "runs" / "two" / "checkpoint").is_dir()
    done = jobs.mpirun(2, [str(program), *words], cwd=here, PYTHONPATH="")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1  # the run is there already


SMALL = ["--model.n-layer", "1", "--model.n-head", "2", "--model.n-embd", "16", "--model.block-size", "16"]


def test_a_script_that_is_recorded_may_be_train():
    (one,), (other,) = (record([*words, *SMALL], 2)[:1] for words in (["train"], ["models.train"]))
    assert len(one.items) == len(other.items) > 0
    assert expanded(["-m", "train"]) == ["-m", "train"]  # a module of the user's
    with pytest.raises(NoScript, match="train: no such script or module"):
        record(["-m", "train"])


def test_the_commands_that_predict_take_train(here, capsys):
    words = ["--", "train", *SMALL, "--batch-size", "2"]
    assert shell.main(["simulate", "--ranks", "2", *words]) == 0
    assert "rank 0 of 2" in capsys.readouterr().out
    assert shell.main(["races", *words]) == 0
    capsys.readouterr()
    limits = ["--ranks", "2", "--memory", "1", "--only", "--vary", "memory.recompute=none,full"]
    assert shell.main(["plan", *limits, *words]) == 0
    assert "-- train " in capsys.readouterr().out


def test_run_reads_the_launcher_of_shardrt_train():
    words = "mpirun -hosts a,b -n 4 shardrt train --name NAME --resume auto -n 3".split()
    command = Command(words)
    assert (command.hosts, command.ranks) == ({"a": 2, "b": 2}, 4)
    assert command.on(["b"], 2, Path("hosts")) == [*words[:2], "a", "-n", "2", *words[5:]]
