"""A checkpoint of PyTorch's FSDP2 in torchtitan's names goes on here, and back: the page, and numbers."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models.llama import Block, Llama, LlamaConfig
from shardrt import functional as F
from shardrt import optim
from shardrt.__main__ import main
from shardrt.checkpoint import CheckpointManager
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import by_class, wrap
from tests import lab
from tests.lab import jobs
from tests.ranks import mpirun_path

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "convert.md").read_text()
CONFIG = LlamaConfig(
    n_layer=2,
    n_head=4,
    n_kv_head=2,
    n_embd=32,
    n_hidden=48,
    block_size=32,
    vocab_size=256,
    tied=False,
    norm_eps=1e-6,
    rope_theta=10000.0,
)
STEPS = 10
# What the recipe of a run says: the settings of the optimizer, which a checkpoint has from there.
RECIPE = {
    "architecture": "llama",
    "model": vars(CONFIG),
    "steps": 100,
    "optimizer": {
        "name": "adamw",
        "lr": 1e-3,
        "min_lr": 1e-3,
        "warmup_steps": 0,
        "weight_decay": 0.1,
        "betas": [0.9, 0.95],
    },
}


def torch_trains(folder: Path, first: int, last: int) -> list[float]:
    """Run PyTorch from one step to another on 2 ranks; returns the losses."""
    script = ROOT / "tests" / "exchange" / "titan_run.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += [str(script), str(folder), str(first), str(last)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / f"losses-{last}.json").read_text())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """PyTorch's checkpoint after 5 steps, and its model's config.json."""
    folder = tmp_path_factory.mktemp("titan")
    torch_trains(folder, 0, 5)
    return folder


def test_the_page_works_as_printed(checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoints, tmp_path / "outputs" / "checkpoint")
    shutil.copy(checkpoints / "config.json", tmp_path)
    Path("my.txt").write_text(jobs.TEXT)
    Path("titan.toml").write_text(re.search(r"```toml\n(architecture.*?)```", PAGE, re.DOTALL)[1])
    commands = re.findall(r"^    ((?:shardrt|mpirun) .*)$", PAGE, re.MULTILINE)
    assert len(commands) == 3
    shown = []
    for command in commands:
        done = subprocess.run(words_of(command), capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        shown.append(done.stdout)
    assert shown[0] in PAGE.replace("```text\n", ""), shown[0]
    assert "resumed from step 5" in shown[1] and "another program" in shown[1]
    assert "dataloader: torchtitan needs it in checkpoint.exclude_from_loading" in shown[2]
    assert len(torch_trains(tmp_path / "outputs" / "checkpoint", 10, 11)) == 1


def words_of(command: str) -> list[str]:
    """A command of the page with this environment's programs."""
    shard = f"{sys.executable} -m shardrt"
    return shlex.split(
        re.sub(r"\bshardrt (ckpt|train)", rf"{shard} \1", command).replace("mpirun", mpirun_path(), 1)
    )


def test_ten_steps_after_each_conversion_are_those_of_the_program_that_was_left(checkpoints, tmp_path):
    """To 1e-5: PyTorch's own ten steps and ours, ours and PyTorch's."""
    titan, ours = tmp_path / "titan", tmp_path / "ours"
    shutil.copytree(checkpoints, titan)
    config = ["--config", str(titan / "config.json")]
    assert main(["ckpt", "convert", str(titan / "step-5"), str(ours), "--to", "shardrt", *config]) == 0
    wanted = torch_trains(titan, 5, 5 + STEPS)
    losses = thread.run(2, shardrt_trains, ours, 5 + STEPS)[0]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_alike(titan / "step-15", ours, tmp_path, 1e-5)
    back = titan / "back" / "step-15"
    convert = [
        "ckpt",
        "convert",
        str(ours),
        str(back),
        "--to",
        "dcp",
        "--dialect",
        "torchtitan",
        "--ranks",
        "3",
    ]
    assert main([*convert, *config]) == 0
    wanted = thread.run(1, shardrt_trains, ours, 15 + STEPS)[0]
    np.testing.assert_allclose(torch_trains(titan / "back", 15, 15 + STEPS), wanted, rtol=1e-5)
    assert_alike(titan / "back" / "step-25", ours, tmp_path, 1e-5)


def shardrt_trains(folder: Path, last: int) -> list[float]:
    """Go on from the newest checkpoint to step `last`, which is saved; returns the mean losses."""
    from tests.exchange.titan_run import batch

    mesh = init_device_mesh("auto")
    model = wrap(Llama(CONFIG), by_class(Block), mesh=mesh)
    optimizer = optim.AdamW(optim.decay_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.95))
    manager = CheckpointManager(folder / "checkpoints", model, optimizer, mesh)
    first, _ = manager.restore()
    losses = []
    for step in range(first, last):
        (tokens,) = lab.rows(mesh, batch(step))
        loss = F.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        lab.update(optimizer)
        losses.append(loss.item())
    manager.save(last, {"config": RECIPE})
    means = mesh.communicator("control")
    return [sum(all_) / mesh.size for all_ in zip(*_gathered(means, losses), strict=True)]


def _gathered(control, losses):
    from shardrt.comm import objects

    return objects.all_gather_object(control, losses)


def assert_alike(titan: Path, ours: Path, scratch: Path, tolerance: float) -> None:
    """Weights and moments of PyTorch's checkpoint and the newest of ours, converted."""
    from shardrt.checkpoint.command import _found, _Values

    other = scratch / f"again-{titan.name}"
    config = ["--config", str(titan.parent / "config.json")]
    if not Path(config[1]).exists():
        config[1] = str(titan.parents[1] / "config.json")
    assert main(["ckpt", "convert", str(titan), str(other), "--to", "shardrt", *config]) == 0
    with _Values(_found(ours)[0]) as one, _Values(_found(other)[0]) as two:
        assert one.manifest.steps == two.manifest.steps
        for name in one.manifest.parameters:
            for kind in ("parameter", "m", "v"):
                a, b = one.whole(kind, name), two.whole(kind, name)
                scale = max(np.abs(b).max(), 1e-3)
                np.testing.assert_allclose(a, b, atol=tolerance * scale * 10, err_msg=f"{kind} {name}")
