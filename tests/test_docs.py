"""Every example of the pages runs as it stands, has the types, and links to what is there.

Every command runs too, on small models and little data, or is at least read by its own parser; one that this
file does not know fails.
"""

import argparse
import configparser
import json
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import warnings
from glob import glob
from pathlib import Path

import numpy as np
import pytest

from models import generate, train
from models.hub import save_pretrained
from models.llama import Llama, LlamaConfig
from models.vit import ViT, ViTConfig
from shardrt.__main__ import main as shell
from tests.lab.jobs import save_tokenizer, start
from tests.ranks import ROOT, mpirun, python

PAGES = [ROOT / "README.md", ROOT / "kernels" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


EXAMPLES = [page for page in PAGES if blocks_of(page)]
# Each page in a fork of a process that has loaded kernels, so that no page sees what another imports.
ONE_EACH = """
import os, runpy, sys
import shardrt
from shardrt.kernels.cpu import _warm_up
_warm_up._warm_up_float32()
for file in sys.argv[1:]:
    if (child := os.fork()) == 0:
        os.chdir(os.path.dirname(file))
        for number, name in (1, "out"), (2, "error"):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), number)
        os.environ["SHARDRT_DEBUG"] = str(int("from_scratch" in file))
        runpy.run_path(file, run_name="__main__")
        sys.exit()
    with open(os.path.join(os.path.dirname(file), "code"), "w") as code:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=code)
"""
ONE_BY_ONE = """
import os, runpy, sys
for file in sys.argv[1:]:
    os.chdir(os.path.dirname(file))
    runpy.run_path(file, run_name="__main__")
    open(os.path.join(os.path.dirname(file), f"ran.{os.getpid()}"), "w").close()  # lines of ranks may mix
"""


def name_of(page: Path) -> str:
    """docs/howto/train.md is "howto-train"."""
    return "-".join(page.relative_to(ROOT).with_suffix("").parts).removeprefix("docs-")


def example_of(page: Path, folder: Path) -> Path:
    """Its program, in an empty folder of its own."""
    (folder / name_of(page)).mkdir()
    file = folder / name_of(page) / "example.py"
    file.write_text("\n".join(blocks_of(page)))
    return file


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Folders, each named as a page whose examples ran there: what they printed is in `error` and `out`."""
    folder = tmp_path_factory.mktemp("examples")
    files = [str(example_of(page, folder)) for page in EXAMPLES]
    done = python("-c", ONE_EACH, *files)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("page", EXAMPLES, ids=name_of)
def test_the_examples_of_a_page_run_one_after_the_other(page, alone):
    assert (alone / name_of(page) / "code").read_text() == "0\n", (
        alone / name_of(page) / "error"
    ).read_text()


@pytest.mark.mpi
def test_the_examples_run_on_two_ranks(tmp_path):
    """But those in which one process stands for many ranks."""
    pages = [page for page in EXAMPLES if "shardrt.simulate" not in "".join(blocks_of(page))]
    files = [str(example_of(page, tmp_path)) for page in pages]
    done = mpirun(2, ["-c", ONE_BY_ONE, *files])
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*/ran.*"))) == 2 * len(files)


def shown_in(name: str) -> str:
    """The output that a page shows."""
    page = (ROOT / "docs" / (name.replace("-", "/") + ".md")).read_text()
    return re.search(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]


def test_the_tutorial_shows_the_schedule_that_its_program_prints(alone):
    shown = shown_in("learn-from_scratch").splitlines()
    message = (alone / "learn-from_scratch" / "error").read_text().splitlines()
    for rank in (0, 1):
        printed = [line for line in message if line.startswith(f"[rank {rank}]")]
        assert printed == [line.replace("[rank 0]", f"[rank {rank}]") for line in shown]


@pytest.mark.parametrize(
    "name", ["explanation-races", "howto-lora", "howto-own_op", "howto-simulate", "howto-wrapping"]
)
def test_a_page_shows_what_its_program_prints(alone, name):
    printed = (alone / name / "out").read_text().replace(f"{name}/", f"{name.partition('-')[2]}/")
    printed, shown = (re.sub("0x[0-9a-f]+", "an address", text) for text in (printed, shown_in(name)))
    assert printed == shown


def test_the_program_of_the_readme_learns(alone):
    printed = (alone / "README" / "out").read_text()
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 30 and losses[-1] < 0.6 * losses[0]


# Examples leave out the types of their own functions, as people do; everything else is strict.
STRICT = ("--strict", "--allow-untyped-defs", "--allow-incomplete-defs", "--allow-untyped-calls")


@pytest.mark.slow
def test_programs_that_use_the_library_pass_a_strict_type_checker(tmp_path):
    pytest.importorskip("mypy")
    for page in EXAMPLES:
        (tmp_path / f"page_{name_of(page).replace('-', '_')}.py").write_text("\n".join(blocks_of(page)))
    for example in (ROOT / "examples").glob("*.py"):
        if "import shardrt" in example.read_text():  # NumPy alone has no complete types
            shutil.copy(example, tmp_path)
    options = (*STRICT, "--follow-imports=silent", "--cache-dir", tmp_path / "cache")
    done = python("-m", "mypy", *options, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


GENERATED = ("reference/options.md", "reference/commands.md")  # by `make docs`


def test_every_file_that_a_page_names_is_there():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            there = "://" in target or target.endswith(GENERATED) or (page.parent / target).exists()
            assert there, f"{page} links to {target}"


def test_the_loop_of_pytorch_beside_ours_runs_as_it_stands(tmp_path):
    pytest.importorskip("torch")
    page = (ROOT / "docs" / "howto" / "from_pytorch.md").read_text()
    file = tmp_path / "loop.py"
    file.write_text(re.search(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rendezvous = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = python(file, cwd=tmp_path, **rendezvous)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


# --- commands -----------------------------------------------------------------------------------------------

PROGRAMS = "python|python3|mpirun|torchrun|pip|shardrt|tensorboard|hf|git|nsys|srun|sbatch|docker|conda"
# Not what `shardrt 0.1.0: GPT ...` prints.
LINE = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:(?:{PROGRAMS}|\.) (?!\d)\S|make [a-z0-9]+(?:$| +[A-Z#]))")
# What no test can run, and why.
NOT_RUN = {
    r"\. \.venv/bin/activate": "changes a shell",
    r"((mpirun -n \S+|torchrun --nproc-per-node \d+) )?python( -m shardrt)?": "the beginning of a command",
    r"mpirun (-\w|-n \S+|.* \.\.\.)": "the beginning of a command",
    r"shardrt (bench|ckpt convert|config convert|data make|hub|run|trace|train)": "the name of a command",
    r"shardrt \w+ --help": "tests/test_shell.py",
    r"srun --mpi=list": "Slurm's",
    r"torchrun .*": "PyTorch's",
    r"tensorboard --logdir runs": "a server",
    r"hf download .*": "downloads",
    r"python -m shardrt\.models\.generate runs/tuned .*": "of a run on talks: tests/models/test_chat.py",
    r"mpirun .*--lora\.adapter ADAPTER .*": "PEFT's: tests/train/test_tasks.py",
    r"mpirun -hosts .* ckpt gather runs/NAME": "of hosts: tests/hosts/test_checkpoint.py",
    r"shardrt learn \d+ exercise_\d+\.py": "of a reader's file: tests/learn",
    r"shardrt ckpt convert .*|mpirun .*--config titan\.toml.*": "tests/exchange/test_page.py",
    r".* simulate .*mine\.toml.*": "of a file that bench.machine has made: tests/bench/test_machine.py",
}
# What is there for benchmarks and tests of minutes: their options are read by their own parsers here, and
# tests/bench, tests/failures, tests/checkpoint, tests/train and tests/test_beyond_memory.py run them. So are
# the doctor without a run, and `run`, which start ranks: tests/test_doctor.py, tests/test_run.py; and plans,
# which take minutes.
ONLY_READ = r"(bench\.[\w.]+|tests\.[\w.]+|models\.beyond_memory)"
BRIEF = ["--steps", "1", "--batch-size", "2", "--report.eval-samples", "2", "--optimizer.warmup-steps", "0"]
SMALL = [*BRIEF, "--model.n-layer", "1", "--model.n-head", "2", "--model.n-embd", "16"]


def commands_in(text: str) -> list[str]:
    """Shell commands of a page: lines of blocks, and what stands between backticks."""
    blocks = re.findall(r"^```(?!py)\w*\n(.*?)^```|((?:^    .*\n)+)", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(fenced or indented for fenced, indented in blocks).replace("\\\n", " ").splitlines()
    prose = re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", prose):
        lines += [" ".join(inline.split()) for inline in re.findall(r"`([^`]+)`", paragraph)]
    return [" ".join(line.partition("  #")[0].split()) for line in lines if LINE.match(line.strip())]


COMMANDS = sorted({command for page in PAGES for command in commands_in(page.read_text())})


def without_launcher(command: str) -> list[str]:
    """The words behind variables, mpirun and python; of `python -m MODULE` those from MODULE on."""
    words = shlex.split(command.replace(" ... ", " ").removesuffix(" ..."))
    while "=" in words[0]:
        words.pop(0)
    if words[0] in ("mpirun", "srun"):
        words = words[next(i for i, word in enumerate(words) if word in ("python", "shardrt")) :]
    if words[:2] == ["shardrt", "bench"]:  # the same module
        return [f"bench.{words[2]}", *words[3:]]
    if words[0] == "shardrt":
        return words
    assert words[0] in ("python", "python3"), command
    return words[2:] if words[1] == "-m" else words[1:]


class Read(Exception):
    """A parser took the options."""


def read_only(module: str, arguments: list[str], monkeypatch) -> None:
    """The parser of a program takes `arguments`; the program goes no further."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with warnings.catch_warnings(), pytest.raises(Read):
        warnings.simplefilter("ignore", RuntimeWarning)  # a module that is imported already runs again
        runpy.run_module(module, run_name="__main__", alter_sys=True)


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    """A folder with everything that the commands of the documents name."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path_factory.mktemp("documents")
    for name in ("my.txt", "one.txt"):
        (folder / name).write_text("all the world's a stage\n" * 2000)
    for name in ("corpus.jsonl", "texts.jsonl"):
        (folder / name).write_text('{"text": "all the world is a stage"}\n' * 1500)
    words = {word: i for i, word in enumerate(["[UNK]", "<|endoftext|>", "all", "the", "world", "is"])}
    save_tokenizer(folder / "tokenizer.json", words)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16}
    llama = Llama(LlamaConfig(**shape, n_kv_head=2, n_hidden=16, block_size=256, vocab_size=6))
    files = {"tokenizer.json": (folder / "tokenizer.json").read_bytes()}
    files["chat_template.jinja"] = b"{% for m in messages %}{{ m.content }} <|endoftext|> {% endfor %}"
    talk = [{"role": role, "content": "all the world"} for role in ("user", "assistant")]
    (folder / "talks.jsonl").write_text(
        json.dumps({"messages": talk}) + "\n" + json.dumps({"messages": talk})
    )
    save_pretrained(llama, folder / "llama", files=files)
    save_pretrained(ViT(ViTConfig(**shape, n_hidden=16, image_size=224, patch_size=56)), folder / "vit")
    for kind in ("cat", "dog"):
        (folder / "pictures" / kind).mkdir(parents=True)
        for number in range(10):
            pixels = np.full((32, 32, 3), 20 * number, np.uint8)
            image.fromarray(pixels).save(folder / "pictures" / kind / f"{number}.png")
    page = (ROOT / "docs" / "howto" / "from_accelerate.md").read_text()
    (folder / "accelerate.yaml").write_text(
        re.search(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]
    )
    (folder / "ds_config.json").write_text(
        re.search(r"^```json\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]
    )
    (folder / "models").symlink_to(ROOT / "models")
    options = ["--name", "NAME", "--data", "my.txt", "--checkpoint.every", "10", "--report.trace", "20:22"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        end = ["--tokenizer", "tokenizer.json", "--end", "<|endoftext|>"]
        assert shell(["data", "make", "mine.tokens", "texts.jsonl", *end]) == 0
        assert shell(["data", "make", "story.tokens", "one.txt", "corpus.jsonl", *end]) == 0
        assert shell(["config", "convert", "accelerate.yaml", "-o", "recipe.toml"]) == 0
    done = start("tests.train.plain", *options, *SMALL, "--steps", "22", ranks=2, cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "A").symlink_to("runs/NAME/checkpoints/step-00000010")
    (folder / "B").symlink_to("runs/NAME/checkpoints/step-00000020")
    return folder


@pytest.fixture
def here(furnished, tmp_path, monkeypatch):
    """A copy of it as the current directory."""
    shutil.copytree(furnished, tmp_path / "here", symlinks=True)
    monkeypatch.chdir(tmp_path / "here")


def trained(arguments: list[str]) -> int:
    """`models.train` of a documented command, with a small model, few steps and little data."""
    images = "vit" in " ".join(arguments)
    own = [*arguments, *(BRIEF if "--init-from" in arguments else SMALL)]
    own += [] if images else ["--sample.length", "2"]
    own += ["--steps", "22"] if "20:22" in arguments else []
    own += [] if images or "--data" in arguments else ["--data", "my.txt"]
    if "--resume" not in arguments:
        own += ["--name", "new"]
    train.main([word.replace("FOLDER", "vit" if images else "llama") for word in own])
    return 0


def run(words: list[str]) -> int:
    """A command in this process, on one rank; gives its exit code."""
    module, *arguments = words
    if words[:2] == ["shardrt", "train"]:
        return trained(arguments[1:])
    if module.removeprefix("shardrt.") == "models.train":
        return trained(arguments)
    if module.removeprefix("shardrt.") == "models.generate":
        return generate.main(arguments)
    assert module == "shardrt", f"{module}: say in this file how a test runs it"
    if arguments[:2] in (["data", "make"], ["config", "convert"]):  # they write new files alone
        Path(arguments[2 if arguments[0] == "data" else -1]).unlink(missing_ok=True)
    arguments = [word.replace("FOLDER", "llama") for word in arguments]
    return shell([path for word in arguments for path in (sorted(glob(word)) if "*" in word else [word])])


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_runs_or_is_read_by_its_own_parser(command, here, monkeypatch, capsys):
    if any(re.fullmatch(pattern, command) for pattern in NOT_RUN):
        return  # the table says why
    if command.startswith("make"):
        done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    if command.startswith("pip install"):
        extras = re.findall(r"\[([\w,]+)\]", command)
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        assert {e for each in extras for e in each.split(",")} <= setup["options.extras_require"].keys()
        return
    words = without_launcher(command)
    if "--chakra" in words:
        pytest.importorskip("chakra.schema.protobuf.et_def_pb2")
    if words[0] == "pytest":
        assert all((ROOT / word).exists() for word in words[1:] if not word.startswith("-"))
    elif words[0].endswith(".py"):
        assert any((folder / words[0]).exists() for folder in (ROOT, ROOT / "examples")), command
    elif re.fullmatch(ONLY_READ, words[0]) or (
        words[:2] in (["shardrt", "doctor"], ["shardrt", "run"], ["shardrt", "plan"], ["shardrt", "hub"])
        and "runs/NAME" not in words
    ):
        read_only(words[0], words[1:], monkeypatch)
    elif "--diloco.hosts" in words:  # tests/train/test_diloco.py and test_hub.py run them
        assert train.parse(words[2:]).diloco.hosts == 2
    else:
        assert not run(words) or "diff" in words, capsys.readouterr()


def test_the_example_says_when_a_file_is_too_short(tmp_path):
    (tmp_path / "text").write_text("to be")
    done = python(ROOT / "examples" / "train_text.py", "text", cwd=tmp_path)
    assert done.returncode == 2 and "has 5 bytes, and a sample 65" in done.stderr


@pytest.mark.parametrize("code", [0, 1, 75])
def test_the_batch_script_of_slurm_ends_as_its_run_and_is_queued_again_if_that_was_asked_to_stop(
    tmp_path, code
):
    text = (ROOT / "docs" / "howto" / "clusters.md").read_text()
    (script,) = re.findall(r"^    #!/bin/bash\n((?:^    .*\n)+)", text, re.MULTILINE)
    (tmp_path / "job").write_text(re.sub(r"^    ", "", script, flags=re.MULTILINE))
    said = 'echo "$(basename $0) $SRUN_CPUS_PER_TASK $*" >> said\n'
    for name, ends in (("srun", code), ("scontrol", 0)):
        (tmp_path / name).write_text(f"#!/bin/bash\n{said}exit {ends}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {"PATH": path, "SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash", "job"], cwd=tmp_path, env=environment).returncode == code
    srun, *more = (tmp_path / "said").read_text().splitlines()
    assert srun.startswith("srun 4 --kill-on-bad-exit=1 --mpi=pmi2 shardrt train ")
    assert more == (["scontrol 4 requeue 7"] if code == 75 else [])
