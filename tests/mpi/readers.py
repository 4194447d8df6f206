"""Late readers where ranks share memory, and several models on one mesh; run under mpirun."""

import time

import numpy as np

import shardrt
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import MixedPrecisionPolicy, full_parameters, fully_shard

WIDTH = 64
LOW = {"mp_policy": MixedPrecisionPolicy("bfloat16")}  # with oneDNN, slots of bits, which ranks have together
X = np.random.default_rng(0).standard_normal((16, WIDTH)).astype(np.float32)


class Layer(nn.Module):
    """Linear; takes longer where it is told to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.delay = 0.0

    def forward(self, x):
        time.sleep(self.delay)
        return self.linear(x)


def net(mesh=None, whole=True, **how):
    shardrt.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    if mesh is not None:
        for layer in model:
            fully_shard(layer, mesh=mesh, **how)
        if whole:
            fully_shard(model, mesh=mesh, **how)
    return model


def by_optimizer(model):
    """A function that changes all parameters much."""
    return optim.SGD(model.parameters(), lr=10.0).step


def by_adamw(model):
    """As by_optimizer, also of what the parameters are in 16 bits."""
    return optim.AdamW(model.parameters(), lr=10.0).step


def by_hand(model):
    """As by_optimizer."""

    def step():
        for parameter in model.parameters():
            with parameter.writing() as shard:
                shard += 10.0

    return step


def late_reader(mesh, change, **how):
    """Between backward and step, rank 1 is late in a forward: it must see the parameters before the step.

    And those of the layer that it is in, where another takes the slot after it.
    """
    model = net(mesh, **how)
    step = change(model)
    y = model(X)
    (y * y).mean().backward()
    with shardrt.no_grad():
        before = np.array(model(X))
        for layer in model:
            layer.delay = 0.1 * mesh.rank
        again = np.array(model(X))
    step()
    assert np.array_equal(before, again), f"rank {mesh.rank} saw {np.abs(before - again).max()} of the step"
    with shardrt.no_grad():
        assert not np.allclose(before, model(X)), "the next forward did not see the step"


def side_by_side(mesh, models):
    """Several models on one mesh train as they do unsharded."""
    plain = [net() for _ in models]
    all_models = [*models, *plain]
    optimizers = [optim.SGD(model.parameters(), lr=1e-3) for model in all_models]
    for _ in range(5):
        for group in (models, plain):
            y = X
            for model in group:
                y = model(y)
            (y * y).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model, twin in zip(models, plain, strict=True):
        with full_parameters(model):
            for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
                np.testing.assert_allclose(found.data, expected.data, rtol=0, atol=1e-5)


def main(backend):
    mesh = init_device_mesh("auto", communicator=backend)
    late_reader(mesh, by_optimizer)
    late_reader(mesh, by_hand)
    late_reader(mesh, by_optimizer, **LOW)
    late_reader(mesh, by_adamw, strategy="SHARD_GRAD_OP", **LOW)
    side_by_side(mesh, [net(mesh), net(mesh)])
    side_by_side(mesh, [net(mesh, whole=False)])
