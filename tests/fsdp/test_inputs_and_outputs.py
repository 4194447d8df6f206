"""What a unit's forward takes and returns is what the plain module would take and return."""

from contextlib import nullcontext

import numpy as np
import pytest

import shardrt
from shardrt import functional as F
from shardrt import nn
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from shardrt.recompute import checkpoint
from tests import lab

X = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)


class Kinds(nn.Module):
    """Returns all kinds of things; its parameters are returned, too, as tensors, views and arrays."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.frozen = nn.Parameter((8,), nn.init.Normal(0.0, 1.0), requires_grad=False)

    def forward(self, x):
        y, bias = self.linear(x), self.linear.bias
        return {
            "output": y,
            "detached": y.detach(),
            "input": x,
            "integers": shardrt.Tensor(np.argmax(y.data, axis=1)),
            "parameter": bias,
            "frozen": self.frozen,
            "detached parameter": bias.detach(),
            "view": (bias.T, shardrt.Tensor(bias.data[2:])),
            "arrays": [self.linear.weight.data, bias.data[:3]],
        }


class Model(nn.Module):
    """Units come and go between the one that returns its parameters and their use."""

    def __init__(self):
        super().__init__()
        self.kinds = Kinds()
        self.later = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        kinds = self.kinds(x)
        y = kinds["output"]
        for layer in self.later:
            y = F.tanh(layer(y))
        self.kinds_returned = kinds
        return y + kinds["parameter"] * kinds["detached parameter"] + kinds["frozen"]


def results(sharded, grad, recomputed=False, shape=None, **settings):
    """(output, {kind: (values, whether they require a gradient)}, gradient of the returned parameter)."""
    model = lab.seeded(Model)
    if recomputed:
        checkpoint(model.kinds.linear)
    if sharded:
        mesh = init_device_mesh("auto", shape)
        for part in (model.kinds, *model.later, model):
            fully_shard(part, mesh=mesh, **settings)
    with nullcontext() if grad else shardrt.no_grad():
        y = model(shardrt.Tensor(X))
    kinds, needs = {}, {}
    for name, value in model.kinds_returned.items():
        values = value if isinstance(value, tuple | list) else [value]
        kinds[name] = [np.array(v) for v in values]
        # Without a tape a parameter of a unit comes as its values.
        needs[name] = [bool(getattr(v, "requires_grad", None)) and (grad or sharded) for v in values]
    if grad:
        y.sum().backward()
    gradient = model.kinds.linear.bias.grad
    return [np.array(y.data), kinds], needs, None if gradient is None else np.array(gradient)


WAYS = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD", "shape": (1, 2)},
    "slots apart from shards": {"offload_policy": CPUOffloadPolicy()},
    "recomputed": {"recomputed": True, "offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_the_plain_module(way, grad):
    values, needs, gradient = results(False, grad)
    for found, found_needs, piece in thread.run(2, results, True, grad, **WAYS[way]):
        lab.assert_close(found, values, rtol=1e-6)
        assert found_needs == needs
        if grad:
            assert piece.size <= gradient.size and set(piece) <= set(gradient)


class Taken(nn.Linear):
    """Notes the types and values of its inputs."""

    def forward(self, x, scale, more):
        self.taken = [type(x), x.dtype, np.array(x), scale["scale"].dtype, more[0].dtype]
        return super().forward(x) * scale["scale"]


def taken(convert, **policy):
    model = fully_shard(lab.seeded(lambda: Taken(8, 8)), mp_policy=MixedPrecisionPolicy("bfloat16", **policy))
    y = model(convert(X), scale={"scale": convert(X[:, :1])}, more=[np.arange(3)])
    return np.array(y.data), model.taken


@lab.on_ranks(1)
def test_floating_arrays_are_cast_as_tensors_are():
    (by_array, arrays), (by_tensor, tensors) = taken(np.asarray), taken(shardrt.Tensor)
    assert np.array_equal(by_array, by_tensor)
    assert arrays[0] is np.ndarray and arrays[-1] == np.int64
    assert np.array_equal(arrays[2], tensors[2]) and not np.array_equal(arrays[2], X)
    assert np.array_equal(taken(np.float64)[0], by_tensor)  # float64 would not fit the parameters at all
    assert np.array_equal(taken(np.asarray, cast_forward_inputs=False)[1][2], X)
