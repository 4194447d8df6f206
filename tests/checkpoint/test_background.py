"""A save in the background: what it does in the thread that trains, and that it is the state of its step."""

import sys
from collections import Counter
from pathlib import Path

import pytest

import shardrt
from shardrt import nn, optim
from shardrt.checkpoint import CheckpointError, CheckpointManager
from shardrt.checkpoint.pieces import pieces_of
from shardrt.comm import init_device_mesh, world
from shardrt.device.cpu import CPUDevice
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from tests import lab
from tests.checkpoint.test_checkpoints import everything, train
from tests.lab import Frozen, Net, shard
from tests.ranks import run_ranks

PACKAGE = Path(shardrt.__file__).parent


class Measured(nn.Module):
    """A net with a buffer that training moves."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.register_buffer("calls", (2,), 0.0)

    def forward(self, tokens):
        self.calls += 1
        return self.net(tokens)


def calls_of_start(root, sharded, blocks):
    """(file, function) of the package -> how often this thread calls it in a second `start`."""
    mesh = init_device_mesh("auto")
    model = Net(blocks)
    if sharded:
        fully_shard(model, mesh=mesh)
    optimizer = optim.AdamW(model.parameters())
    checkpoints = CheckpointManager(root, model, optimizer, mesh)
    checkpoints.start(1)
    checkpoints.wait()
    called = Counter()

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            called[path.stem, frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        checkpoints.start(2)
    finally:
        sys.setprofile(None)
    checkpoints.wait()
    return called


def test_a_start_is_one_copy_of_each_flat_array_whatever_lies_in_it(tmp_path):
    """Nothing in it grows with the model, and there are neither collectives nor file operations."""
    small = run_ranks(2, calls_of_start, tmp_path / "2", True, 2)
    large = run_ranks(2, calls_of_start, tmp_path / "9", True, 9)
    assert small == large
    for called in large:
        assert called["cpu", "copy"] == 3  # parameters, m, v
        assert {file for file, _ in called} == {
            "checkpoints",
            "manifest",
            "snapshot",
            "store",
            "cpu",
            "__init__",
            "untrusted",
        }
        assert called.total() < 20, called
    (plain,) = run_ranks(1, calls_of_start, tmp_path / "1", False, 2)
    assert plain["cpu", "copy"] == 3 * len(list(Net(2).parameters()))


CASES = {
    "plain": (Measured, None),
    "a buffer": (Measured, {}),
    "frozen": (Frozen, {"strategy": "SHARD_GRAD_OP"}),
    "bfloat16": (Net, {"mp_policy": MixedPrecisionPolicy("bfloat16")}),
    "in files": (Net, {"offload_policy": CPUOffloadPolicy(directory="offload")}),
    "on the host": (Net, {"offload_policy": CPUOffloadPolicy(step="host")}),
}


def saved_in_every_step(root, case, steps=3):
    """What this rank held after each step, and what it gets back; each save begins while one is under way."""
    make, settings = CASES[case]
    mesh = init_device_mesh("auto")
    shardrt.manual_seed(3)
    model = make() if settings is None else shard(make(), mesh, **settings)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    checkpoints = CheckpointManager(root, model, optimizer, mesh)
    held, restored = [], []
    for step in range(steps):
        train(model, optimizer, step, step + 1)
        held.append(everything(model, optimizer))
        checkpoints.start(step + 1)
    for piece in pieces_of(model, optimizer, saving=False):
        piece.array[...] = -1  # the last copy has been taken
    checkpoints.wait()
    for step in range(steps):
        checkpoints.restore(root / checkpoints.store.name(step + 1))
        restored.append(everything(model, optimizer))
    return held, restored


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_is_the_state_of_its_step(tmp_path, monkeypatch, size):
    monkeypatch.chdir(tmp_path)
    for case in CASES:
        if case == "plain" and size > 1:
            continue  # ranks of a plain model don't train together
        for held, restored in run_ranks(size, saved_in_every_step, tmp_path / case, case):
            lab.assert_equal(restored, held, case)
            assert all((held[0][0][0][3] != values[0][3]).any() for values, _ in held[1:]), case


def without_memory(root):
    model, mesh = lab.build()
    checkpoints = CheckpointManager(root, model, optim.AdamW(model.parameters()), mesh)
    checkpoints.start(1)
    with pytest.raises(CheckpointError, match=r"^step 1 was not saved: rank 1: MemoryError: no room$"):
        checkpoints.wait()
    checkpoints.start(2)
    return checkpoints.wait().name


def test_a_rank_without_memory_for_the_copy_tells_all_and_they_go_on(tmp_path, monkeypatch):
    pinned, refused = CPUDevice.pinned, []

    def refuse_once(self, count, dtype):
        if world.current().rank == 1 and not refused:
            refused.append(count)
            raise MemoryError("no room")
        return pinned(self, count, dtype)

    monkeypatch.setattr(CPUDevice, "pinned", refuse_once)
    assert run_ranks(3, without_memory, tmp_path / "c") == ["step-00000002"] * 3
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-00000002"]
