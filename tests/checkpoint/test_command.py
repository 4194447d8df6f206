"""`python -m shardrt ckpt`, as a shell sees it."""

import numpy as np
import pytest

from shardrt import nn, optim
from shardrt.__main__ import main
from shardrt.checkpoint import CheckpointManager, load
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard


def save(root, size, lr):
    def rank():
        model = nn.Linear(5, 3)
        for parameter in model.parameters():
            parameter.data = np.full(parameter.shape, 4.0, np.float32)
        fully_shard(model, mesh=init_device_mesh("auto"))
        checkpoints = CheckpointManager(
            root, model, optim.AdamW(model.parameters()), init_device_mesh("auto")
        )
        for step in (1, 2):
            checkpoints.save(step, {"config": {"lr": lr}})
        with np.errstate(all="ignore"):
            model.load_state_dict({n: np.full(p.shape, 4.5, np.float32) for n, p in model.named_parameters()})
        checkpoints.save(3, {"config": {"lr": lr}})

    thread.run(size, rank)


@pytest.fixture
def run(tmp_path):
    """A run with three checkpoints of two ranks; the last has other weights."""
    save(tmp_path / "run" / "checkpoints", 2, 0.1)
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def folder(tmp_path):
    (tmp_path / "run").mkdir()


def test_ls(run, capsys):
    assert main(["ckpt", "ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["3", "2", "1"]
    assert all(line.endswith("2 ranks") for line in lines)


def test_verify(run, capsys):
    assert main(["ckpt", "verify", str(run)]) == 0
    file = run / "checkpoints" / "step-00000002" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert main(["ckpt", "verify", str(run / "checkpoints")]) == 65
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line.split()[1] for line in lines] == ["whole", "DAMAGED", "whole"]
    assert "rank-00001.safetensors: bytes 0 to" in lines[1]


def test_diff(run, tmp_path, capsys):
    save(tmp_path / "other", 3, 0.2)
    first = str(run / "checkpoints" / "step-00000001")
    assert main(["ckpt", "diff", first, first]) == 0
    assert capsys.readouterr().out == "the same\n"
    assert main(["ckpt", "diff", first, str(tmp_path / "other")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "step: 1 and 3",
        "config.lr: 0.1 and 0.2",
        "parameter of bias: differs by up to 0.5",
        "parameter of weight: differs by up to 0.5",
    ]


def test_prune(run, capsys):
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) == 0
    assert capsys.readouterr().out == "removed steps 2, 1\n"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]


def test_export(run, tmp_path, capsys):
    (tmp_path / "weights").mkdir()
    file = tmp_path / "weights" / "model.safetensors"
    assert main(["ckpt", "export", str(run), str(file)]) == 0
    assert "2 tensors" in capsys.readouterr().out
    model = nn.Linear(5, 3)
    assert load(file.parent, model) == 3
    assert (model.weight.data == 4.5).all() and (model.bias.data == 4.5).all()
    assert main(["ckpt", "export", str(run), str(file)]) == 65
    assert capsys.readouterr().err == f"error: {file}: File exists\n"


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["export"]])
def test_where_there_is_nothing_that_is_one_line(tmp_path, command, capsys):
    more = [str(tmp_path / "x")] if command == ["export"] else []
    assert main(["ckpt", *command, str(tmp_path), *more]) == 65
    assert capsys.readouterr().err == f"error: {tmp_path}: No checkpoint here\n"
