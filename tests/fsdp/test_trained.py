"""What is frozen and unfrozen after sharding, and what nothing used: numbers, traffic, memory, agreement."""

from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest

from shardrt import Tensor, nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import CollectiveMismatch, init_device_mesh, thread
from shardrt.device.protocol import StreamError
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    explain,
    full_gradients,
    fully_shard,
    memory_plan,
    no_sync,
    set_find_unused_parameters,
    set_world_invariant,
)
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.options.packed_rows import Move, Rows
from shardrt.nn.utils import clip_grad_norm_
from tests import lab
from tests.lab import Block

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPT", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP")

# What is frozen in each step, as beginnings of names. The second block was frozen when it was sharded.
PHASES = [
    ("blocks.1", "blocks.0.up.bias"),
    (),  # everything is trained now
    # Of a unit a bias is left, of another nothing.
    ("blocks.0.up.weight", "blocks.0.down", "blocks.2", "norm.weight"),
    ("blocks.0", "blocks.1", "blocks.2", "embed"),  # only the last norm is left
    ("embed", "norm", "blocks.0", "blocks.2.up.weight"),
    (),
]
BIASES = [f"blocks.{block}.{part}.weight" for block in range(3) for part in ("up", "down")]
X = np.ones((2, 3), np.float32)


def freeze(model, names):
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(tuple(names)) if names else True


def ranks_of(strategy):
    return 4 if (strategy or "").startswith("HYBRID") else 2


def gradients_of(model):
    """Name -> whole gradient, or None."""
    return {name: None if g is None else np.array(g) for name, g in full_gradients(model)}


def update(model):
    """Plain gradient descent, by an optimizer of what is trained now."""
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    lab.update(optimizer)


def trained(model, mesh, way="one backward"):
    """(names without a gradient, norm) of each step, and the weights."""
    none, norms = [], []
    for names, batch in zip(PHASES, lab.batches(len(PHASES)), strict=True):
        freeze(model, names)
        if way == "one backward":
            lab.backward(model, mesh, batch)
        else:
            own = lab.rows(mesh, *batch)
            half = len(own[0]) // 2
            with no_sync(model) if way == "no_sync" else nullcontext():
                lab.backward(model, None, [part[:half] for part in own], scale=0.5)
            lab.backward(model, None, [part[half:] for part in own], scale=0.5)
        none.append({name for name, parameter in model.named_parameters() if parameter.grad is None})
        norms.append(clip_grad_norm_(model.parameters(), 1.0))
        update(model)
    return none, norms, full_state_dict(model)


def sharded(way="one backward", **settings):
    return trained(*lab.build(lab.Frozen, **settings), way=way)


@cache
def plain():
    """On one rank, with the whole batch, without a unit."""
    return trained(lab.seeded(lab.Frozen), init_device_mesh("auto"))


@cache
def reference(ranks, **settings):
    return lab.first(ranks, sharded, strategy="NO_SHARD", **settings)


def nearly_the_same(found, expected):
    assert found[0] == expected[0]
    lab.assert_close(found[1], expected[1], rtol=1e-5)
    lab.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_frozen_may_change_from_step_to_step(strategy):
    found = thread.run(4, sharded, strategy=strategy)
    assert all(norms == found[0][1] for _, norms, _ in found)
    nearly_the_same(found[0], plain())
    lab.assert_equal(found[0][2], reference(4)[2])


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {"offload_policy": CPUOffloadPolicy()},
        {"offload_policy": CPUOffloadPolicy(step="host")},
        {"way": "reduced twice"},
        {"way": "no_sync"},
        {"way": "no_sync", "strategy": "NO_SHARD"},
        {"way": "reduced twice", "offload_policy": CPUOffloadPolicy()},
        {"prefetch": 0},
    ],
    ids=str,
)
def test_it_may_with_all_that_moves_gradients(settings, ranks):
    nearly_the_same(lab.first(ranks, sharded, **settings), plain())


def test_it_may_in_mixed_precision():
    low = MixedPrecisionPolicy("bfloat16")
    weights = lab.first(2, sharded, mp_policy=low)[2]
    lab.assert_equal(weights, reference(2, mp_policy=low)[2])
    lab.assert_close(weights, plain()[2], rtol=0.1, atol=0.02)


