"""AdamW and SGD beside torch.optim, on plain parameters: same gradients in, same parameters out."""

import numpy as np
import pytest

from shardrt import nn, optim

pytestmark = pytest.mark.torch

SHAPES = [(1,), (7, 5), (33,), (4, 3, 2), (1000,)]
STEPS = 20


def trajectories(make_ours, make_theirs, dtype):
    """Parameters after each step from both, under equal gradients; the learning rate halves on the way."""
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    start = [generator.normal(size=shape).astype(dtype) for shape in SHAPES]
    ours = [nn.Parameter(shape, nn.init.Zeros(), dtype=dtype) for shape in SHAPES]
    for parameter, values in zip(ours, start, strict=True):
        parameter.load(values)
    theirs = [torch.nn.Parameter(torch.from_numpy(values.copy())) for values in start]
    optimizers = make_ours(groups(ours)), make_theirs(torch, groups(theirs))
    for step in range(STEPS):
        scale = 10.0 ** generator.uniform(-3, 1)
        for our, their in zip(ours, theirs, strict=True):
            gradient = (scale * generator.normal(size=our.shape)).astype(dtype)
            our.accumulate_gradient(gradient)
            their.grad = torch.from_numpy(gradient.copy())
        if step == STEPS // 2:
            for group in [*optimizers[0].param_groups, *optimizers[1].param_groups]:
                group["lr"] /= 2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield [(np.array(our.data), their.detach().numpy()) for our, their in zip(ours, theirs, strict=True)]


def groups(parameters):
    """The first two with settings of their own."""
    return [{"params": parameters[:2], "lr": 0.03, "weight_decay": 0.2}, {"params": parameters[2:]}]


def assert_equal_trajectories(make_ours, make_theirs, dtype):
    tolerance = {np.float32: 3e-6, np.float64: 1e-14}[dtype]  # absolute: the values are of size one
    for step, pairs in enumerate(trajectories(make_ours, make_theirs, dtype)):
        for ours, theirs in pairs:
            error = np.abs(ours - theirs).max()
            assert error < tolerance, f"step {step}, shape {ours.shape}: {error:.1e}"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "settings",
    [{}, {"betas": (0.8, 0.95), "eps": 1e-5}, {"weight_decay": 0.0}],
    ids=["defaults", "betas and eps", "no decay"],
)
def test_adamw_takes_the_steps_of_torch(settings, dtype):
    assert_equal_trajectories(
        lambda groups: optim.AdamW(groups, lr=0.01, **settings),
        lambda torch, groups: torch.optim.AdamW(groups, lr=0.01, **settings),
        dtype,
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_groups_may_have_betas_and_eps_of_their_own(dtype):
    def with_own(groups):
        return [{**groups[0], "betas": (0.5, 0.7), "eps": 1e-2}, groups[1]]

    assert_equal_trajectories(
        lambda groups: optim.AdamW(with_own(groups), lr=0.01, betas=(0.8, 0.95)),
        lambda torch, groups: torch.optim.AdamW(with_own(groups), lr=0.01, betas=(0.8, 0.95)),
        dtype,
    )


@pytest.mark.parametrize(
    "group, text",
    [
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"eps": -1.0}, "eps must not be negative"),
        ({"momentum": 0.9}, r"unknown settings \['momentum'\]; known: 'lr', 'weight_decay', 'betas', 'eps'"),
    ],
)
def test_settings_of_a_group_that_cannot_be_are_refused(group, text):
    with pytest.raises(ValueError, match=text):
        optim.AdamW([{"params": nn.Linear(3, 2).parameters(), **group}])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    ids=["plain", "momentum", "dampening", "nesterov and decay"],
)
def test_sgd_takes_the_steps_of_torch(settings, dtype):
    assert_equal_trajectories(
        lambda groups: optim.SGD(groups, lr=0.01, **settings),
        lambda torch, groups: torch.optim.SGD(groups, lr=0.01, **settings),
        dtype,
    )
