"""Low-bit optimizer state on the host: the same bits as on the device, in parts, and the planned bytes."""

import numpy as np
import pytest

from shardrt.checkpoint import full_state_dict
from shardrt.comm import world
from shardrt.device.cuda import CUDADevice
from shardrt.device.simulated import SimulatedDevice
from shardrt.fsdp import CPUOffloadPolicy, memory_plan
from shardrt.nn.storage import Offloaded
from shardrt.optim import offload
from shardrt.optim.low_bit import AdamW8bit, AdamWBF16, EightBit, Lion8bit, LionBF16, with_scales
from shardrt.optim.low_bit.scales import Scales
from shardrt.train.job import _KINDS
from tests import lab
from tests.device.test_sharded import alive, cpu_again, sharded, step, world_of  # noqa: F401
from tests.optim.storages import HostStorage, assert_same_bits, gradients
from tests.optim.test_8bit import ADAMW as EIGHT
from tests.optim.test_8bit import at_step, made, moments
from tests.optim.test_bfloat16 import ADAMW as SIXTEEN

SIZES = (368, 1504, 2608, 992, 37)  # each begins with a block
OPTIMIZERS = [AdamW8bit, Lion8bit, AdamWBF16, LionBF16]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Parameters straddle several."""
    monkeypatch.setattr(offload, "CHUNK", 1024)


def train(make, placement=None, **settings):
    storage = HostStorage(placement, SIZES)
    optimizer = make(storage.groups(), lr=0.01, weight_decay=0.1, **settings)
    for gradient in gradients(3, SIZES):
        optimizer.zero_grad()
        storage.reduce(gradient)
        optimizer.step()
    state = [(name, array) for piece in optimizer.slices for name, array in piece.state.items()]
    found = {name: array.array if isinstance(array, Scales) else array for name, array in state}
    return {name: np.array(array) for name, array in {"shard": storage.shard, **found}.items()}


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_update_of_what_is_on_the_host_changes_no_bit(make, tmp_path):
    expected = train(make)
    everything = (True, True, True)
    for how in (("device",), ("host",), ("device", tmp_path)):
        assert_same_bits(train(make, Offloaded(*everything, *how)), expected)
    for placement in ((True, False, False), (False, False, True)):
        assert_same_bits(train(make, Offloaded(*placement)), expected)
    assert_same_bits(train(make, in_backward=True), expected)


PLACES = {"device": None, "host": CPUOffloadPolicy(), "updated on the host": CPUOffloadPolicy(step="host")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_memory_is_what_the_training_command_plans_to_the_byte(make, place):
    here = SimulatedDevice(CUDADevice)
    with world.use(world_of(3, here, rank=2, local_size=1)):
        model = sharded(here, offload_policy=PLACES[place])
        each, encoded = (
            dict((kind, nbytes) for kind, nbytes in _KINDS.values())[make],
            issubclass(make, EightBit),
        )
        plan = memory_plan(model, optimizer_states=each / 4)
        plan = with_scales(plan, on_host=place == "updated on the host") if encoded else plan
        optimizer = make(model.parameters(), lr=1e-3)
        step(model, optimizer, False)
    held = alive(here.program)
    for name in ("optimizer state", "staging of the optimizer"):
        for where, planned in (("device", plan.device), ("host", plan.host)):
            assert held[where, name] == planned.get(name, 0), (where, name)
    assert held["device", "optimizer state"] + held["host", "optimizer state"] > 1000


def saved(policy, optimizer, folder, restores=False):
    """Weights and moments after a step; from a checkpoint, or with a checkpoint after it."""
    model, own = made(optimizer, offload_policy=policy)
    checkpoints = at_step(folder, model, own)
    if restores:
        checkpoints.restore()
    lab.backward(model, None, lab.batches(4)[int(restores)])
    lab.update(own)
    if not restores:
        checkpoints.save(1)
    return full_state_dict(model), moments(model, own)


@pytest.mark.parametrize("optimizer", [EIGHT, SIXTEEN], ids=["AdamW8bit", "AdamWBF16"])
def test_checkpoints_load_where_state_is_on_the_host_and_where_not(optimizer, tmp_path):
    for policy in (None, CPUOffloadPolicy(), CPUOffloadPolicy(step="host")):
        lab.first(2, saved, policy, optimizer, tmp_path / str(policy))
    found = [
        lab.first(2, saved, policy, optimizer, tmp_path / str(written), True)
        for policy, written in ((None, CPUOffloadPolicy()), (CPUOffloadPolicy(step="host"), None))
    ]
    lab.assert_equal(*found)
