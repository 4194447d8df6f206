"""Runs of models.train in a folder with a text: on ranks that are threads, or started as a user does.

    folder = jobs.furnish(tmp_path)  # the present folder of the test
    jobs.run(2, "two", "--parallel.tp", "2")
    jobs.assert_alike(folder, "two", "one", 2e-6)

`from tests.lab import jobs`; it is no part of tests.lab, whose users need no models.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from models import train
from models.gpt import GPTConfig
from models.language import GPTRecipe, LlamaRecipe
from shardrt.__main__ import main
from shardrt.comm import init_device_mesh, thread
from shardrt.train import config as settings
from shardrt.train import job, loop, pipelines
from shardrt.train.errors import DATA, USAGE, one_line
from tests.lab.comparing import assert_close
from tests.ranks import mpirun, python

TINY = GPTRecipe(
    steps=3,
    batch_size=4,
    model=GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=256),
    report=settings.ReportConfig(log_interval=1, eval_interval=2, eval_samples=8),
    sample=settings.SampleConfig(length=4),
)
TEXT = "All the world's a stage, and all the men and women merely players.\n" * 40
# Open MPI refuses root, and more ranks than cores, unless these say so; MPICH knows none of these.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
}
ON_HOST = tuple(f"--memory.offload-{what}" for what in ("parameters", "gradients", "optimizer"))
HYBRID = ("--fsdp.strategy", "HYBRID_SHARD", "--fsdp.copies", "2")
INVARIANT = ("--deterministic", "world-invariant", "--micro-batches", "4")


def furnish(folder: Path) -> Path:
    """A folder with settings, text, and things that may not be overwritten."""
    settings.dump(TINY, folder / "tiny.toml")
    (folder / "unknown.toml").write_text("stepps = 3\n")
    (folder / "text.txt").write_text(TEXT)
    (folder / "empty.txt").touch()
    (folder / "runs" / "taken").mkdir(parents=True)
    (folder / "runs" / "taken" / "metrics.jsonl").write_text("kept")
    (folder / "runs" / "untrained").mkdir()
    settings.dump(TINY, folder / "runs" / "untrained" / "config.toml")
    return folder


def folder_of(runs: dict[str, tuple], common: tuple[str, ...] = (), **files: Any) -> Callable:
    """A fixture of a module: a furnished folder with these runs, name -> (ranks, options).

    files: settings that stand in it as NAME.toml. A test has the folder as its present one by `here`.
    """

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory):
        folder = furnish(tmp_path_factory.mktemp("runs"))
        for name, recipe in files.items():
            settings.dump(recipe, folder / f"{name}.toml")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for name, (ranks, options) in runs.items():
                run(ranks, name, *options, common=common)
        return folder

    return folder


def with_experts(shape: Any) -> LlamaRecipe:
    """Settings of a Llama that is trained as TINY is."""
    return LlamaRecipe("llama", model=shape, batch_size=4, report=TINY.report, sample=TINY.sample)


def arguments(*more: str) -> list[str]:
    """Those of a run of the tiny model; what comes later goes over what came before."""
    return ["--config", "tiny.toml", "--data", "text.txt", *more]


def start(module: str, *args: str, ranks: int | None = None, cwd: Path, **variables: str):
    """`python -m module args` in `cwd`, under mpirun if `ranks` is given."""
    words = ["-m", module, *args]
    if ranks is None:
        return python(*words, cwd=cwd, **variables)
    return mpirun(ranks, words, cwd=cwd, **variables)


def run(ranks: int, name: str, *options: str, common: tuple[str, ...] = ()) -> None:
    """A run of the tiny model with options, on threads, in the present folder."""
    with one_line(USAGE):  # as train.main has it; the parser's library is not for several threads
        config = train.parse(arguments("--name", name, *common, *options))
    thread.run(ranks, job.launch, config)


def contents(folder: Path) -> dict:
    """Every path below a folder, with what a file holds and when it was written."""
    return {
        p: (p.is_file() and p.read_bytes(), p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if "__pycache__" not in p.parts
    }


def lines_of(folder: Path, name: str) -> list[dict]:
    """The whole records of a run, as far as there are any."""
    path = folder / "runs" / name / "metrics.jsonl"
    whole = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in whole]


def records(folder: Path, name: str, kind: str) -> list[dict]:
    """Those of one kind."""
    return [record for record in lines_of(folder, name) if record["kind"] == kind]


def weights(folder: Path, name: str, file: str = "checkpoint") -> dict[str, np.ndarray]:
    """Those that a run has left."""
    return load_file(folder / "runs" / name / file / "model.safetensors")


def curves(folder: Path, name: str) -> tuple[list, list, dict[str, bytes]]:
    """(step, loss, norm) and (step, held-out loss) of a run, and its weights: to be compared by ==."""
    steps = [(r["step"], r["loss"], r["norm"]) for r in records(folder, name, "step")]
    evaluations = [(r["step"], r["held_out_loss"]) for r in records(folder, name, "evaluation")]
    return steps, evaluations, {key: values.tobytes() for key, values in weights(folder, name).items()}


def assert_alike(
    folder: Path, name: str, other: str, rtol: float, *, norms: bool = True, atol: float | None = None
) -> None:
    """Runs with the same losses and norms, to rounding. atol: and weights, and a sample of the same text."""
    ours, theirs = curves(folder, name), curves(folder, other)
    columns = slice(None) if norms else slice(2)
    steps = [[step[columns] for step in each] for each in (ours[0], theirs[0])]
    assert_close(steps[0], steps[1], "steps", rtol=rtol)
    assert_close(ours[1], theirs[1], "evaluations", rtol=rtol)
    if atol is not None:
        assert_close(weights(folder, name), weights(folder, other), atol=atol)
        (found,), (expected,) = (records(folder, each, "end") for each in (name, other))
        assert found["sample"] == expected["sample"]


def refused(capfd: Any, code: int | tuple[int, ...], call: Callable, *args: Any) -> str:
    """The one line with which a call exits by this code (or one of these), and says nothing else."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        call(*args)
    assert stop.value.code in (code if isinstance(code, tuple) else (code,))
    out, err = capfd.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("error: ") and not out, (line, out)
    return line


