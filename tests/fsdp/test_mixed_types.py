"""Models whose parameters differ in type, are fewer than the ranks, or are none at all."""

from functools import cache

import numpy as np
import pytest

from shardrt import Tensor, dtypes, nn, optim
from shardrt import functional as F
from shardrt.checkpoint import CheckpointManager, full_state_dict, load, save
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, explain, fully_shard, memory_plan
from shardrt.nn import init
from shardrt.nn.utils import clip_grad_norm_
from tests import lab


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


BATCHES = np.random.default_rng(0).normal(size=(3, 12, 3)).astype(np.float32)


def made(parts=True, **settings):
    mesh, model = lab.mesh_for(settings.get("strategy")), lab.seeded(Mixed)
    for part in (*model.body.parts, model.body) if parts else ():
        fully_shard(part, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings), mesh


def trained(model, mesh, folder=None, resume=False, steps=3):
    """Norms of gradients, and weights; `folder` is where a checkpoint after two steps is, or will be."""
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    checkpoints = CheckpointManager(folder, model, optimizer, mesh) if folder is not None else None
    norms = []
    for step in range(checkpoints.restore()[0] if resume else 0, steps):
        y = model(*lab.rows(mesh, BATCHES[step]))
        (y * y).mean().backward()
        norms.append(clip_grad_norm_(model.parameters(), 0.5))
        lab.update(optimizer)
        if step == 1 and checkpoints is not None and not resume:
            checkpoints.save(step + 1)
    return norms, full_state_dict(model)


def sharded(**settings):
    return trained(*made(**settings))


@cache
def plain():
    """On one rank, with the whole batch, and no unit at all."""
    return trained(lab.seeded(Mixed), init_device_mesh("auto"))


def types(weights):
    return {name: (values.dtype, values.shape) for name, values in weights.items()}


@pytest.mark.parametrize("parts", [True, False], ids=["units", "one unit"])
def test_types_mix_in_a_model_and_in_a_unit(parts):
    found = thread.run(3, sharded, parts=parts)
    assert all(norms == found[0][0] for norms, _ in found)  # over float32 and float64 and all ranks
    assert types(found[0][1]) == types(plain()[1])
    lab.assert_close(found[0], plain(), rtol=1e-4, atol=1e-6)


def test_strategies_and_offload_have_the_same_bits():
    expected = lab.first(4, sharded)
    for policy in (CPUOffloadPolicy(), CPUOffloadPolicy(step="host")):
        lab.assert_equal(lab.first(4, sharded, offload_policy=policy), expected, policy)
    for name in ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "HYBRID_SHARD"):
        lab.assert_equal(lab.first(4, sharded, strategy=name), expected, name)


@lab.on_ranks(2)
def test_mixed_precision_casts_float32_alone():
    model, mesh = made(mp_policy=MixedPrecisionPolicy("bfloat16"))
    kinds = {(g.key.dtype, g.key.param, g.key.reduce) for g in lab.groups_of(model)}
    exact = {(kind, kind, kind) for kind in ("float64", "int64", "int8", "bool")}
    assert kinds == {("float32", "bfloat16", "bfloat16"), *exact}
    norms, weights = trained(model, mesh)
    if mesh.rank == 0:
        assert (weights["body.parts.0.order"] == 2).all() and (weights["body.parts.0.small"] == -3).all()
        lab.assert_close((norms, weights), thread.run(1, plain)[0], rtol=0.05, atol=0.02)


class Seen(nn.Module):
    """Notes the values of its inputs."""

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
    assert dtypes.casts("float32") and not dtypes.casts("int64")


def test_a_checkpoint_of_mixed_types_is_restored_at_another_number_of_ranks(tmp_path):
    def saved():
        model, mesh = made()
        result = trained(model, mesh, tmp_path / "checkpoints")
        save(tmp_path / "weights", model)
        return result

    def resumed(**settings):
        return trained(*made(**settings), tmp_path / "checkpoints", resume=True)

    def loaded():
        model, _ = made()
        load(tmp_path / "weights", model)
        return full_state_dict(model)

    norms, weights = lab.first(4, saved)
    lab.assert_equal(lab.first(4, resumed, strategy="NO_SHARD"), (norms[2:], weights))
    lab.assert_close(lab.first(3, resumed), (norms[2:], weights), rtol=1e-4, atol=1e-6)
    lab.assert_equal(lab.first(2, loaded), weights)


@lab.on_ranks(1)
def test_the_plan_counts_each_type_by_its_size():
    model, mesh = made(parts=False)
    plan = memory_plan(model).device
    trained(model, mesh, steps=1)
    assert {"float32", "float64", "int64", "int8", "bool"} <= set(explain(model).split())
    assert lab.bytes_held(model) + plan["optimizer state"] == sum(plan.values())


# -- few elements, or none


class Nothing(nn.Module):
    def forward(self, x):
        return x + 1


def small(make, strategy):
    model = fully_shard(make(), mesh=init_device_mesh("auto"), strategy=strategy)
    parameters = list(model.parameters())
    optimizer = optim.AdamW(parameters, lr=0.1) if parameters else None
    x = Tensor(np.ones((2, 1), np.float32), requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
        if optimizer is not None:
            clip_grad_norm_(parameters, 0.1)
            lab.update(optimizer)
    memory_plan(model)
    return full_state_dict(model), x.grad.tolist()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("make", [lambda: nn.Linear(1, 1), lambda: nn.LayerNorm(1), Nothing])
def test_a_model_may_have_fewer_elements_than_ranks(make, strategy):
    found = thread.run(4, small, make, strategy)
    assert all(gradient == found[0][1] for _, gradient in found)
    lab.assert_close(found[0][0], lab.first(1, small, make, strategy)[0], rtol=1e-6)
