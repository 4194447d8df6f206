"""The wheel holds shardrt alone, lives beside the other package called kernels, and trains."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shardrt
from tests.ranks import BACKSTOP, clean_environment
from tests.test_watching import ABOUT, step, written

ROOT = Path(__file__).parent.parent


def _run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=BACKSTOP, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built in a copy of the sources, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "runs", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source, env=environment)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_shardrt_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].split("-")[0] for name in names} == {"shardrt"}
    for needed in ("kernels/cpu/attention.py", "models/gpt.py", "models/train.py", "fsdp/schedule.py"):
        assert f"shardrt/{needed}" in names
    for folder in ("models/configs", "simulate/machines"):
        assert any(name.startswith(f"shardrt/{folder}/") and name.endswith(".toml") for name in names)


def needed_by(wheel):
    """Installed packages that it and its extras `mpi` and `train` ask for, and what those ask for."""
    found, asked = {}, [f"shardrt[mpi,train] @ {wheel.as_uri()}"]
    while asked:
        requirement = Requirement(asked.pop())
        name = canonicalize_name(requirement.name)
        ours = name == "shardrt"
        about = next(metadata.distributions(path=[wheel])) if ours else metadata.distribution(name)
        assert ours or requirement.specifier.contains(about.version, prereleases=True), requirement
        if name not in found or requirement.extras:
            found[name] = about
            for line in about.requires or ():
                marker = Requirement(line).marker
                if not marker or any(marker.evaluate({"extra": e}) for e in (requirement.extras or {""})):
                    asked.append(line)
    del found["shardrt"]
    return found.values()


def link(package, environment):
    """Show a package that is installed here to another environment, too."""
    site = Path(package.locate_file(""))
    tops = {file.parts[0] for file in package.files} - {"..", "__pycache__"}
    places = [site / top for top in tops]
    places += [Path(os.path.normpath(site / file)) for file in package.files if file.parts[0] == ".."]
    for place in places:
        new = environment / place.relative_to(sys.prefix)
        new.parent.mkdir(parents=True, exist_ok=True)
        new.symlink_to(place)


def show_compiled(folder):
    """Give kernels of the wheel what Numba made of the same sources here: it asks for their size and time.

    To compile them again takes longer than to train. tests/kernels/test_cache.py has a first start.
    """
    here = ROOT / "kernels" / "cpu"
    (folder / "__pycache__").mkdir(exist_ok=True)
    for source in here.glob("*.py"):
        assert (folder / source.name).read_bytes() == source.read_bytes()
        shutil.copystat(source, folder / source.name)
    kept = here / "__pycache__"
    for made in (*kept.glob("*.nb?"), *kept.glob("all-*")):
        shutil.copy(made, folder / "__pycache__")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs a command where the wheel, what it asks for and another `kernels` are, not the checkout."""
    folder = tmp_path_factory.mktemp("elsewhere")
    _run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    for package in needed_by(wheel):
        link(package, folder / "venv")
    environment = clean_environment()
    del environment["PYTHONPATH"]
    bin = folder / "venv" / "bin"
    options = ("--no-deps", "--no-index", "--no-compile", "-q")
    _run(sys.executable, "-m", "pip", "--python", bin / "python", "install", *options, wheel, env=environment)
    (site,) = (folder / "venv").glob("lib/*/site-packages")
    (site / "kernels.py").write_text("def get_kernel(): pass\n")
    show_compiled(site / "shardrt" / "kernels" / "cpu")

    def run(program, *arguments):
        return _run(bin / program, *arguments, cwd=folder, env=environment)

    run.folder = folder
    return run


