"""What is frozen and unfrozen after sharding, and what nothing used: numbers, traffic, memory, agreement."""

from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import CollectiveMismatch, CountedCommunicator, init_device_mesh, thread
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
    units,
)
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.options.packed_rows import Move, Rows
from shardrt.nn.utils import clip_grad_norm_
from tests.fsdp.nets import Block, Frozen, Net, batches, bytes_held, loss_of, shard

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPT", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP")

# What is frozen in each step, as beginnings of names. The second block was frozen when it was sharded.
PHASES = [
    ("blocks.1", "blocks.0.up.bias"),
    (),  # everything is trained now
    (
        "blocks.0.up.weight",
        "blocks.0.down",
        "blocks.2",
        "norm.weight",
    ),  # a bias of a unit is left, another none
    ("blocks.0", "blocks.1", "blocks.2", "embed"),  # only the last norm is left
    ("embed", "norm", "blocks.0", "blocks.2.up.weight"),
    (),
]
BIASES = [f"{b}.{part}.weight" for b in ("blocks.0", "blocks.1", "blocks.2") for part in ("up", "down")]


def freeze(model, names):
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(tuple(names)) if names else True


def rows_of(mesh, array):
    return array[mesh.rank * len(array) // mesh.size : (mesh.rank + 1) * len(array) // mesh.size]


def made(make=Frozen, strategy=None, counted=None, **settings):
    shardrt.manual_seed(3)
    wrap = None if counted is None else lambda c: counted.append(CountedCommunicator(c)) or counted[-1]
    mesh = init_device_mesh("auto", (2, 2) if (strategy or "").startswith("HYBRID") else None, wrap=wrap)
    return shard(make(), mesh, strategy=strategy, **settings), mesh


def update(model):
    """Plain gradient descent, by an optimizer of what is trained now."""
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


def trained(model, mesh, phases=PHASES, way="one backward"):
    seen = []
    for names, (tokens, targets) in zip(phases, batches(len(phases), size=12), strict=True):
        freeze(model, names)
        mine = rows_of(mesh, tokens), rows_of(mesh, targets)
        if way == "one backward":
            loss_of(model, *mine).backward()
        else:
            half = [len(part) // 2 for part in mine]
            first = [part[:h] for part, h in zip(mine, half, strict=True)]
            second = [part[h:] for part, h in zip(mine, half, strict=True)]
            if way == "no_sync":
                with no_sync(model):
                    (loss_of(model, *first) * 0.5).backward()
            else:
                (loss_of(model, *first) * 0.5).backward()
            (loss_of(model, *second) * 0.5).backward()
        none = {name for name, parameter in model.named_parameters() if parameter.grad is None}
        seen.append((none, clip_grad_norm_(model.parameters(), 1.0)))
        update(model)
    return seen, full_state_dict(model)


def sharded(way="one backward", **settings):
    return trained(*made(**settings), way=way)


@cache
def plain():
    """On one rank, with the whole batch, without a unit."""
    shardrt.manual_seed(3)
    return trained(Frozen(), init_device_mesh("auto"))


@cache
def reference(ranks):
    return thread.run(ranks, sharded, strategy="NO_SHARD")[0]


def same(found, expected, exact=False):
    assert [none for none, _ in found[0]] == [none for none, _ in expected[0]]
    np.testing.assert_allclose([n for _, n in found[0]], [n for _, n in expected[0]], rtol=1e-5)
    for name, values in expected[1].items():
        if exact:
            np.testing.assert_array_equal(found[1][name], values, err_msg=name)
        else:
            np.testing.assert_allclose(found[1][name], values, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_frozen_may_change_from_step_to_step(strategy):
    found = thread.run(4, sharded, strategy=strategy)
    assert all([norm for _, norm in seen] == [norm for _, norm in found[0][0]] for seen, _ in found)
    same(found[0], plain())
    same(found[0], reference(4), exact=True)


@pytest.mark.parametrize("ranks", [1, 2, 3])
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
    same(thread.run(ranks, sharded, **settings)[0], plain())


def test_it_may_in_mixed_precision():
    settings = {"mp_policy": MixedPrecisionPolicy("bfloat16")}
    expected = thread.run(2, sharded, strategy="NO_SHARD", **settings)[0]
    found = thread.run(2, sharded, **settings)[0]
    same(found, expected, exact=True)
    for name, values in plain()[1].items():
        np.testing.assert_allclose(found[1][name], values, rtol=0.1, atol=0.02, err_msg=name)


def invariant():
    model, mesh = made()
    set_world_invariant(model, 4)
    losses = []
    for names, (tokens, targets) in zip(PHASES, batches(len(PHASES), size=12), strict=True):
        freeze(model, names)
        for turn in range(4 // mesh.size):
            batch = turn * mesh.size + mesh.rank
            mine = slice(3 * batch, 3 * batch + 3)
            (loss_of(model, tokens[mine], targets[mine]) * 0.25).backward()
        losses.append(clip_grad_norm_(model.parameters(), 1.0))
        update(model)
    return losses, full_state_dict(model)


def test_it_may_with_the_same_bits_at_every_world_size():
    losses, weights = thread.run(1, invariant)[0]
    for ranks in (2, 4):
        found = thread.run(ranks, invariant)[0]
        assert found[0] == losses
        for name, values in weights.items():
            np.testing.assert_array_equal(found[1][name], values, err_msg=name)


# -- traffic and memory


def traffic(phases, strategy, **settings):
    """For each step: reductions, bytes received in them, barriers, bytes held, bytes planned."""
    counted = []
    model, mesh = made(Net, strategy, counted, **settings)
    result = []
    for names, (tokens, targets) in zip(phases, batches(len(phases), size=4), strict=True):
        freeze(model, names)
        plan = sum(memory_plan(model, optimizer_states=0).device.values())
        for communicator in counted:
            communicator.reset()
        loss_of(model, tokens, targets).backward()
        called = [sum(c.calls[op] for c in counted) for op in ("all_gather", "reduce_scatter", "barrier")]
        received = sum(c.bytes["reduce_scatter"] for c in counted)
        model.zero_grad()
        result.append((*called, received, bytes_held(model), plan))
    return result, [[g.layout for g in u.groups] for u in units(model)]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_traffic_and_memory_follow(strategy):
    phases = [(), (), ("blocks",), ("blocks",), BIASES, ()]
    found, layouts = thread.run(2, traffic, phases, strategy)[0]
    _, all_units, only_root, still, few, again = found
    root, block = layouts[0][0], layouts[1][0]
    row = Rows.plan(block, {1, 3}, False)  # up.bias (13) and down.bias (7)
    assert all_units[1] == 4 and only_root[1] == still[1] == 1 and few[1] == again[1] == 4
    assert only_root[3] == root.total // 2 * 4  # of two ranks each receives a half
    assert few[3] == only_root[3] + 3 * row.total // 2 * 4 < all_units[3] / 2
    assert again == (*all_units[:2], 1, *all_units[3:])
    assert [step[2] for step in found[1:]] == [0, 1, 0, 1, 1]  # a change costs a barrier, and no gather
    assert only_root[0] == still[0] <= all_units[0] == few[0]  # frozen first blocks need no backward
    assert all(held == planned for *_, held, planned in found)
    assert only_root[4] < few[4] < all_units[4]


def frozen_late(names):
    """What gradients take in the plan of a model frozen before it is sharded, and after."""
    shardrt.manual_seed(3)
    model = Net()
    freeze(model, names)
    before = memory_plan(shard(model, None)).device
    late = shard(Net(), None)
    late(batches(1)[0][0])
    freeze(late, names)
    after = memory_plan(late).device
    return [
        (plan["sharded gradients"], plan["full gradients"], plan["optimizer state"])
        for plan in (before, after)
    ]


def test_units_frozen_late_take_what_those_frozen_before_take():
    before, after = frozen_late(("blocks.1", "blocks.2"))
    assert before == after


def test_the_table_of_units_says_what_is_frozen_now():
    model = shard(Net(), None)
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
    told = Rows.plan(layout, {0, 2}, True)
    assert told.moves == ((Move(0, 16, 0, 128),), (Move(128, 16, 0, 72), Move(208, 96, 96, 20)))
    assert told.uses == 3 and told.size == 144 and told.full == 240 and told.offsets == {0: 0, 2: 208}


# -- agreement


def apart(strategy, names_of_rank_1):
    model, mesh = made(Net, strategy)
    for step, (tokens, targets) in enumerate(batches(3, size=4)):
        if step == 1 and mesh.rank == 1:
            freeze(model, names_of_rank_1)
        elif step == 1:
            freeze(model, ("blocks.0.up.weight",))
        loss_of(model, tokens, targets).backward()
        update(model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_OPT", "NO_SHARD"])
@pytest.mark.parametrize("names", [(), ("blocks.1.up.weight",), ("blocks",)], ids=str)
def test_ranks_that_freeze_different_parameters_are_told(strategy, names):
    with pytest.raises((CollectiveMismatch, StreamError), match="ranks differ .* parameters trained"):
        thread.run(2, apart, strategy, names)


# -- a change while a tape, or a gradient, is there


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x))


def frozen_between(model, mesh):
    """Frozen after the first of two forwards, whose gradient must come all the same."""
    x = rows_of(mesh, np.arange(24, dtype=np.float32).reshape(8, 3) / 10)
    first = (model(x) * model(x)).mean()
    model.first.requires_grad_(False)
    second = model(x).mean()
    (first + second).backward()
    found = {n: None if g is None else np.array(g) for n, g in full_gradients(model)}
    model.zero_grad()
    model(x).mean().backward()
    return found, {n for n, p in model.named_parameters() if p.grad is None}


def between(strategy):
    shardrt.manual_seed(1)
    model, mesh = Two(), init_device_mesh("auto")
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh, strategy=strategy)
    return frozen_between(model, mesh)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_what_is_frozen_after_a_forward_has_the_gradient_of_that_forward(strategy):
    shardrt.manual_seed(1)
    plain_model = Two()
    x = np.arange(24, dtype=np.float32).reshape(8, 3) / 10
    first = (plain_model(x) * plain_model(x)).mean()
    plain_model.first.requires_grad_(False)
    (first + plain_model(x).mean()).backward()
    found, none = thread.run(2, between, strategy)[0]
    for name, parameter in plain_model.named_parameters():
        np.testing.assert_allclose(found[name], parameter.grad, rtol=1e-5, atol=1e-6, err_msg=name)
    assert none == {"first.weight", "first.bias"}


def unfrozen_between(strategy, no_syncs):
    """Gradients of two micro-batches, the first with frozen parameters; and memory held and planned."""
    model, mesh = made(Net, strategy)
    (tokens, targets), (more, of_more) = batches(2, size=4)
    freeze(model, FROZEN_FIRST)
    with no_sync(model) if no_syncs else nullcontext():
        loss_of(model, rows_of(mesh, tokens), rows_of(mesh, targets)).backward()
    freeze(model, ())
    loss_of(model, rows_of(mesh, more), rows_of(mesh, of_more)).backward()
    planned = memory_plan(model, optimizer_states=0, no_sync=no_syncs).device
    found = {name: np.array(g) for name, g in full_gradients(model)}
    return found, (bytes_held(model), sum(planned.values()))


FROZEN_FIRST = ("blocks.0.up.weight", "blocks.1.down", "blocks.2", "embed")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_unfrozen_after_a_backward_under_no_sync_keeps_what_was_accumulated(strategy):
    ranks = 4 if strategy.startswith("HYBRID") else 2
    found, (held, planned) = thread.run(ranks, unfrozen_between, strategy, True)[0]
    expected, _ = thread.run(ranks, unfrozen_between, strategy, False)[0]
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-6, err_msg=name)
    assert ranks > 2 or held == planned


# -- what nothing used


class Choosing(nn.Module):
    """Uses one of its layers, or two, as it is told."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.block = Block()
        self.use = (0,)

    def forward(self, x):
        return sum((self.layers[i](x) for i in self.use), Tensor(np.zeros((), np.float32)) + x)


def unused(uses, strategy=None, find=True, way="one backward", **settings):
    """Which parameters have gradients after each step, and what AdamW has left alone."""
    counted = []
    shardrt.manual_seed(3)
    wrap = lambda c: counted.append(CountedCommunicator(c)) or counted[-1]  # noqa: E731
    mesh = init_device_mesh("auto", (2, 2) if strategy == "HYBRID_SHARD" else None, wrap=wrap)
    model = fully_shard(Choosing(), mesh=mesh, strategy=strategy, **settings)
    set_find_unused_parameters(model, find)
    x = np.ones((2, 3), np.float32)
    result = []
    for by_rank in uses:
        for communicator in counted:
            communicator.reset()
        if way == "twice":
            model.use = by_rank[0]
            model(x).sum().backward()
        model.use = by_rank[mesh.rank % len(by_rank)]
        model(x).sum().backward()
        calls = sum((c.calls for c in counted), start=counted[0].calls.__class__())
        found = dict(full_gradients(model))
        have = {name for name, g in found.items() if g is not None}
        assert have == {name for name, p in model.named_parameters() if p.grad is not None}
        values = {name: np.array(g) for name, g in found.items() if g is not None}
        result.append((have, values, calls))
        model.zero_grad()
        held = bytes_held(model), sum(memory_plan(model, optimizer_states=0).device.values())
    return result, held


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
    ranks = 4 if settings.get("strategy") == "HYBRID_SHARD" else 2
    found = thread.run(ranks, unused, USES, **settings)
    zeros = thread.run(ranks, unused, USES, find=False, **settings)[0][0]
    for result, _ in found:
        assert [have for have, _, _ in result] == [layer(0), layer(0, 2), layer(0, 1, 2), layer(1)]
        for (have, values, calls), (all_have, all_values, all_calls) in zip(result, zeros, strict=True):
            assert calls <= all_calls and have < all_have  # it costs no collective
            for name in have:
                np.testing.assert_array_equal(values[name], all_values[name], err_msg=name)
            assert all((all_values[name] == 0).all() for name in all_have - have)


def test_a_parameter_used_in_any_backward_of_a_step_has_a_gradient():
    for result, (held, planned) in thread.run(1, unused, [((0,),), ((1,),)], way="twice"):
        assert [have for have, _, _ in result] == [layer(0), layer(1)] and held == planned
    mixed = thread.run(2, unused, [((0,), (2,))], way="twice")[0][0]
    assert mixed[0][0] == layer(0, 2)


def test_it_is_set_between_steps():
    model = fully_shard(Choosing())
    model(np.ones((2, 3), np.float32)).sum().backward()
    with pytest.raises(RuntimeError, match="there are gradients; call zero_grad before"):
        set_find_unused_parameters(model)
    assert model.layers[1].weight.grad is not None
    model.zero_grad()
    set_find_unused_parameters(model)
    model(np.ones((2, 3), np.float32)).sum().backward()
    assert model.layers[1].weight.grad is None and model.layers[0].weight.grad is not None


def test_integers_that_are_to_be_trained_are_named():
    class Table(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.table = nn.Parameter((2,), nn.init.Zeros(), requires_grad=False, dtype=np.int64)

    model = fully_shard(Table())
    model.requires_grad_(True)
    with pytest.raises(TypeError, match="parameter 'table' is int64 and can't require a gradient"):
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
    shardrt.manual_seed(3)
    model, mesh = Conditional(), init_device_mesh("auto") if sharded else None
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
        optimizer.step()
        optimizer.zero_grad()
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
    expected = conditional(False, *frozen, by_rank)
    found = thread.run(2, conditional, True, *frozen, by_rank)[0]
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-6, err_msg=name)


class Either(nn.Module):
    """One of two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x, layer):
        return self.layers[layer](x)


