"""Learning rates of a step: their ends, their shapes, and PyTorch's where it has the same."""

import numpy as np
import pytest

from shardrt.optim import warmup_cosine, warmup_linear, warmup_stable_decay

SHAPE = {"lr": 2.0, "min_lr": 0.5, "warmup_steps": 4, "total_steps": 20}
SCHEDULES = {
    "cosine": warmup_cosine,
    "linear": warmup_linear,
    "wsd": lambda step, **shape: warmup_stable_decay(step, decay_steps=6, **shape),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_warms_up_in_a_line_falls_and_stays_at_its_least(name):
    rates = [SCHEDULES[name](step, **SHAPE) for step in range(25)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert all(later <= earlier for earlier, later in zip(rates[4:], rates[5:], strict=False))
    assert rates[20:] == [0.5] * 5
    assert [SCHEDULES[name](step, **{**SHAPE, "warmup_steps": 0}) for step in (0, 20)] == [2.0, 0.5]


@pytest.mark.torch
def test_the_line_is_that_of_torch():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    theirs = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.25, total_iters=16)
    for step in range(4, 24):
        assert warmup_linear(step, **SHAPE) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


def test_wsd_is_stable_until_the_decay_however_long_the_run():
    decay = {"lr": 1.0, "min_lr": 0.0, "warmup_steps": 2, "decay_steps": 4}
    rates = [warmup_stable_decay(step, total_steps=10, **decay) for step in range(10)]
    np.testing.assert_allclose(rates, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    longer = [warmup_stable_decay(step, total_steps=14, **decay) for step in range(14)]
    assert longer[:7] == rates[:7] and longer[10:] == rates[6:]
    assert warmup_stable_decay(9, total_steps=10, **{**decay, "decay_steps": 0}) == 1.0