def test_it_may_with_the_same_bits_at_every_world_size():
    def invariant():
        model, mesh = lab.build(lab.Frozen)
        set_world_invariant(model, 4)
        norms = []
        for names, batch in zip(PHASES, lab.batches(len(PHASES)), strict=True):
            freeze(model, names)
            for number in range(mesh.rank, 4, mesh.size):
                lab.backward(model, None, [part[3 * number : 3 * number + 3] for part in batch], scale=0.25)
            norms.append(clip_grad_norm_(model.parameters(), 1.0))
            update(model)
        return norms, full_state_dict(model)

    expected = lab.first(1, invariant)
    for ranks in (2, 4):
        lab.assert_equal(lab.first(ranks, invariant), expected, ranks)


# -- traffic and memory


@lab.on_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_traffic_and_memory_follow(strategy):
    counts, found = lab.Counts(), []
    model, _ = lab.build(wrap=counts, strategy=strategy)
    for names in ((), (), ("blocks",), ("blocks",), BIASES, ()):
        freeze(model, names)
        planned = lab.bytes_planned(model)
        counts.reset()
        lab.backward(model)
        calls = counts.calls("all_gather", "reduce_scatter", "barrier")
        model.zero_grad()
        assert lab.bytes_held(model) == planned
        found.append((*calls, *counts.bytes("reduce_scatter"), planned))
    _, all_units, only_root, still, few, again = found
    root, block = (group.layout for group in lab.groups_of(model)[:2])
    row = Rows.plan(block, {1, 3}, False)  # up.bias (13) and down.bias (7)
    assert all_units[1] == 4 and only_root[1] == still[1] == 1 and few[1] == again[1] == 4
    assert only_root[3] == root.total // 2 * 4  # of two ranks each receives a half
    assert few[3] == only_root[3] + 3 * row.total // 2 * 4 < all_units[3] / 2
    assert again == (*all_units[:2], 1, *all_units[3:])
    assert [step[2] for step in found[1:]] == [0, 1, 0, 1, 1]  # a change costs a barrier, and no gather
    assert only_root[0] == still[0] <= all_units[0] == few[0]  # frozen first blocks need no backward
    assert only_root[4] < few[4] < all_units[4]


def test_units_frozen_late_take_what_those_frozen_before_take():
    names = ("blocks.1", "blocks.2")
    before = lab.seeded()
    freeze(before, names)
    late = lab.shard(lab.seeded(), None)
    late(lab.batches(1)[0][0])
    freeze(late, names)
    plans = [memory_plan(model).device for model in (lab.shard(before, None), late)]
    for what in ("sharded gradients", "full gradients", "optimizer state"):
        assert plans[0][what] == plans[1][what]


def test_the_table_of_units_says_what_is_frozen_now():
    model = lab.shard(lab.seeded(), None)
    freeze(model, ("blocks.0", "blocks.1.up.weight"))
    lines = [line.split("  ")[:3] for line in explain(model).splitlines()]
    assert [line[0] for line in lines if "partly frozen" in " ".join(line)] == ["blocks.1"]
    assert sum("frozen" in " ".join(line) for line in lines) == 2


def test_rows_take_what_is_trained_and_nothing_where_that_saves_nothing():
    layout = Layout.plan([("weight", (200,)), ("bias", (3,)), ("scale", (20,))], 2)  # shards of 128
    assert Rows.plan(layout, {0, 1, 2}, False) is None and Rows.plan(layout, {0, 2}, False) is None
    rows = Rows.plan(layout, {1, 2}, False)
    assert rows.moves == ((), (Move(0, 0, 80, 36),)) and rows.size == 48 and rows.full == 48
    assert rows.offsets == {1: 0, 2: 16} and rows.gaps == ((3, 16),)
    message = Rows.plan(layout, {0, 2}, True)
    assert message.moves == ((Move(0, 16, 0, 128),), (Move(128, 16, 0, 72), Move(208, 96, 96, 20)))
    assert (
        message.uses == 3
        and message.size == 144
        and message.full == 240
        and message.offsets == {0: 0, 2: 208}
    )


# -- agreement