class WithEither(nn.Module):
    def __init__(self):
        super().__init__()
        self.either, self.head = Either(), nn.Linear(3, 3)

    def forward(self, x, layer):
        return self.head(self.either(x, layer))


def only_frozen_here():
    """Rank 0 uses the layer that is frozen, rank 1 the other one."""
    shardrt.manual_seed(3)
    model, mesh = WithEither(), init_device_mesh("auto")
    freeze(model, ("either.layers.0",))
    fully_shard(model.either, mesh=mesh)
    fully_shard(model, mesh=mesh)
    set_find_unused_parameters(model)
    model(Tensor(np.ones((2, 3), np.float32)), mesh.rank).sum().backward()
    return {name: np.array(g) for name, g in full_gradients(model)}


def test_a_rank_that_used_only_what_is_frozen_of_a_unit_joins_the_others():
    shardrt.manual_seed(3)
    plain = WithEither()
    for layer in (0, 1):
        (plain(Tensor(np.ones((2, 3), np.float32)), layer).sum() * 0.5).backward()
    found = thread.run(2, only_frozen_here)
    assert all(rank.keys() == found[0].keys() for rank in found)
    for name, gradient in found[0].items():
        np.testing.assert_allclose(gradient, plain.get_parameter(name).grad, rtol=1e-6, err_msg=name)
    assert "either.layers.1.weight" in found[0] and "either.layers.0.weight" not in found[0]
