"""`models.train` and `models.generate` as a user starts them, in a folder that is not the checkout."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from models import generate, train
from models.gpt import GPT
from models.language import GPTRecipe as Config
from shardrt.checkpoint import save
from shardrt.kernels import onednn
from shardrt.train import config as settings
from shardrt.train.errors import DATA, USAGE
from shardrt.untrusted import printable
from tests.lab import jobs
from tests.lab.jobs import TINY, arguments, contents, furnish, records, start

STEP_LINE = re.compile(
    r"step \d/3  loss +\d+\.\d{4}  norm +\d+\.\d{3}  +\d+\.\dk? tok/s  mfu +(\d+%|--)  left +(\d+:\d\d|--)"
)

# The message on two ranks, the exit code, the arguments.
BAD_INPUT = {
    "data: none.txt does not exist": (DATA, "--data", "none.txt"),
    "data: empty.txt is empty": (DATA, "--data", "empty.txt"),
    "runs/taken exists already": (USAGE, "--name", "taken"),
    "batch_size must divide equally among 2 ranks, got 3": (USAGE, "--batch-size", "3"),
    "fsdp.copies must divide the 2 ranks, got 3": (
        USAGE,
        "--fsdp.strategy",
        "HYBRID_SHARD",
        "--fsdp.copies",
        "3",
    ),
    "parallel.cp: with 2 ranks a sample must have a multiple of 4 tokens, got 10": (
        *(USAGE, "--parallel.cp", "2", "--text.window", "10"),
    ),
    "--stepps": (USAGE, "--stepps", "3"),
    "none.toml: No such file": (USAGE, "--config", "none.toml"),
    "unknown.toml: unknown key 'stepps'": (USAGE, "--config", "unknown.toml"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder in which two and alone have been trained: on 2 ranks, and without mpirun."""
    folder = furnish(tmp_path_factory.mktemp("trained"))
    outputs = {
        "two": start("models.train", *arguments("--name", "two"), ranks=2, cwd=folder),
        "alone": start("models.train", *arguments("--name", "alone"), cwd=folder),
    }
    for name, done in outputs.items():
        assert done.returncode == 0, f"{name}: {done.stderr}"
    return folder, outputs


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["two", "alone"])
def test_a_run_leaves_its_settings_metrics_picture_and_weights(runs, name):
    directory = runs[0] / "runs" / name
    assert sorted(str(p.relative_to(directory)) for p in directory.rglob("*")) == [
        "checkpoint",
        "checkpoint/model.safetensors",
        "config.toml",
        "flight",
        *(f"flight/rank-{rank}.bin" for rank in range(2 if name == "two" else 1)),
        "lock",
        "loss.png",
        "metrics.jsonl",
    ]
    assert (directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    config = settings.load(Config, directory / "config.toml")
    assert config == replace(TINY, name=name, data=config.data)
    assert [record["step"] for record in records(runs[0], name, "step")] == [1, 2, 3]
    assert [record["step"] for record in records(runs[0], name, "evaluation")] == [2, 3]
    assert records(runs[0], name, "run")[0]["ranks"] == (2 if name == "two" else 1)


@pytest.mark.mpi
def test_losses_norms_and_weights_are_those_of_one_rank(runs):
    assert "wte.weight" in jobs.weights(runs[0], "alone")
    jobs.assert_alike(runs[0], "two", "alone", 1e-5, atol=2e-5)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["two", "alone"])
def test_progress_lines_are_whole_and_there_once(runs, name):
    output = runs[1][name]
    message = [line for line in output.stdout.splitlines() if line.startswith("step ")]
    assert [bool(STEP_LINE.fullmatch(line)) for line in message] == [True, True, False, True, False], message
    assert output.stdout.count("held-out text: ") == output.stdout.count("--- sample ---") == 1
    assert len(re.findall(r"\d bits per byte; gzip -9 needs \d", output.stdout)) == 1
    assert output.stderr == ""


@pytest.mark.mpi
def test_generate_writes_the_sample_again_from_the_checkpoint(runs, monkeypatch, capfd):
    folder, _ = runs
    (end,) = records(folder, "alone", "end")
    sample = printable(end["sample"], lines=True) + "\n"
    done = start("models.generate", "runs/alone", "--length", "4", ranks=2, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, sample, "")
    monkeypatch.chdir(folder)
    generate.main(["runs/alone", "--length", "4"])
    assert capfd.readouterr() == (sample, "")


@pytest.mark.mpi
def test_a_sample_after_the_first_evaluation_changes_no_weight(runs):
    folder, _ = runs
    done = start("models.train", *arguments("--name", "early", "--sample.first", "2"), ranks=2, cwd=folder)
    assert done.returncode == 0, done.stderr
    _, first, last = done.stdout.split("--- sample ---\n")
    assert "held-out" in first and first.split("\n---")[0] in last
    early, two = jobs.weights(folder, "early"), jobs.weights(folder, "two")
    assert all(np.array_equal(early[name], two[name]) for name in two)


