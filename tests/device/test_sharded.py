"""A sharded model on the simulated device: the real schedule, whose buffers are those of the plan."""

from collections import Counter

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from shardrt import device, nn, optim
from shardrt import functional as F
from shardrt.comm import init_device_mesh, world
from shardrt.comm.simulated import world_of
from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import HOST, Free, HostWait, Record, Take, Wait, Work
from shardrt.device.simulated import SimulatedDevice
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, memory_plan, no_sync
from shardrt.fsdp.roles import ROLES

TOKENS = np.random.default_rng(0).integers(0, 64, (4, 32))
BF16 = MixedPrecisionPolicy(param_dtype="bfloat16")
LOW = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="bfloat16")
SETTINGS = {
    "cpu": (CPUDevice, {}),
    "cpu, 16 bits": (CPUDevice, {"mp_policy": LOW}),
    "cpu, offloaded": (CPUDevice, {"offload_policy": CPUOffloadPolicy()}),
    "cuda": (CUDADevice, {}),
    "cuda, 16 bits": (CUDADevice, {"mp_policy": BF16}),
    "cuda, 16 bits, offloaded": (CUDADevice, {"mp_policy": LOW, "offload_policy": CPUOffloadPolicy()}),
    "cpu, offloaded to files": (CPUDevice, {"offload_policy": CPUOffloadPolicy(directory="nowhere")}),
    "cuda, updated on the host": (CUDADevice, {"offload_policy": CPUOffloadPolicy(step="host")}),
}


def sharded(here, **settings):
    mesh = init_device_mesh(here)
    shardrt.manual_seed(1)
    model = GPT(GPTConfig(2, 2, 64, 64, 64, 0.1))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def step(model, optimizer, accumulate=False):
    if accumulate:
        with no_sync(model):
            F.cross_entropy(model(TOKENS), TOKENS).backward()
    F.cross_entropy(model(TOKENS), TOKENS).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(autouse=True)
def cpu_again():
    yield
    device.set_current(device.get("cpu"))


def alive(program):
    """Bytes lent and not given back, by place and category."""
    lent = {}
    for item in program.items:
        if isinstance(item, Take):
            lent[item.memory.start] = item
        elif isinstance(item, Free):
            lent.pop(item.start)
    held = Counter()
    for item in lent.values():
        held[item.place, item.category] += item.memory.stop - item.memory.start
    return held


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, False), (6, True), (16384, False)])
@pytest.mark.parametrize("name", SETTINGS)
def test_buffers_are_those_of_the_plan_to_the_byte(name, ranks, accumulate):
    like, settings = SETTINGS[name]
    here = SimulatedDevice(like)
    # One rank a node: memory that ranks share is counted in parts.
    with world.use(world_of(ranks, here, rank=ranks - 1, local_size=1)):
        model = sharded(here, **settings)
        plan = memory_plan(model, no_sync=accumulate)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        step(model, optimizer, accumulate)
    held = alive(here.program)
    planned = {("device", name): n for name, n in plan.device.items()}
    planned |= {("host", name): n for name, n in plan.host.items()}
    known = {*(role.category for role in ROLES.values()), "optimizer state", "staging of the optimizer"}
    assert {key: n for key, n in held.items() if key[1] in known} == planned
    assert sum(n for key, n in held.items() if key[1] not in known) < 1000  # a few numbers


def test_work_of_each_stream_is_ordered_by_events_with_what_it_needs():
    here = SimulatedDevice(CUDADevice)
    model = sharded(here, mp_policy=LOW, offload_policy=CPUOffloadPolicy())
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer)
    items = here.program.items
    streams = {item.stream for item in items if isinstance(item, Work)}
    assert {"compute", "gather", "reduce", "upload", "download", "optimizer"} <= streams
    marks = {item.mark for item in items if isinstance(item, Record)}
    assert {item.mark for item in items if isinstance(item, Wait | HostWait)} <= marks
    assert {item.label for item in items if isinstance(item, Work) and item.stream == "upload"} == {
        f"upload {label}" for label in ("(root)", "blocks.0", "blocks.1")
    }
    clipping = {item.stream for item in items if isinstance(item, Work) and item.name == "elementwise.scale_"}
    assert clipping == {HOST}, "gradients on the host are clipped there"