@pytest.mark.slow
def test_the_example_trains_outside_the_checkout_and_goes_on_at_another_number_of_ranks(installed):
    program = shutil.copy(ROOT / "examples" / "train_text.py", installed.folder)
    text = installed.folder / "text"
    text.write_bytes(b"to be, or not to be, that is the question. " * 200)
    short = (program, text, "--context", "16", "--steps")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", installed("python", *short, "30"))]
    assert len(losses) == 3 and losses[-1] < 0.8 * losses[0]
    two = ("mpirun", "-n", "2", installed.folder / "venv" / "bin" / "python")
    assert re.findall(r"step (\d+)/40", installed(*two, *short, "40")) == ["40"]


OTHERS = sorted(path.name for path in (ROOT / "examples").glob("train_*.py") if path.stem != "train_text")


@pytest.mark.slow
@pytest.mark.parametrize("example", OTHERS)
def test_every_example_learns_outside_the_checkout_on_two_ranks(example, installed):
    """tests/test_examples.py has one rank, too."""
    program = shutil.copy(ROOT / "examples" / example, installed.folder)
    printed = installed("mpirun", "-n", "2", installed.folder / "venv" / "bin" / "python", program)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) >= 7 and losses[-1] < 0.8 * losses[0]


HELPED = """
import sys
from shardrt.__main__ import main
for name in sys.argv[1:]:
    try:
        main([name, "--help"])
    except SystemExit as end:
        assert not end.code
"""


@pytest.mark.slow
def test_every_command_runs_without_packages_that_nobody_named(installed):
    for command in (["shardrt"], ["python", "-m", "shardrt"]):
        assert installed(*command, "--version") == f"shardrt {shardrt.__version__}\n"
    listed = re.findall(r"^  ([a-z-]+) {2,}", installed("shardrt", "--help"), re.MULTILINE)
    assert {"train", "ckpt", "data", "doctor", "report", "watch", "trace", "races", "simulate"} <= set(listed)
    message = installed("python", "-c", HELPED, *listed)
    assert [*re.findall(r"^usage: shardrt (\w+)", message, re.MULTILINE)] == listed


@pytest.mark.slow
def test_the_training_command_trains_where_only_the_wheel_is(installed):
    small = ("--model.n-layer", "1", "--model.n-head", "2", "--model.n-embd", "16", "--steps", "2")
    text = installed.folder / "words"
    text.write_bytes(b"to be, or not to be, that is the question. " * 400)
    options = ("--name", "wheel", "--data", text, "--batch-size", "2", "--sample.length", "0")
    command = ("mpirun", "-n", "2", installed.folder / "venv" / "bin" / "shardrt", "train")
    installed(*command, *small, *options, "--optimizer.warmup-steps", "0", "--report.eval-samples", "2")
    assert (installed.folder / "runs" / "wheel" / "checkpoint").is_dir()


@pytest.mark.slow
def test_benchmarks_run_where_only_the_wheel_is(installed):
    command = ("mpirun", "-n", "2", installed.folder / "venv" / "bin" / "shardrt", "bench")
    small = ("-b", "1K", "-e", "1K", "-n", "2", "--rounds", "1")
    printed = installed(*command, "collectives", "all_reduce_perf", *small, "-J", "nccl.json")
    assert "# Out of bounds values : 0 OK" in printed and "# commit: none" in printed
    assert '"version": 3' in (installed.folder / "nccl.json").read_text()
    words = ("copies", "--megabytes", "1", "--blocks", "256K", "--rounds", "1")
    printed = installed("shardrt", "bench", "offload", *words)
    assert "memcpy" in printed and "DIFFER" not in printed
    listed = re.findall(r"^  ([a-z0-9]+) {2,}", installed("shardrt", "bench", "--help"), re.MULTILINE)
    assert {"collectives", "p2p", "overlap", "barrier", "replay", "offload", "kernels"} == set(listed)
    for name in listed:
        assert f"usage: shardrt bench {name} " in installed("shardrt", "bench", name, "--help")


@pytest.mark.slow
def test_tools_read_a_run_where_only_the_wheel_is(installed):
    run = installed.folder / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(written(ABOUT, step(1)))
    assert "wrote" in installed("shardrt", "report", run)