@pytest.mark.parametrize("instructions", [True, False])
def test_a_run_says_where_its_matmuls_are_not_of_the_type_that_was_asked_for(
    folder, monkeypatch, capfd, instructions
):
    monkeypatch.setattr(onednn, "computes_bf16", lambda: instructions)
    train.main([*arguments("--steps", "1"), "--precision.param", "bfloat16"])
    said = "bfloat16: no matmuls of it on this device" in " ".join(capfd.readouterr().out.split())
    assert said is not instructions


# One job of two ranks runs a program several times; each rank tells how each time ended, and what it printed.
MANY_TIMES = """
import contextlib, io, json, os, sys
from models import generate, train

programs = {"train": train.main, "generate": generate.main}
for what, (program, args) in json.loads(sys.argv[1]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = programs[program](args)
        except SystemExit as stop:
            code = stop.code
    os.write(1, (json.dumps([what, code, out.getvalue(), err.getvalue()]) + "\\n").encode())
"""


@pytest.fixture(scope="module")
def reported_by_two(tmp_path_factory):
    """what -> (exit code, output and errors of two ranks together), of bad input and of --help."""
    cases = {what: ("train", arguments(*args)) for what, (_, *args) in BAD_INPUT.items()}
    cases |= {f"help of {program}": (program, ["--help"]) for program in ("train", "generate")}
    folder = furnish(tmp_path_factory.mktemp("refused"))
    (folder / "many.py").write_text(MANY_TIMES)
    before = contents(folder)
    done = start("many", json.dumps(cases), ranks=2, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert contents(folder) == before
    message = {what: (set(), [], []) for what in cases}
    for line in done.stdout.splitlines():
        what, code, out, err = json.loads(line)
        message[what][0].add(code)
        message[what][1].append(out)
        message[what][2].append(err)
    assert {len(out) for _, out, _ in message.values()} == {2}
    return {what: (codes, "".join(out), "".join(err)) for what, (codes, out, err) in message.items()}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("program", "option"), [("train", "--optimizer.lr FLOAT"), ("generate", "--top-k INT")]
)
def test_help_is_printed_once(reported_by_two, program, option):
    codes, out, err = reported_by_two[f"help of {program}"]
    assert (codes <= {0, None}, err) == (True, "")
    assert out.count(option) == 1


@pytest.mark.mpi
@pytest.mark.parametrize("message", BAD_INPUT)
def test_bad_input_gets_one_line_from_two_ranks(reported_by_two, message):
    codes, out, err = reported_by_two[message]
    (line,) = err.splitlines()
    assert line.startswith("error: ") and message in line
    assert (codes, out) == ({BAD_INPUT[message][0]}, "")


@pytest.mark.mpi
@pytest.mark.parametrize("message", ["--stepps", "batch_size must divide equally among 2 ranks, got 3"])
def test_bad_input_ends_a_job_with_one_line_and_the_code(tmp_path, message):
    """Before MPI has started, and after."""
    code, *args = BAD_INPUT[message]
    before = contents(furnish(tmp_path))
    done = start("models.train", *arguments(*args), ranks=2, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert (done.returncode, done.stdout, contents(tmp_path)) == (code, "", before)


@pytest.mark.parametrize("message", [message for message in BAD_INPUT if "2 ranks" not in message])
def test_bad_input_gets_one_line_from_one_rank(folder, message, capfd):
    code, *args = BAD_INPUT[message]
    before = contents(folder)
    assert message in jobs.refused(capfd, code, train.main, arguments(*args))
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("module", "args"), [("models.train", arguments()), ("models.generate", ["runs/untrained"])]
)
def test_a_world_size_without_mpirun_is_reported(tmp_path, module, args):
    before = contents(furnish(tmp_path))
    done = start(module, *args, cwd=tmp_path, WORLD_SIZE="2")
    assert done.returncode == USAGE
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: WORLD_SIZE=2") and "mpirun -n 2" in line
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (16, "runs/untrained/checkpoint/model.safetensors"),
        (24, "parameter 'wte.weight': values must have shape (256, 24), got (256, 16)"),
        (25, "untrained/config.toml: n_embd must be a multiple of n_head, got 25 and 2"),
    ],
)
def test_generate_tells_what_is_wrong_with_a_run(folder, capfd, width, message):
    directory = folder / "runs" / "untrained"
    settings_file = directory / "config.toml"
    settings_file.write_text(settings_file.read_text().replace("n_embd = 16", f"n_embd = {width}"))
    if width == 24:
        save(directory / "checkpoint", GPT(TINY.model))
    assert message in jobs.refused(capfd, USAGE, generate.main, ["runs/untrained"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "PATH"),
        (["runs/none"], "runs/none/config.toml: No such file"),
        (["runs/taken", "--lenght", "3"], "--lenght"),
        (["runs/taken", "--seed", "-1"], "seed must be at least 0, got -1"),
        (["runs/taken", "--prompt", ""], "prompt must hold"),
    ],
)
def test_generate_tells_what_is_wrong_with_its_options(folder, capfd, args, message):
    assert message in jobs.refused(capfd, USAGE, generate.main, args)
