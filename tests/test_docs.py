"""Every example in docs/ runs as it stands: in a fresh interpreter, in an empty directory."""

import importlib
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, clean_environment, mpirun_path

PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.mpi)])
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_one_after_the_other(page, ranks, tmp_path):
    file = tmp_path / "example.py"
    file.write_text("\n".join(blocks_of(page)))
    launcher = [] if ranks == 1 else [mpirun_path(), "-n", str(ranks)]
    done = subprocess.run(
        [*launcher, sys.executable, str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr


def test_the_tutorial_shows_the_schedule_that_its_program_prints(tmp_path):
    page = ROOT / "docs" / "tutorial.md"
    shown = re.search(r"^```text\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)[1].splitlines()
    file = tmp_path / "tutorial.py"
    file.write_text("\n".join(blocks_of(page)))
    environment = clean_environment(SHARDRT_DEBUG="1")
    command = [sys.executable, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        printed = [line for line in done.stderr.splitlines() if line.startswith(f"[rank {rank}]")]
        assert printed == [line.replace("[rank 0]", f"[rank {rank}]") for line in shown]


def test_the_loop_of_pytorch_beside_ours_runs_as_it_stands(tmp_path):
    pytest.importorskip("torch")
    page = (ROOT / "docs" / "from_pytorch.md").read_text()
    file = tmp_path / "loop.py"
    file.write_text(re.search(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rendezvous = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command, environment = [sys.executable, str(file)], clean_environment(**rendezvous)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    "name, wrong", [("failures.__main__", "two"), ("checkpoint.kill_one", "nowhere"), ("train.kills", "some")]
)
def test_the_commands_of_the_documents_say_how_they_are_used(name, wrong, capsys):
    command = importlib.import_module(f"tests.{name}")
    for arguments, code, text in ((["--help"], 0, "show this help"), ([wrong], 2, f"invalid .* '{wrong}'")):
        with pytest.raises(SystemExit) as end:
            command.main(arguments)
        assert end.value.code == code
        assert re.search(text, "".join(capsys.readouterr()))


FEATURES = (
    "strategies",
    "wrapping",
    "mixed_precision",
    "accumulation",
    "clipping",
    "offload",
    "activation_offload",
    "recomputation",
    "lora",
    "memory",
    "determinism",
)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_has_a_page_with_an_example_and_its_costs(feature):
    page = ROOT / "docs" / f"{feature}.md"
    assert blocks_of(page)
    assert re.search(r"^## What it costs|^## How exact it is", page.read_text(), re.MULTILINE)