def apart(strategy, names_of_rank_1):
    model, mesh = lab.build(strategy=strategy)
    for step in range(3):
        if step == 1:
            freeze(model, names_of_rank_1 if mesh.rank == 1 else ("blocks.0.up.weight",))
        lab.backward(model)
        update(model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("names", [(), ("blocks.1.up.weight",), ("blocks",)], ids=str)
def test_ranks_that_freeze_different_parameters_are_refused(strategy, names):
    with pytest.raises((CollectiveMismatch, StreamError), match="ranks differ .* parameters trained"):
        thread.run(2, apart, strategy, names)


# -- a change while a tape, or a gradient, is there


def frozen_between(model, x):
    """Frozen after the first of two forwards, whose gradient must come all the same."""
    first = (model(x) * model(x)).mean()
    model[0].requires_grad_(False)
    (first + model(x).mean()).backward()
    return model


@lab.on_ranks(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_what_is_frozen_after_a_forward_has_the_gradient_of_that_forward(strategy):
    def two():
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    model, plain, mesh = lab.seeded(two, 1), lab.seeded(two, 1), init_device_mesh("auto")
    for part in (*model, model):
        fully_shard(part, mesh=mesh, strategy=strategy)
    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 10
    found = gradients_of(frozen_between(model, *lab.rows(mesh, x)))
    lab.assert_close(found, lab.gradients(frozen_between(plain, x)), rtol=1e-5, atol=1e-6)
    model.zero_grad()
    model(x).mean().backward()
    assert {n for n, p in model.named_parameters() if p.grad is None} == {"0.weight", "0.bias"}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
def test_what_is_unfrozen_after_a_backward_under_no_sync_keeps_what_was_accumulated(strategy):
    def rank():
        found = []
        for delayed in (True, False):
            model, mesh = lab.build(strategy=strategy)
            first, second = lab.batches(2, size=4)
            freeze(model, ("blocks.0.up.weight", "blocks.1.down", "blocks.2", "embed"))
            with no_sync(model) if delayed else nullcontext():
                lab.backward(model, mesh, first)
            freeze(model, ())
            lab.backward(model, mesh, second)
            planned = lab.bytes_planned(model, no_sync=delayed)
            assert mesh.size > 2 or not delayed or lab.bytes_held(model) == planned
            found.append(gradients_of(model))
        lab.assert_close(*found, rtol=1e-5, atol=1e-6)

    thread.run(ranks_of(strategy), rank)


# -- what nothing used


class Choosing(nn.Module):
    """Uses those of its layers that are in `use`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.block = Block()
        self.use = (0,)

    def forward(self, x):
        return sum((self.layers[i](x) for i in self.use), Tensor(np.zeros((), np.float32)) + x)


def unused(uses, find=True, twice=False, **settings):
    """(gradients, calls) of each step, and the bytes held and planned."""
    counts, result = lab.Counts(), []
    mesh = lab.mesh_for(settings.get("strategy"), wrap=counts)
    model = fully_shard(lab.seeded(Choosing), mesh=mesh, **settings)
    set_find_unused_parameters(model, find)
    for by_rank in uses:
        counts.reset()
        for model.use in (by_rank[0], by_rank[mesh.rank % len(by_rank)])[1 - twice :]:
            model(X).sum().backward()
        calls, found = counts.all_calls(), gradients_of(model)
        assert {n for n, g in found.items() if g is None} == {
            n for n, p in model.named_parameters() if p.grad is None
        }
        result.append(({name: g for name, g in found.items() if g is not None}, calls))
        model.zero_grad()
    return result, (lab.bytes_held(model), lab.bytes_planned(model))


def layer(*indices):
    return {f"layers.{i}.{kind}" for i in indices for kind in ("weight", "bias")}


USES = [((0,), (0,)), ((0,), (2,)), ((0, 1, 2), (1,)), ((1,), (1,))]


@pytest.mark.parametrize(
    "settings",
    [
        *({"strategy": name} for name in STRATEGIES[:5]),
        {"offload_policy": CPUOffloadPolicy()},
        {"mp_policy": MixedPrecisionPolicy("bfloat16")},
        {"mp_policy": MixedPrecisionPolicy("float16", "float32")},
    ],
    ids=str,
)
def test_a_parameter_has_a_gradient_if_any_rank_used_it(settings):
    ranks = ranks_of(settings.get("strategy"))
    zeros, _ = lab.first(ranks, unused, USES, find=False, **settings)
    for result, _ in thread.run(ranks, unused, USES, **settings):
        assert [found.keys() for found, _ in result] == [layer(0), layer(0, 2), layer(0, 1, 2), layer(1)]
        for (found, calls), (every, all_calls) in zip(result, zeros, strict=True):
            assert calls <= all_calls and found.keys() < every.keys()  # it costs no collective
            lab.assert_equal(found, {name: every[name] for name in found})
            assert not any(every[name].any() for name in every.keys() - found.keys())


def test_a_parameter_used_in_any_backward_of_a_step_has_a_gradient():
    ((result, (held, planned)),) = thread.run(1, unused, [((0,),), ((1,),)], twice=True)
    assert [found.keys() for found, _ in result] == [layer(0), layer(1)] and held == planned
    ((found, _),), _ = lab.first(2, unused, [((0,), (2,))], twice=True)
    assert found.keys() == layer(0, 2)


def test_it_is_set_between_steps():
    model = fully_shard(Choosing())
    model(X).sum().backward()
    with pytest.raises(RuntimeError, match="the model has gradients; call zero_grad before"):
        set_find_unused_parameters(model)
    assert model.layers[1].weight.grad is not None
    model.zero_grad()
    set_find_unused_parameters(model)
    model(X).sum().backward()
    assert model.layers[1].weight.grad is None and model.layers[0].weight.grad is not None


def test_integers_that_are_to_be_trained_are_named():
    model = nn.Linear(2, 2)
    model.table = nn.Parameter((2,), nn.init.Zeros(), requires_grad=False, dtype=np.int64)
    fully_shard(model).requires_grad_(True)
    with pytest.raises(TypeError, match="parameter 'table' is int64; only floats can require a gradient"):
        model(np.ones((1, 2), np.float32))


# -- what not all ranks use


class Conditional(nn.Module):
    """A unit that some ranks skip."""

    def __init__(self):
        super().__init__()
        self.trunk, self.expert, self.head = Block(), Block(), nn.Linear(7, 7)

    def forward(self, x, use):
        x = self.trunk(x)
        return self.head(self.expert(x) if use else x)


def conditional(sharded, at_first, later, by_rank):
    """Weights after four steps; after the first the expert is rank 0's alone, if it ever was the other's."""
    model, mesh = lab.seeded(Conditional), init_device_mesh("auto") if sharded else None
    freeze(model, at_first)
    if sharded:
        fully_shard(model.expert, mesh=mesh, by_rank=by_rank)
        for module in (model.trunk, model):
            fully_shard(module, mesh=mesh)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    x = np.random.default_rng(0).standard_normal((2, 3, 7)).astype(np.float32)
    for step in range(4):
        if step == 2:
            freeze(model, later)
        losses = [
            model(Tensor(x[rank]), rank == 0 or (step == 0 and not by_rank)).mean()
            for rank in ((mesh.rank,) if sharded else (0, 1))
        ]
        (sum(losses[1:], start=losses[0]) * (1 / len(losses))).backward()
        lab.update(optimizer)
    return full_state_dict(model)


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize(
    "frozen",
    [
        ((), ("trunk", "expert")),
        (("trunk", "expert"), ("expert",)),
        (("trunk", "expert"), ()),
        (("expert",), ("trunk",)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:fully_shard. expected unit")
def test_a_rank_that_skips_a_unit_knows_whether_backward_comes_to_it(frozen, by_rank):
    found, expected = lab.first(2, conditional, True, *frozen, by_rank), conditional(False, *frozen, by_rank)
    lab.assert_close(found, expected, atol=1e-6)


@lab.on_ranks(2)
def test_a_rank_that_used_only_what_is_frozen_of_a_unit_joins_the_others():
    """Rank 0 uses the layer that is frozen, rank 1 the other one."""

    def with_head():
        return nn.Sequential(Choosing(), nn.Linear(3, 3))

    plain, model, mesh = lab.seeded(with_head), lab.seeded(with_head), init_device_mesh("auto")
    for each in (plain, model):
        freeze(each, ("0.layers.0",))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    set_find_unused_parameters(model)
    model[0].use = (mesh.rank,)
    model(Tensor(X)).sum().backward()
    for rank in (0, 1):
        plain[0].use = (rank,)
        (plain(Tensor(X)).sum() * 0.5).backward()
    lab.assert_close(gradients_of(model), gradients_of(plain), rtol=1e-6)
