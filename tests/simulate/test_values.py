"""What the host reads of a simulated device decides which way a program goes."""

import numpy as np
import pytest

from shardrt import device, nn, optim
from shardrt import functional as F
from shardrt.device.program import HostRead, Work
from shardrt.device.simulated import SimulatedDevice
from shardrt.simulate.values import Values

INPUTS = np.ones((4, 6), np.float32)


def step(values, scaled):
    """The names of the kernels of a step, and (why, file) of what the host has read."""
    here = SimulatedDevice(values=values)
    with device.use(here):
        model = nn.Linear(6, 3)
        optimizer, scaler = optim.AdamW(model.parameters(), lr=1e-3), optim.GradScaler(enabled=scaled)
        loss = F.mse_loss(model(INPUTS), INPUTS[:, :3])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e4)
        scaler.step(optimizer)
        scaler.update()
        assert float(loss) == values.loss
    names = {item.name for item in here.program.items if isinstance(item, Work)}
    read = {(i.why, i.site.rpartition(":")[0]) for i in here.program.items if isinstance(i, HostRead)}
    return names, read


@pytest.mark.parametrize("clips", [True, False])
def test_gradients_are_clipped_where_the_norm_is_large(clips):
    names, read = step(Values(clips=clips, loss=2.5), scaled=False)
    assert ("elementwise.scale_" in names) == clips and "adamw.step" in names
    assert {why for why, _ in read} == {"norm", "loss"}
    assert ("norm", "shardrt/nn/utils.py") in read and not any("tensor.py" in file for _, file in read)


@pytest.mark.parametrize("overflow", [True, False])
def test_an_overflow_leaves_the_update_out(overflow):
    names, read = step(Values(overflow=overflow), scaled=True)
    assert ("adamw.step" in names) != overflow
    assert ("finite", "shardrt/optim/scaler.py") in read


def test_a_norm_that_the_training_loop_reads_late_is_no_loss():
    for dtype, found in {np.float64: (1e12, "norm"), np.float32: (1.0, "loss")}.items():
        assert Values()("shardrt/train/loop.py:7", np.dtype(dtype), "", None) == found