def tool_refuses(capsys: Any, *words: object) -> str:
    """The one line with which `python -m shardrt *words` ends, by the code of data that will not do."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == DATA
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1, (out, err)
    return err.rstrip("\n")


def save_tokenizer(path: Path, vocabulary: dict[str, int], **added: Any) -> None:
    """A tokenizer.json of words between spaces, ids as they are given. added: its methods -> arguments."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    for change, settled in added.items():
        getattr(tokenizer, change)(**settled)
    tokenizer.save(str(path))


def one_line_tests(*table: tuple, common: tuple[str, ...] = (), code: int = USAGE) -> Callable:
    """A test of rows (the message, options...): models.train exits by this code and writes nothing.

    The test has the fixture `folder`, which is the present folder.
    """

    @pytest.mark.parametrize(("message", "options"), [(row[0], row[1:]) for row in table], ids=str)
    def test(message: str, options: tuple[str, ...], folder: Path, capfd: Any) -> None:
        before = contents(folder)
        assert message in refused(capfd, code, train.main, arguments(*common, *options))
        assert contents(folder) == before

    return test


def set_up(recipe: Any) -> None:
    """What a run does before it writes anything; the command makes a line of an error (test_command.py)."""
    mesh = init_device_mesh()
    recipe = pipelines.resolved(recipe, mesh.size)
    mesh, task = job.with_axes(recipe, mesh), recipe.task()
    model = job.sharded_model(recipe, mesh, task)
    job.planned_memory(recipe, mesh, task, model, loop.batches_of(recipe, mesh, task, 0))


def set_up_refusals(*table: tuple, common: tuple[str, ...] = ()) -> Callable:
    """A test of rows (the message, ranks, options...): `set_up` of so many ranks refuses the options so.

    The test has the fixture `folder`, which is the present folder.
    """
    rows = [(row[0], row[1], row[2:]) for row in table]

    @pytest.mark.parametrize(("message", "ranks", "options"), rows, ids=str)
    def test(message: str, ranks: int, options: tuple[str, ...], folder: Path) -> None:
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
            thread.run(ranks, set_up, train.parse(arguments(*common, *options)))

    return test


STEPS = 12
CONFIG = replace(
    TINY,
    steps=STEPS,
    report=replace(TINY.report, eval_interval=5),
    checkpoint=settings.CheckpointConfig(every=3),
    model=replace(TINY.model, dropout=0.1),
)


def launch(ranks: int, name: str, **changes: Any) -> None:
    """A run of CONFIG with changes, on threads, in the present folder."""
    settled = {"name": name, "data": (Path("text.txt"),), **changes}
    thread.run(ranks, job.launch, replace(CONFIG, **settled))


def remove_after(run: Path, step: int) -> None:
    """As if the run had been killed after that checkpoint, in the middle of a line."""
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            path.rename(run / "checkpoints" / f".tmp-{path.name}-00000000")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "st')
