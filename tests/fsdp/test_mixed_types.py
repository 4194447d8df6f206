"""Models whose parameters differ in type, are fewer than the ranks, or are none at all."""

from functools import cache

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, dtypes, nn, optim
from shardrt import functional as F
from shardrt.checkpoint import CheckpointManager, full_state_dict, load, save
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    explain,
    fully_shard,
    memory_plan,
    units,
)
from shardrt.nn import init
from shardrt.nn.utils import clip_grad_norm_
from tests.fsdp.nets import bytes_held

STEPS = 3


class Part(nn.Module):
    """float32, then float64, then a permutation by a table of integers, some of it masked."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 3, dtype=np.float64)
        self.order = nn.Parameter((3,), init.Constant(2), requires_grad=False, dtype=np.int64)
        self.mask = nn.Parameter((3,), init.Ones(), requires_grad=False, dtype=np.bool_)
        self.small = nn.Parameter((1,), init.Constant(-3), requires_grad=False, dtype=np.int8)
        self.nothing = nn.Parameter((0,), init.Zeros())
        self.nowhere = nn.Parameter((0, 4), init.Zeros(), dtype=np.float64)

    def forward(self, x):
        y = self.second(F.cast(F.gelu(self.first(x)), "float64"))
        assert self.order.data.dtype == np.int64 and self.mask.data.dtype == np.bool_
        factor = np.asarray(self.mask.data * self.order.data * self.small.data, np.float64)
        return F.cast(y * Tensor(factor), "float32") + x


class Bare(nn.Module):
    """Has no parameter of its own."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Mixed(nn.Module):
    """Everything is in the outermost unit, or in units below."""

    def __init__(self):
        super().__init__()
        self.body = Bare()
        self.scale = nn.Parameter((1,), init.Ones())

    def forward(self, x):
        return self.body(x) * self.scale


CASES = {
    **{name: {"strategy": name} for name in ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPT", "NO_SHARD")},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD"},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "offload, step on the host": {"offload_policy": CPUOffloadPolicy(step="host")},
    "prefetch": {"prefetch": 2},
}


def rows(mesh, array):
    count = len(array) // mesh.size
    return array[mesh.rank * count : (mesh.rank + 1) * count]


def batches():
    random = np.random.default_rng(0)
    return [random.normal(size=(12, 3)).astype(np.float32) for _ in range(STEPS)]


def made(strategy=None, parts=True, **settings):
    shardrt.manual_seed(3)
    mesh = init_device_mesh("auto", (2, 2) if strategy == "HYBRID_SHARD" else None)
    model = Mixed()
    for part in (*model.body.parts, model.body) if parts else ():
        fully_shard(part, mesh=mesh, strategy=strategy, **settings)
    return fully_shard(model, mesh=mesh, strategy=strategy, **settings), mesh


def trained(model, mesh, data, folder=None, resume=False):
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    checkpoints = CheckpointManager(folder, model, optimizer, mesh) if folder is not None else None
    first = checkpoints.restore()[0] if resume else 0
    norms = []
    for step in range(first, len(data)):
        y = model(rows(mesh, data[step]))
        (y * y).mean().backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and checkpoints is not None and not resume:
            checkpoints.save(step + 1)
    return norms, full_state_dict(model)


def sharded(**settings):
    model, mesh = made(**settings)
    return trained(model, mesh, batches())


@cache
def plain():
    """On one rank, with the whole batch, and no unit at all."""
    shardrt.manual_seed(3)
    model = Mixed()
    return trained(model, init_device_mesh("auto"), batches())


def close(found, expected, **tolerance):
    norms, weights = found
    np.testing.assert_allclose(norms, expected[0], **tolerance)
    assert weights.keys() == expected[1].keys()
    for name, values in expected[1].items():
        assert weights[name].dtype == values.dtype and weights[name].shape == values.shape, name
        np.testing.assert_allclose(weights[name], values, err_msg=name, **tolerance)


@pytest.mark.parametrize("parts", [True, False], ids=["units", "one unit"])
@pytest.mark.parametrize("name", CASES)
def test_types_mix_in_a_model_and_in_a_unit(name, parts):
    ranks = 4 if name == "HYBRID_SHARD" else 3
    found = thread.run(ranks, sharded, parts=parts, **CASES[name])
    assert all(norms == found[0][0] for norms, _ in found)  # over float32 and float64 and all ranks
    close(found[0], plain(), rtol=1e-4, atol=1e-6)


def test_strategies_have_the_same_bits():
    expected = thread.run(4, sharded, strategy="NO_SHARD")[0]
    for name in ("FULL_SHARD", "SHARD_OPT", "HYBRID_SHARD", "offload"):
        found = thread.run(4, sharded, **CASES[name])[0]
        assert found[0] == expected[0]
        for parameter, values in expected[1].items():
            np.testing.assert_array_equal(found[1][parameter], values, err_msg=parameter)


