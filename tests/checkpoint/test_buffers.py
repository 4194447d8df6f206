"""Running statistics in state dicts and checkpoints: whole, once, the same on all ranks after a restore."""

import numpy as np
import pytest

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import CheckpointManager, full_state_dict, load, save
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from tests import lab
from tests.ranks import run_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.conv(x))


def trained(together, steps=2):
    """(model, its mesh, optimizer): each rank has batches of its own, so statistics of its own."""
    shardrt.manual_seed(2)
    model, mesh = Net(), init_device_mesh("auto")
    if together:
        nn.synchronise_batch_norm(model, mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        x = np.random.default_rng((step, mesh.rank)).normal(size=(2, 1, 3, 3)).astype("float32")
        (model(x) ** 3).sum().backward()
        lab.update(optimizer)
    return model, mesh, optimizer


def buffers(model):
    return {name: np.array(values) for name, values in model.named_buffers()}


def save_run(root, together):
    model, mesh, optimizer = trained(together)
    CheckpointManager(root, model, optimizer, mesh).save(2)
    save(root / "weights", model, step=2)
    return buffers(model), full_state_dict(model)


def restore_run(root):
    model, mesh, optimizer = trained(False, steps=0)
    assert CheckpointManager(root, model, optimizer, mesh).restore()[0] == 2
    restored = buffers(model)
    other, _, _ = trained(False, steps=0)
    assert load(root / "weights", other) == 2
    return restored, buffers(other)


@pytest.mark.parametrize("together", [False, True])
def test_a_checkpoint_holds_rank_0s_statistics_and_gives_them_to_everyone(tmp_path, together):
    saved = run_ranks(2, save_run, tmp_path, together)
    first, second = (held for held, _ in saved)
    equal = all((first[name] == second[name]).all() for name in first)
    assert equal == together
    assert first["norm.running_mean"].any()
    assert list(saved[0][1]) == [
        *("conv.weight", "conv.bias", "norm.weight", "norm.bias"),
        *("norm.running_mean", "norm.running_var"),
    ]
    for size in (1, 3):
        for pair in run_ranks(size, restore_run, tmp_path):
            lab.assert_equal(pair, (first, first))


def test_a_recomputed_forward_moves_running_statistics_once():
    from shardrt.recompute import checkpoint

    x = np.random.default_rng(0).normal(size=(4, 1, 3, 3)).astype("float32")
    found = []
    for again in (False, True):
        shardrt.manual_seed(2)
        model = Net()
        if again:
            checkpoint(model)
        F.sum(model(x) ** 3).backward()
        found.append((buffers(model), {name: p.grad for name, p in model.named_parameters()}))
    lab.assert_equal(*found)


def test_a_state_dict_that_does_not_fit_is_an_error():
    model = Net()
    state = {name: np.array(values) for name, values in model.state_dict().items()}
    for name, values in state.items():
        state[name] = values + 1
    model.load_state_dict(state)
    np.testing.assert_array_equal(model.norm.running_var, np.full(3, 2))
    with pytest.raises(ValueError, match=r"missing keys \['norm.running_mean'\]"):
        model.load_state_dict({name: v for name, v in state.items() if name != "norm.running_mean"})
    with pytest.raises(
        ValueError, match=r"buffer 'norm.running_var': values must have shape \(3,\), got \(4,\)"
    ):
        model.load_state_dict(state | {"norm.running_var": np.zeros(4, np.float32)})
