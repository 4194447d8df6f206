"""AdamW and SGD beside torch.optim, on plain parameters: same gradients in, same parameters out."""

import numpy as np
import pytest

from shardrt import nn, optim
from tests import lab

SHAPES = [(1,), (7, 5), (33,), (4, 3, 2), (1000,)]
STEPS = 20
OF_FIRST_GROUP = {"AdamW": {"betas": (0.5, 0.7), "eps": 1e-2}, "SGD": {}}


def groups(kind, parameters):
    """The first two parameters with settings of their own."""
    own = {"lr": 0.03, "weight_decay": 0.2, **OF_FIRST_GROUP[kind]}
    return [{"params": parameters[:2], **own}, {"params": parameters[2:]}]


@pytest.mark.torch
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 3e-6), (np.float64, 1e-14)])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("AdamW", {}),
        ("AdamW", {"betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.0}),
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "dampening": 0.3}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ],
    ids=str,
)
def test_it_takes_the_steps_of_torch(kind, settings, dtype, tolerance):
    """Parameters, of size one, after each step; the learning rate halves on the way."""
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    start = [generator.normal(size=shape).astype(dtype) for shape in SHAPES]
    ours = [nn.Parameter(shape, nn.init.Zeros(), dtype=dtype) for shape in SHAPES]
    for parameter, values in zip(ours, start, strict=True):
        parameter.load(values)
    theirs = [torch.nn.Parameter(torch.from_numpy(values.copy())) for values in start]
    optimizers = [
        getattr(library, kind)(groups(kind, parameters), lr=0.01, **settings)
        for library, parameters in ((optim, ours), (torch.optim, theirs))
    ]
    for step in range(STEPS):
        scale = 10.0 ** generator.uniform(-3, 1)
        for our, their in zip(ours, theirs, strict=True):
            gradient = (scale * generator.normal(size=our.shape)).astype(dtype)
            our.accumulate_gradient(gradient)
            their.grad = torch.from_numpy(gradient.copy())
        for optimizer in optimizers:
            for group in optimizer.param_groups if step == STEPS // 2 else ():
                group["lr"] /= 2
            lab.update(optimizer)
        found, expected = [np.array(p.data) for p in ours], [p.detach().numpy() for p in theirs]
        lab.assert_close(found, expected, f"step {step}", atol=tolerance)


def of_group(**settings):
    return lambda: optim.AdamW([{"params": nn.Linear(3, 2).parameters(), **settings}])


test_settings_of_a_group_that_cannot_be_are_refused = lab.refusals(
    (of_group(betas=(0.9, 1.0)), r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
    (of_group(betas=(0.9,)), "betas must be two numbers"),
    (of_group(eps=-1.0), "eps must not be negative"),
    (of_group(momentum=0.9), r"unknown settings \['momentum'\]; known: 'lr', 'weight_decay', 'betas', 'eps'"),
)