def low_precision():
    model, mesh = made(mp_policy=MixedPrecisionPolicy("bfloat16"))
    kinds = {(g.key.dtype, g.key.param, g.key.reduce) for unit in units(model) for g in unit.groups}
    norms, weights = trained(model, mesh, batches())
    return norms, weights, kinds


def test_mixed_precision_casts_float32_alone():
    norms, weights, kinds = thread.run(2, low_precision)[0]
    exact = {(kind, kind, kind) for kind in ("float64", "int64", "int8", "bool")}
    assert kinds == {("float32", "bfloat16", "bfloat16"), *exact}
    close((norms, weights), plain(), rtol=0.05, atol=0.02)
    assert (weights["body.parts.0.order"] == 2).all() and (weights["body.parts.0.small"] == -3).all()


class Seen(nn.Module):
    """Notes the types of its inputs."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=dtype)

    def forward(self, x):
        self.seen = x.data.tolist()
        return self.layer(x)


@pytest.mark.parametrize(("dtype", "cast"), [("float32", True), ("float64", False)])
def test_inputs_of_a_unit_that_is_not_cast_are_not_cast_either(dtype, cast):
    model = Seen(np.dtype(dtype))
    fully_shard(model, mp_policy=MixedPrecisionPolicy("bfloat16"))
    model(Tensor(np.full((1, 2), 1 / 3, dtype)))
    assert (model.seen[0][0] != np.dtype(dtype).type(1 / 3)) == cast


def saved(folder):
    model, mesh = made()
    result = trained(model, mesh, batches(), folder / "checkpoints")
    save(folder / "weights", model)
    return result


def resumed(folder, **settings):
    model, mesh = made(**settings)
    return trained(model, mesh, batches(), folder / "checkpoints", resume=True)


def loaded(folder):
    model, _ = made()
    load(folder / "weights", model)
    return full_state_dict(model)


def test_a_checkpoint_of_mixed_types_is_restored_at_another_number_of_ranks(tmp_path):
    expected = thread.run(4, saved, tmp_path)[0]
    same = thread.run(4, resumed, tmp_path, strategy="NO_SHARD")[0]
    assert same[0] == expected[0][2:]
    for name, values in expected[1].items():
        np.testing.assert_array_equal(same[1][name], values, err_msg=name)
    close((thread.run(3, resumed, tmp_path)[0]), (expected[0][2:], expected[1]), rtol=1e-4, atol=1e-6)
    for name, values in thread.run(2, loaded, tmp_path)[0].items():
        np.testing.assert_array_equal(values, expected[1][name], err_msg=name)


def planned():
    model, mesh = made(parts=False)
    plan = memory_plan(model)
    trained(model, mesh, batches()[:1])
    return plan.device, bytes_held(model), explain(model)


def test_the_plan_counts_each_type_by_its_size():
    device, held, table = thread.run(1, planned)[0]
    assert {"float32", "float64", "int64", "int8", "bool"} <= set(table.split())
    assert held + device["optimizer state"] == sum(device.values())


# -- few elements, or none


class Nothing(nn.Module):
    def forward(self, x):
        return x + 1


def small(make, strategy):
    mesh = init_device_mesh("auto")
    model = fully_shard(make(), mesh=mesh, strategy=strategy)
    parameters = list(model.parameters())
    optimizer = optim.AdamW(parameters, lr=0.1) if parameters else None
    x = Tensor(np.ones((2, 1), np.float32), requires_grad=True)
    for _ in range(2):
        y = model(x)
        y.sum().backward()
        if optimizer is not None:
            clip_grad_norm_(parameters, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return full_state_dict(model), x.grad.tolist(), memory_plan(model).device


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("make", [lambda: nn.Linear(1, 1), lambda: nn.LayerNorm(1), Nothing])
def test_a_model_may_have_fewer_elements_than_ranks(make, strategy):
    found = thread.run(4, small, make, strategy)
    alone = thread.run(1, small, make, strategy)
    assert all(gradient == found[0][1] for _, gradient, _ in found)
    assert found[0][0].keys() == alone[0][0].keys()
    for name, values in alone[0][0].items():
        np.testing.assert_allclose(found[0][0][name], values, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
def test_a_parameter_of_16_bits_is_named_with_what_to_do(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter((2,), init.Ones(), dtype=ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with pytest.raises(
        ValueError, match=r"'scale' is (float16|bfloat16); .* float32: .*param_dtype='(float16|bfloat16)'"
    ):
        fully_shard(model)


def test_integers_require_no_gradient():
    with pytest.raises(TypeError, match="requires_grad=True needs floats, dtype is int64"):
        nn.Parameter((2,), init.Zeros(), dtype=np.int64)
    assert not dtypes.casts("int64") and dtypes.casts("float32")
