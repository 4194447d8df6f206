"""`models.train` and `models.generate` as a user starts them, in a folder that is not the checkout."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from models import generate, train
from models.gpt import GPT, GPTConfig
from models.language import GPTRecipe as Config
from shardrt.checkpoint import save
from shardrt.comm import init_device_mesh, thread
from shardrt.kernels import onednn
from shardrt.train import config as settings
from shardrt.train.errors import DATA, USAGE
from shardrt.train.job import optimizer_of, sharded_model
from shardrt.untrusted import printable
from tests.ranks import BACKSTOP, clean_environment, mpirun_path

TINY = Config(
    steps=3,
    batch_size=4,
    model=GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=256),
    report=settings.ReportConfig(log_interval=1, eval_interval=2, eval_samples=8),
    sample=settings.SampleConfig(length=20),
)
# Open MPI refuses root, and more ranks than cores, unless it is told; MPICH knows none of these.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
}
STEP_LINE = re.compile(
    r"step \d/3  loss +\d+\.\d{4}  norm +\d+\.\d{3}  +\d+\.\dk? tok/s  mfu +(\d+%|--)  left +(\d+:\d\d|--)"
)

# What is wrong, on two ranks: the arguments, the exit code, what the one line says.
BAD_INPUT = {
    "a missing data file": (["--data", "none.txt"], DATA, "data: none.txt does not exist"),
    "an empty data file": (["--data", "empty.txt"], DATA, "data: empty.txt is empty"),
    "a data file that is too short": (["--data", "short.txt"], DATA, "short.txt has 6 bytes, too short"),
    "a width that the heads do not divide": (
        ["--model.n-head", "3"],
        USAGE,
        "n_embd must be a multiple of n_head, got 16 and 3",
    ),
    "a run directory that exists": (["--name", "taken"], USAGE, "runs/taken exists already"),
    "a batch that the ranks cannot share": (
        ["--batch-size", "3"],
        USAGE,
        "batch_size 3 cannot be shared equally by 2 ranks",
    ),
    "micro-batches that the ranks cannot share": (
        ["--micro-batches", "3"],
        USAGE,
        "batch_size 4 cannot be shared equally by 2 ranks and 3 micro-batches",
    ),
    "copies that the ranks cannot share": (
        ["--fsdp.strategy", "HYBRID_SHARD", "--fsdp.copies", "3"],
        USAGE,
        "fsdp.copies 3 cannot share 2 ranks equally",
    ),
    "an axis that the ranks cannot share": (
        ["--parallel.tp", "4"],
        USAGE,
        "parallel.tp 4 cannot share 2 ranks",
    ),
    "stages that the ranks cannot share": (
        ["--parallel.pp", "4"],
        USAGE,
        "parallel.pp 4 cannot share 2 ranks",
    ),
    "sequences that the ranks cannot share": (
        ["--parallel.cp", "2", "--text.window", "10"],
        USAGE,
        "parallel.cp: 2 ranks need samples of a multiple of 4 tokens, not 10",
    ),
    "a schedule that the micro-batches do not fit": (
        ["--parallel.pp", "2", "--micro-batches", "3"],
        USAGE,
        "batch_size 4 cannot be shared equally by 1 group of 2 ranks and 3 micro-batches",
    ),
    "an unknown schedule": (["--parallel.schedule", "2F2B"], USAGE, "parallel.schedule must be one of GPipe"),
    "an unknown strategy": (["--fsdp.strategy", "HALF"], USAGE, "FULL_SHARD"),
    "an unknown option": (["--stepps", "3"], USAGE, "--stepps"),
    "a missing configuration": (["--config", "none.toml"], USAGE, "none.toml: No such file"),
    "an option spelt wrong": (["--optimiser.lr", "1"], USAGE, "--optimiser.lr"),
    "an unknown key": (["--config", "unknown.toml"], USAGE, "unknown.toml: unknown key 'stepps'"),
}
ALONE = {what: case for what, case in BAD_INPUT.items() if "2 ranks" not in case[2]}


def furnish(folder):
    """A folder with settings, text, and things that may not be overwritten."""
    settings.dump(TINY, folder / "tiny.toml")
    (folder / "unknown.toml").write_text("stepps = 3\n")
    (folder / "text.txt").write_text(
        "All the world's a stage, and all the men and women merely players.\n" * 40
    )
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("short\n")
    (folder / "runs" / "taken").mkdir(parents=True)
    (folder / "runs" / "taken" / "metrics.jsonl").write_text("kept")
    (folder / "runs" / "untrained").mkdir()
    settings.dump(TINY, folder / "runs" / "untrained" / "config.toml")
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory of a test in this process."""
    monkeypatch.chdir(furnish(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder in which one, two and alone have been trained: on 1 and 2 ranks, and without mpirun."""
    folder = furnish(tmp_path_factory.mktemp("trained"))
    outputs = {
        "one": start("models.train", *arguments("--name", "one"), ranks=1, cwd=folder),
        "two": start("models.train", *arguments("--name", "two"), ranks=2, cwd=folder),
        "alone": start("models.train", *arguments("--name", "alone"), cwd=folder),
    }
    for name, done in outputs.items():
        assert done.returncode == 0, f"{name}: {done.stderr}"
    return folder, outputs


def arguments(*more):
    """Those of a run of the tiny model; what comes later goes over what came before."""
    return ["--config", "tiny.toml", "--data", "text.txt", *more]


def start(module, *args, ranks=None, cwd, **variables):
    """`python -m module args` in `cwd`, under mpirun if `ranks` is given."""
    launcher = [] if ranks is None else [mpirun_path(), "-n", str(ranks)]
    return subprocess.run(
        [*launcher, sys.executable, "-m", module, *args],
        capture_output=True,
        text=True,
        timeout=BACKSTOP,
        cwd=cwd,
        env=clean_environment(**OPEN_MPI, **variables),
    )


def contents(folder):
    """Every path below a folder, with what a file holds and when it was written."""
    return {
        p: (p.is_file() and p.read_bytes(), p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if "__pycache__" not in p.parts
    }


def records(folder, name, kind):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["one", "two", "alone"])
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


@pytest.mark.mpi
@pytest.mark.parametrize(("name", "ranks"), [("one", 1), ("two", 2), ("alone", 1)])
def test_a_run_is_on_the_ranks_that_were_started(runs, name, ranks):
    (record,) = records(runs[0], name, "run")
    assert record["ranks"] == ranks


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["two", "alone"])
def test_losses_norms_and_weights_are_those_of_one_rank(runs, name):
    for kind, key in (("step", "loss"), ("step", "norm"), ("evaluation", "held_out_loss")):
        curves = [[record[key] for record in records(runs[0], each, kind)] for each in ("one", name)]
        np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5, err_msg=key)
    files = [runs[0] / "runs" / each / "checkpoint" / "model.safetensors" for each in ("one", name)]
    weights = [load_file(file) for file in files]
    assert weights[0].keys() == weights[1].keys() and "wte.weight" in weights[0]
    for key in weights[0]:
        np.testing.assert_allclose(weights[1][key], weights[0][key], atol=2e-5, err_msg=key)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["one", "two", "alone"])
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
    (end,) = records(folder, "one", "end")
    sample = printable(end["sample"], lines=True) + "\n"
    done = start("models.generate", "runs/one", "--length", "20", ranks=2, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, sample, "")
    monkeypatch.chdir(folder)
    generate.main(["runs/one", "--length", "20"])
    assert capfd.readouterr() == (sample, "")


@pytest.mark.parametrize("instructions", [True, False])
def test_a_run_says_where_its_matmuls_are_not_of_the_type_that_was_asked_for(
    tmp_path, monkeypatch, capfd, instructions
):
    monkeypatch.chdir(furnish(tmp_path))
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
    cases = {what: ("train", arguments(*args)) for what, (args, _, _) in BAD_INPUT.items()}
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


def test_help_needs_no_mpirun(capfd):
    for main in (train.main, generate.main):
        with pytest.raises(SystemExit) as stop:
            main(["--help"])
        assert not stop.value.code
        assert capfd.readouterr().out.count("show this help message") == 1


@pytest.mark.mpi
@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_gets_one_line_from_two_ranks(reported_by_two, what):
    _, code, message = BAD_INPUT[what]
    codes, out, err = reported_by_two[what]
    (line,) = err.splitlines()
    assert line.startswith("error: ") and message in line
    assert (codes, out) == ({code}, "")


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["an unknown option", "a batch that the ranks cannot share"])
def test_bad_input_ends_a_job_with_one_line_and_the_code(tmp_path, what):
    """Before MPI has started, and after."""
    args, code, message = BAD_INPUT[what]
    before = contents(furnish(tmp_path))
    done = start("models.train", *arguments(*args), ranks=2, cwd=tmp_path)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line
    assert done.stdout == ""
    assert contents(tmp_path) == before


@pytest.mark.parametrize("what", ALONE)
def test_bad_input_gets_one_line_from_one_rank(folder, what, capfd):
    args, code, message = ALONE[what]
    before = contents(folder)
    with pytest.raises(SystemExit) as stop:
        train.main(arguments(*args))
    assert stop.value.code == code
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("error: ") and message in line
    assert out == ""
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


def test_a_batch_that_cannot_be_shared_is_told_before_the_model_is_made():
    smallest = GPTConfig(n_layer=1, n_head=1, n_embd=1, block_size=1, vocab_size=256, bias=False)

    task = replace(TINY, model=smallest).task()

    def shard(batch_size):
        config = replace(TINY, model=smallest, batch_size=batch_size)
        optimizer_of(config, sharded_model(config, init_device_mesh(), task))

    with pytest.raises(ValueError, match="batch_size 4 cannot be shared equally by 20 ranks"):
        thread.run(20, shard, 4)


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (16, "runs/untrained/checkpoint/model.safetensors"),
        (24, "parameter 'wte.weight' has shape (256, 24), the values (256, 16)"),
        (25, "untrained/config.toml: n_embd must be a multiple of n_head, got 25 and 2"),
    ],
)
def test_generate_tells_what_is_wrong_with_a_run(folder, capfd, width, message):
    directory = folder / "runs" / "untrained"
    settings_file = directory / "config.toml"
    settings_file.write_text(settings_file.read_text().replace("n_embd = 16", f"n_embd = {width}"))
    if width == 24:
        save(directory / "checkpoint", GPT(TINY.model))
    with pytest.raises(SystemExit) as stop:
        generate.main(["runs/untrained"])
    assert stop.value.code == USAGE
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


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
    with pytest.raises(SystemExit) as stop:
        generate.main(args)
    assert stop.value.code == USAGE
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
