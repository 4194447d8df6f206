"""memory_plan before the first step: it takes nothing, changes nothing, and says what it cannot know.

That its numbers are right is held by tests/mpi/memory.py, where every rank is a process.
"""

import gc
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import psutil
import pytest

from models.gpt import GPT, GPTConfig
from shardrt import Tensor, device, nn, optim
from shardrt import functional as F
from shardrt.activation_offload import offload_activations
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.device.cpu import CPUDevice
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
    memory_plan,
    units,
)
from shardrt.fsdp.boundary import unit_of
from shardrt.fsdp.policy import OffloadPolicy, Precision, Settings
from shardrt.recompute import checkpoint_blocks
from tests import lab
from tests.fsdp.recorder import Recorder
from tests.lab import Net

TOKENS = np.random.default_rng(0).integers(0, 11, (4, 16))


def gpt(width=64, layers=2, vocab=64, dropout=0.0, **settings):
    model = lab.seeded(lambda: GPT(GPTConfig(layers, 2, width, 64, vocab, dropout)), 1)
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def backward_of(model):
    return lambda: F.cross_entropy(model(TOKENS), TOKENS).backward()


def trained(model, steps=2):
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        backward_of(model)()
        lab.update(optimizer)
    return full_state_dict(model)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("raises", [False, True])
def test_a_plan_leaves_the_model_and_the_random_numbers_as_they_were(raises, steps):
    """Before the first step and later, whether the step that is planned ends or raises."""

    def step():
        backward_of(model)()
        if raises:
            raise KeyError("mine")

    model = gpt(dropout=0.3)
    trained(model, steps)
    expected = trained(model)
    fresh = memory_plan(model := gpt(dropout=0.3), step=backward_of(model))
    model = gpt(dropout=0.3)
    trained(model, steps)
    with pytest.raises(KeyError, match="mine") if raises else nullcontext():
        assert memory_plan(model, step=step) == fresh
    lab.assert_equal(trained(model), expected)


def test_a_step_is_planned_under_the_schedule_that_runs_it():
    events = []
    model = gpt(layers=3)
    unit_of(model).observers.append(lambda schedule: Recorder(events))
    memory_plan(model, step=backward_of(model))
    planned = events.copy()
    events.clear()
    backward_of(model)()
    assert planned == events and ("reduce", units(model)[2].label) in events


@pytest.mark.skipif(sys.platform != "linux", reason="how resident memory is counted")
def test_planning_two_gigabytes_takes_a_few_megabytes():
    model = gpt(width=1024, layers=8, vocab=8192)
    tokens = np.zeros((8, 64), np.int64)
    memory_plan(small := gpt(), step=backward_of(small))  # imports
    before = psutil.Process().memory_info().rss
    plan = memory_plan(model, step=lambda: F.cross_entropy(model(tokens), tokens).backward())
    taken = psutil.Process().memory_info().rss - before
    assert plan.device_bytes > 2e9 and taken < 60e6, (plan.device_bytes, taken)


def test_what_a_plan_was_made_on_goes_with_it():
    model, seen = gpt(), []
    for block in model.blocks:
        offload_activations(block)

    def step():
        seen.append(weakref.ref(device.current()))
        backward_of(model)()

    memory_plan(model, step=step)
    for _ in range(2):  # arrays, which the collector does not look into, and then what they held
        gc.collect()
    assert seen[0]() is None


def test_categories_say_where_things_are():
    offloaded = memory_plan(gpt(offload_policy=CPUOffloadPolicy()))
    plain = memory_plan(gpt())
    assert set(offloaded.host) == {"sharded parameters", "sharded gradients", "optimizer state"}
    assert not plain.host
    assert "staging of the optimizer" in offloaded.device and "staging of the optimizer" not in plain.device
    assert "activations" not in plain.device


@pytest.mark.parametrize("sharded", ["one", "blocks"])
def test_forwards_in_flight_are_recomputed_in_a_plan(sharded):
    """As they are in a pipeline: one backward comes between the forwards of others."""

    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    checkpoint_blocks(list(model)[1:])
    for block in model if sharded == "blocks" else ():
        fully_shard(block)
    fully_shard(model)

    def forward(rows):
        return model(Tensor(np.ones((rows, 8), np.float32))).sum()

    def step():
        first, second = forward(2), forward(3)
        first.backward()
        third = forward(2)
        for late in (second, third):
            late.backward()

    memory_plan(model, step=step)
    step()
    assert memory_plan(model, step=step).device == memory_plan(model, step=step).device


def test_ignored_parameters_are_in_the_plan():
    net = Net()
    fully_shard(net, ignored=[net.blocks[0]])
    nbytes = 4 * sum(p.size for p in net.blocks[0].parameters())
    assert memory_plan(net).device["ignored parameters"] == nbytes
    assert memory_plan(lab.build()[0]).device.get("ignored parameters") is None


test_a_model_without_units_is_refused = lab.refusals(
    (lambda: memory_plan(Net()), ValueError, "Net has no sharded unit; call fully_shard first")
)


def test_the_plan_is_readable():
    text = str(memory_plan(gpt()))
    assert text.splitlines()[0].split() == ["place", "what", "MB", "per", "rank"]
    assert "device  optimizer state" in text and "together" in text


@lab.on_ranks(1)
def test_a_plan_leaves_running_statistics_as_they_are():
    model = fully_shard(nn.Sequential(nn.BatchNorm2d(3)))
    images = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)
    memory_plan(model, step=lambda: model(Tensor(images)).sum().backward())
    buffers = {name: np.array(values) for name, values in model.named_buffers()}
    assert (buffers["0.running_mean"] == 0).all() and (buffers["0.running_var"] == 1).all()


class InBfloat16(CPUDevice):
    """It computes in 16 bits, as GPUs do."""

    @staticmethod
    def compute_dtype(name):
        return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def test_a_step_in_bfloat16_can_be_planned_and_takes_half_of_one_in_float32():
    mesh, planned = init_device_mesh(InBfloat16()), {}
    try:
        for name in (None, "bfloat16"):
            model = gpt(512, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=name))
            planned[name] = memory_plan(model, step=backward_of(model)).device["activations"]
    finally:
        device.set_current(device.get("cpu"))
    assert 0.45 * planned[None] < planned["bfloat16"] < 0.6 * planned[None]


@pytest.mark.parametrize(
    ("ranks", "coordinate", "strategy", "expected"),
    [
        ([0, 2, 4, 6], (1,), "FULL_SHARD", 2),  # beside tensor parallelism over two ranks
        ([0, 1, 2, 3, 4, 5, 6, 7], (5,), "FULL_SHARD", 4),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], (1, 2), "HYBRID_SHARD", 4),
        ([[0, 4], [1, 5]], (1, 0), "HYBRID_SHARD", 1),
        ([[0, 1], [4, 5]], (1, 0), "FULL_SHARD", 2),
    ],
)
def test_the_shards_on_a_node_are_counted_by_the_mesh(ranks, coordinate, strategy, expected):
    """On two nodes of four ranks each: a buffer that a node shares is counted once for each node."""
    mesh = SimpleNamespace(ranks=np.array(ranks), coordinate=coordinate)
    settings = Settings(mesh, ShardingStrategy[strategy], None, None, Precision(), OffloadPolicy())
    assert settings.shards_on_node(4) == expected
