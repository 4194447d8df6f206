"""The wheel holds shardrt alone, lives beside the other package called kernels, and trains."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.ranks import clean_environment

ROOT = Path(__file__).parent.parent

TRAINS = """
import kernels, numpy as np, shardrt
from shardrt import functional as F, optim
from shardrt.fsdp import fully_shard
from shardrt.models.gpt import GPT, GPTConfig
assert callable(kernels.get_kernel)
model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64))
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = optim.AdamW(model.parameters(), lr=1e-2)
tokens = np.arange(64).reshape(4, 16) % 7
losses = []
for _ in range(10):
    loss = F.cross_entropy(model(tokens), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.7 * losses[0], losses
print("trained", shardrt.__file__)
"""


def _run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, **options)
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
    assert any(name.startswith("shardrt/models/configs/") and name.endswith(".toml") for name in names)


@pytest.mark.slow
def test_the_wheel_trains_beside_the_other_kernels(wheel, tmp_path):
    _run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    environment = clean_environment()
    del environment["PYTHONPATH"]
    _run(python, "-m", "pip", "install", "-q", wheel, "kernels", env=environment)
    output = _run(python, "-c", TRAINS, cwd=tmp_path, env=environment)
    assert "trained" in output and str(tmp_path) in output
