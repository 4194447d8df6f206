"""Ranks save columns of a parameter as runs, and ranks with other parts of it restore them."""

import json

import numpy as np
import pytest

import shardrt
from shardrt import nn, optim
from shardrt.checkpoint import CheckpointManager, set_optimizer_state_dict, verify
from shardrt.comm import init_device_mesh, thread
from shardrt.nn.extents import Extent, contiguous, cut, size_of
from shardrt.nn.storage import Storage

ROWS, COLUMNS = 6, 8
WHOLE = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


class Extents(Storage):
    """What a rank has of a parameter: `part`, as a tensor-parallel layer would say."""

    gradient = None
    owner = lambda self, first: True  # noqa: E731
    full = edge = gradient_target = zero_grad = lambda self, *args: None

    def __init__(self, parameter, part):
        self._part, self._shard = part, np.zeros(size_of(part), np.float32)
        parameter.fill(self._shard, part)
        parameter.storage = self

    @property
    def shard(self):
        return self._shard

    def range_of(self, parameter):
        return 0, self._shard.size

    def extents_of(self, parameter):
        return self._part


def columns(rank, ranks):
    """Columns that are cut again, as sharding cuts them: a begin of a run, whole runs, the rest of one."""
    wide = COLUMNS // 2
    mine = (Extent(rank % 2 * wide, wide, COLUMNS, ROWS),)
    half = size_of(mine) // 2 + 1
    return mine if ranks == 2 else cut(mine, rank // 2 * half, (rank // 2 + 1) * half)


def rows(rank, ranks):
    return contiguous(rank * ROWS // ranks * COLUMNS, ROWS // ranks * COLUMNS)


def made(folder, part_of):
    mesh = init_device_mesh("auto")
    shardrt.manual_seed(3)
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    part = part_of(mesh.rank, mesh.size)
    Extents(model.weight, part)
    optimizer = optim.AdamW(model.parameters())
    return model, part, optimizer, CheckpointManager(folder, model, optimizer, mesh)


def elements(part):
    return [
        first + i for runs in part for first in map(runs.begin, range(runs.count)) for i in range(runs.length)
    ]


def saved(folder, part_of):
    model, part, optimizer, checkpoints = made(folder, part_of)
    model.weight.load(WHOLE)
    (piece,) = optimizer.slices
    piece.state["m"][:] = -WHOLE.ravel()[elements(part)]
    piece.set_steps([5])
    checkpoints.save(1)


def restored(folder, part_of):
    model, part, optimizer, checkpoints = made(folder, part_of)
    checkpoints.restore()
    (piece,) = optimizer.slices
    expected = WHOLE.ravel()[elements(part)]
    return np.array_equal(model.weight.shard, expected) and np.array_equal(piece.state["m"], -expected)


@pytest.mark.parametrize("ranks, part_of, number", [(2, columns, 2), (4, columns, 2), (3, rows, 1)])
def test_what_ranks_save_by_parts_ranks_with_other_parts_restore(tmp_path, ranks, part_of, number):
    thread.run(ranks, saved, tmp_path, part_of)
    manifest = json.loads((tmp_path / "step-00000001" / "manifest.json").read_bytes())
    assert manifest["format"] == number
    assert number == 2 or {len(row) for row in manifest["pieces"]} == {6}  # as earlier versions read
    verify(tmp_path / "step-00000001")
    for others, theirs in ((1, rows), (3, rows), (2, columns), (4, columns)):
        assert all(thread.run(others, restored, tmp_path, theirs)), (others, theirs)


def initial(part_of):
    model, part, optimizer, _ = made(".", part_of)
    (piece,) = optimizer.slices
    moment = WHOLE * 2
    state = {"state": {"weight": {"step": 3, "exp_avg": moment, "exp_avg_sq": moment}}}
    groups = [{"lr": 0.1, "params": ["weight"]}]
    set_optimizer_state_dict(model, optimizer, {**state, "param_groups": groups})
    where = elements(part)
    return where, np.array(model.weight.shard), np.array_equal(piece.state["m"], moment.ravel()[where])


def test_initial_values_and_the_optimizers_state_are_those_of_the_part():
    ((_, whole, _),) = thread.run(1, initial, rows)
    for where, values, equal in thread.run(4, initial, columns):
        np.testing.assert_array_equal(values, whole[where])
        assert equal
