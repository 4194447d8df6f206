"""What a unit is made of, and reading and writing whole parameters outside forward."""

import numpy as np
import pytest

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import CountedCommunicator, init_device_mesh, thread
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    explain,
    full_gradients,
    full_parameters,
    fully_shard,
    register_forward_method,
    reshard,
    units,
    unshard,
)
from shardrt.fsdp.unit import State
from shardrt.kernels import onednn
from shardrt.nn.storage import LocalStorage
from shardrt.recompute import checkpoint
from tests.fsdp.nets import Block, Net, batches, gradients, loss_of, shard

TOKENS, TARGETS = batches(1)[0]


def rows_of(mesh, array):
    count = len(array) // mesh.size
    return array[mesh.rank * count : (mesh.rank + 1) * count]


def net():
    shardrt.manual_seed(3)
    return Net()


# -- several modules as one unit


def as_one_unit(prefetch):
    made = []

    def counted(communicator):
        made.append(CountedCommunicator(communicator))
        return made[-1]

    model, mesh = net(), init_device_mesh("auto", wrap=counted)
    fully_shard([model.blocks[0], model.blocks[2]], mesh=mesh)
    fully_shard(model.blocks[1], mesh=mesh)
    fully_shard(model, mesh=mesh, prefetch=prefetch)
    for _ in range(2):
        before = sum(c.calls["all_gather"] for c in made), sum(c.calls["reduce_scatter"] for c in made)
        loss_of(model, rows_of(mesh, TOKENS), rows_of(mesh, TARGETS)).backward()
        calls = sum(c.calls["all_gather"] for c in made), sum(c.calls["reduce_scatter"] for c in made)
    found = gradients(model)
    return [unit.label for unit in units(model)], np.subtract(calls, before).tolist(), found


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_list_of_modules_is_one_unit_gathered_and_reduced_once(prefetch):
    labels, (gathers, reductions), found = thread.run(2, as_one_unit, prefetch)[0]
    assert labels == ["(root)", "blocks.0 + blocks.2", "blocks.1"]
    assert gathers == 2 * 2 + 1 and reductions == 3
    plain = net()
    loss_of(plain, TOKENS, TARGETS).backward()
    for name, parameter in plain.named_parameters():
        np.testing.assert_allclose(found[name] / 2, parameter.grad, rtol=1e-4, atol=1e-7, err_msg=name)


class Half(nn.Module):
    """Calls one of its two layers; both are one unit."""

    def __init__(self):
        super().__init__()
        self.unused, self.used = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x):
        return x + self.used(x)


def partly_called(recomputed, **settings):
    """Units gathered after a forward, a backward, an evaluation; gathers and reductions; slots; gradients."""
    made = []
    shardrt.manual_seed(3)
    model = nn.Sequential(*[Half() for _ in range(6)])
    mesh = init_device_mesh("auto", wrap=lambda c: made.append(CountedCommunicator(c)) or made[-1])
    for part in model:
        fully_shard([part.unused, part.used], mesh=mesh, **settings)
        if recomputed:
            checkpoint(part)
    fully_shard(model, mesh=mesh, **settings)
    x = np.ones((2, 7), np.float32)
    states = []

    def note():
        states.append(sum(unit.gathered for unit in units(model)[1:]))

    for _ in range(2):
        before = sum(c.calls["all_gather"] for c in made), sum(c.calls["reduce_scatter"] for c in made)
        loss = model(x).sum()
        note()
        loss.backward()
        note()
        with shardrt.no_grad():
            model(x)
        note()
    calls = sum(c.calls["all_gather"] for c in made), sum(c.calls["reduce_scatter"] for c in made)
    slots = len(units(model)[1].groups[0].arenas["gathered"].slots)
    return states, np.subtract(calls, before).tolist(), slots, gradients(model)["5.used.weight"]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_unit_of_which_a_part_is_called_is_released_like_others(strategy, recomputed):
    shardrt.manual_seed(3)
    plain = nn.Sequential(*[Half() for _ in range(6)])
    plain(np.ones((2, 7), np.float32)).sum().backward()
    kept = strategy == "SHARD_GRAD_OP" and not recomputed  # from forward to backward
    for states, (gathers, reductions), slots, gradient in thread.run(
        2, partly_called, recomputed, strategy=strategy
    ):
        assert states == [6 * kept, 0, 0] * 2
        assert (gathers, reductions) == (6 * (2 if kept else 3), 6)  # the last third: the evaluation
        assert slots == (1 if strategy == "SHARD_GRAD_OP" else 2)  # of each unit, or of all together
        np.testing.assert_allclose(gradient / 2, plain[5].used.weight.grad, rtol=1e-4)


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match="the list of modules is empty"):
        fully_shard([])


# -- what is ignored


def with_ignored():
    model, mesh = net(), init_device_mesh("auto")
    fully_shard(model.blocks[0], mesh=mesh, ignored=[model.blocks[0].up.bias])
    fully_shard(model, mesh=mesh, ignored=[model.blocks[1], model.norm.weight, model.blocks[0].up.bias])
    whole = [p.name for p in model.parameters() if p.grad is None and p.shard.size == p.size and _plain(p)]
    loss_of(model, rows_of(mesh, TOKENS), rows_of(mesh, TARGETS)).backward()
    own = {p.name: p.grad.copy() for p in model.parameters() if _plain(p)}
    optim.SGD(model.parameters(), lr=0.1).step()
    return whole, own, full_state_dict(model)


def _plain(parameter):
    return isinstance(parameter.storage, LocalStorage)


def test_what_is_ignored_stays_whole_is_reduced_by_nobody_and_is_trained_and_saved():
    (whole, first, state), (_, second, _) = thread.run(2, with_ignored)
    block = [f"blocks.1.{name}" for name, _ in Block().named_parameters()]
    assert sorted(whole) == sorted(["norm.weight", "blocks.0.up.bias", *block])
    plain = net()
    loss_of(plain, TOKENS, TARGETS).backward()
    for name, parameter in plain.named_parameters():
        if name in first:  # each rank has the gradient of its own rows
            assert not np.array_equal(first[name], second[name])
            np.testing.assert_allclose((first[name] + second[name]) / 2, parameter.grad, rtol=1e-4, atol=1e-7)
            np.testing.assert_allclose(state[name], parameter.data - 0.1 * first[name], rtol=1e-6)
    assert state.keys() == dict(plain.named_parameters()).keys()


# -- whole parameters outside forward


def halved(policy, precision):
    model, mesh = net(), init_device_mesh("auto")
    shard(model, mesh, offload_policy=policy, mp_policy=precision)
    with full_parameters(model):
        seen = {name: p.data.copy() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data *= 7  # without writeback this is forgotten
    with full_parameters(model.blocks, writeback=True):
        for parameter in model.blocks.parameters():
            parameter.data *= 0.5
    loss = loss_of(model, TOKENS, TARGETS).item()
    return seen, full_state_dict(model), loss


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("policy", [None, CPUOffloadPolicy()])
@pytest.mark.parametrize("precision", [None, MixedPrecisionPolicy("bfloat16")])
def test_full_parameters_are_read_and_written_back_in_float32(ranks, policy, precision):
    results = thread.run(ranks, halved, policy, precision)
    plain = net()
    for name, parameter in plain.named_parameters():
        for seen, _, _ in results:
            np.testing.assert_array_equal(seen[name], parameter.data)
        if name.startswith("blocks"):
            parameter.data *= 0.5
        np.testing.assert_array_equal(results[0][1][name], parameter.data)
    if precision is None:
        expected = loss_of(plain, TOKENS, TARGETS).item()
        assert all(loss == pytest.approx(expected, rel=1e-6) for *_, loss in results)


def held():
    model, mesh = net(), init_device_mesh("auto")
    shard(model, mesh)
    unshard(model)
    whole = {name: p.data.copy() for name, p in model.named_parameters()}
    loss_of(model, TOKENS, TARGETS).backward()
    states = [unit.gathered for unit in units(model)]
    reshard(model)
    with pytest.raises(RuntimeError, match=r"'embed\.weight' is sharded"):
        model.embed.weight.data  # noqa: B018
    return whole, states, gradients(model)


def test_unshard_keeps_parameters_until_reshard():
    plain = net()
    loss_of(plain, TOKENS, TARGETS).backward()
    for whole, states, found in thread.run(2, held):
        assert states == [True] * 4
        for name, parameter in plain.named_parameters():
            np.testing.assert_array_equal(whole[name], parameter.data)
            np.testing.assert_allclose(found[name], parameter.grad, rtol=1e-4, atol=1e-7)


def trained_while_held(precision):
    model, mesh = net(), init_device_mesh("auto")
    shard(model, mesh, mp_policy=precision)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    unshard(model)
    loss_of(model, TOKENS, TARGETS).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="is sharded"):
        model.embed.weight.data  # noqa: B018  gathered before the step
    held = loss_of(model, TOKENS, TARGETS).item()
    whole = model.embed.weight.data.copy()
    reshard(model)
    return held, loss_of(model, TOKENS, TARGETS).item(), whole


@pytest.mark.parametrize("precision", [None, MixedPrecisionPolicy("bfloat16")])
def test_what_is_held_follows_the_optimizer(precision):
    for held, gathered_anew, whole in thread.run(2, trained_while_held, precision):
        assert held == gathered_anew
        assert not np.array_equal(whole, net().embed.weight.data)


def changed_in_place():
    model = net()
    shard(model, init_device_mesh("auto"), strategy="SHARD_OPT")
    loss_of(model, TOKENS, TARGETS)
    with pytest.raises(RuntimeError, match="is sharded"):  # though SHARD_OPT keeps it gathered
        model.embed.weight.data  # noqa: B018
    unshard(model)
    with pytest.raises(RuntimeError, match=r"full_parameters\(module, writeback=True\)"):
        model.embed.weight.data = 0
    with pytest.raises(ValueError, match="read-only"):
        model.embed.weight.data *= 0


def test_gathered_parameters_are_not_written_to_where_it_would_be_lost():
    thread.run(2, changed_in_place)


class Scaled(Net):
    """Scales a weight in forward, in its place."""

    how = None

    def run_blocks(self, x):
        with shardrt.no_grad():
            self.how(self.blocks[0].up.weight, self.norm.weight)
        return super().run_blocks(x)


def by_data(*parameters):
    parameters[1].data *= 0.5


def by_view(*parameters):
    parameters[1].data.T[...] = 0.5


def by_operator(*parameters):
    norm = parameters[1]
    norm *= 0.5


def by_shard(*parameters):
    parameters[0].shard[...] = 0.5


def written_in_forward(how, **settings):
    shardrt.manual_seed(3)
    model, mesh = Scaled(), init_device_mesh("auto", settings.pop("shape", None))
    shard(model, mesh, **settings)
    Scaled.how = staticmethod(how)
    before = full_state_dict(model)
    with pytest.raises(ValueError, match="read-only"):
        loss_of(model, TOKENS, TARGETS)
    after = full_state_dict(model)
    return all(np.array_equal(after[name], values) for name, values in before.items())


STRATEGIES = [
    *({"strategy": name} for name in ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD")),
    {"strategy": "HYBRID_SHARD", "shape": (1, 2)},
]


@pytest.mark.parametrize("how", [by_data, by_view, by_operator, by_shard])
@pytest.mark.parametrize("settings", STRATEGIES, ids=lambda s: s["strategy"])
def test_forward_cannot_write_what_other_ranks_read(how, settings):
    assert thread.run(2, written_in_forward, how, **settings) == [True, True]


def updated_by_hand(by_hand, precision, **settings):
    """Losses of three steps of SGD."""
    model, mesh = net(), init_device_mesh("auto", settings.pop("shape", None))
    shard(model, mesh, mp_policy=precision, **settings)
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = loss_of(model, TOKENS, TARGETS)
        loss.backward()
        losses.append(loss.item())
        if by_hand:
            for parameter in model.parameters():
                with pytest.raises(ValueError, match="read-only"):
                    parameter.shard[...] -= np.float32(0.5) * parameter.grad
                with parameter.writing() as shard_:
                    shard_ -= np.float32(0.5) * parameter.grad
        else:
            optimizer.step()
        model.zero_grad()
    return losses


@pytest.mark.parametrize("precision", [None, MixedPrecisionPolicy("bfloat16", "float32")])
@pytest.mark.parametrize("settings", STRATEGIES, ids=lambda s: s["strategy"])
def test_what_is_written_to_shards_is_seen_by_the_next_forward(settings, precision):
    expected = thread.run(2, updated_by_hand, False, precision, **settings)
    found = thread.run(2, updated_by_hand, True, precision, **settings)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found[0][2] < found[0][1] < found[0][0]


def saved_inside():
    model = net()
    shard(model, init_device_mesh("auto"))
    with full_parameters(model, writeback=True):
        for parameter in model.parameters():
            parameter.data *= 0.5
        with full_parameters(model.blocks[0]):
            pass
        return full_state_dict(model), full_state_dict(model)


def test_loans_of_whole_parameters_may_lie_inside_one_another():
    (inside, again), *_ = thread.run(2, saved_inside)
    for name, parameter in net().named_parameters():
        np.testing.assert_array_equal(inside[name], 0.5 * parameter.data)
        np.testing.assert_array_equal(again[name], 0.5 * parameter.data)


def partly_loaded():
    model = net()
    shard(model, init_device_mesh("auto"))
    model.load_state_dict({"blocks.1.up.bias": np.full(13, 4.0, np.float32)}, strict=False)
    return full_state_dict(model)


def test_a_part_of_a_state_can_be_loaded():
    loaded, *_ = thread.run(2, partly_loaded)
    for name, parameter in net().named_parameters():
        np.testing.assert_array_equal(loaded[name], 4.0 if name == "blocks.1.up.bias" else parameter.data)
    with pytest.raises(ValueError, match=r"missing \[\], not expected \['blocks.9.up.bias'\]"):
        net().load_state_dict({"blocks.9.up.bias": np.zeros(13, np.float32)}, strict=False)


@pytest.mark.parametrize("call", [unshard, reshard])
def test_a_model_without_units_has_nothing_to_unshard(call):
    with pytest.raises(ValueError, match="Net has no sharded unit; call fully_shard first"):
        call(Net())


# -- other entries than forward


def whole_gradients(ranks, **settings):
    model, mesh = net(), init_device_mesh("auto")
    shard(model, mesh, **settings)
    before = dict(full_gradients(model))
    loss_of(model, rows_of(mesh, TOKENS), rows_of(mesh, TARGETS)).backward()
    found = {name: np.array(gradient) for name, gradient in full_gradients(model)}
    return before, found, gradients(model)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"strategy": "NO_SHARD"}, {"offload_policy": CPUOffloadPolicy()}])
def test_whole_gradients_are_those_of_the_pieces(ranks, settings):
    for before, found, expected in thread.run(ranks, whole_gradients, ranks, **settings):
        assert found.keys() == expected.keys() == before.keys()
        assert set(before.values()) == {None}
        for name, gradient in expected.items():
            np.testing.assert_array_equal(found[name], gradient)


def test_a_plain_model_has_its_gradients_whole():
    plain = net()
    loss_of(plain, TOKENS, TARGETS).backward()
    found = dict(full_gradients(plain))
    assert all(np.array_equal(found[name], p.grad) for name, p in plain.named_parameters())


class Scorer(Net):
    def score(self, tokens):
        return self(tokens).sum()

    def embedded(self, tokens):
        return self.embed(tokens)


def scored():
    shardrt.manual_seed(3)
    model, mesh = Scorer(), init_device_mesh("auto")
    shard(model, mesh)
    with pytest.raises(RuntimeError, match=r"'embed\.weight' is sharded"):
        model.embedded(TOKENS)
    register_forward_method(model, "embedded")
    (model.embedded(TOKENS) * 2.0).sum().backward()
    return gradients(model)["embed.weight"], model.score(TOKENS).item()


@pytest.mark.filterwarnings("ignore:fully_shard. expected")  # the first forward came another way
def test_a_registered_method_is_an_entry_like_forward():
    shardrt.manual_seed(3)
    plain = Scorer()
    (plain.embedded(TOKENS) * 2.0).sum().backward()
    expected = plain.score(TOKENS).item()
    for gradient, value in thread.run(2, scored):
        np.testing.assert_allclose(gradient, plain.embed.weight.grad, rtol=1e-6)
        assert value == pytest.approx(expected, rel=1e-5)


class CountedBlock(Block):
    calls = 0

    def forward(self, x):
        return self.score(x)

    def score(self, x):
        type(self).calls += 1
        return super().forward(x)


def called_as(name):
    shardrt.manual_seed(3)
    block = fully_shard(checkpoint(CountedBlock()), mesh=init_device_mesh("auto"))
    register_forward_method(block, "score")
    CountedBlock.calls = 0
    getattr(block, name)(shardrt.Tensor(np.ones((2, 7), np.float32))).sum().backward()
    return CountedBlock.calls


def test_a_registered_method_is_recomputed_like_forward():
    assert called_as("__call__") == called_as("score") == 2


def test_only_methods_of_units_can_be_registered():
    with pytest.raises(ValueError, match="Net is not a unit"):
        register_forward_method(Net(), "run_blocks")
    with pytest.raises(AttributeError, match="nothing"):
        register_forward_method(fully_shard(Net()), "nothing")


# -- explain


@pytest.mark.parametrize("instructions", [True, False])
def test_explain_says_what_is_where(monkeypatch, instructions):
    monkeypatch.setattr(onednn, "computes_bf16", lambda: instructions)
    model = net()
    model.blocks[2].up.bias.requires_grad = False
    fully_shard(model.blocks[0], strategy="SHARD_OPT", mp_policy=MixedPrecisionPolicy("bfloat16", "float32"))
    fully_shard([model.blocks[1], model.blocks[2]], offload_policy=CPUOffloadPolicy(gradients=False))
    fully_shard(model, prefetch=2)
    lines = [line.split("  ") for line in explain(model).splitlines()]
    table = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert table[0][:4] == ["unit", "parameters", "MB per rank", "strategy"]
    block = sum(p.size for p in Block().parameters())
    rows = {row[0]: row for row in table[1:] if "frozen" not in row[1]}
    computed = "bfloat16" if instructions else "float32 of bfloat16"
    assert rows["blocks.0"][1:] == [
        f"{block}", "0.0", "SHARD_OPT", "always", computed, "float32", "with (root)",
    ]  # fmt: skip
    assert "parameters optimizer" in rows["blocks.1 + blocks.2"]
    assert [row[1] for row in table if "frozen" in row[1]] == ["13 frozen"]


def test_explain_needs_a_unit():
    with pytest.raises(ValueError, match="explain: Net has no sharded unit"):
        explain(Net())


def test_the_recorded_order_is_explained_after_a_forward():
    model = net()

    def backwards(x):
        for block in list(model.blocks)[::-1]:
            x = block(x)
        return x

    model.run_blocks = backwards
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    F.cross_entropy(model(TOKENS), TARGETS)
    text = {line.split()[0]: line for line in explain(model).splitlines()}
    assert text["blocks.2"].endswith("with (root)") and text["blocks.0"].endswith("with blocks.1")


class Wide(nn.Module):
    pass


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"must be a shardrt\.nn\.Module, .*got str"):
        fully_shard("blocks")
    with pytest.raises(TypeError, match="got int"):
        fully_shard([Wide(), 3])


def states_in_a_step(strategy):
    """The states of the outermost unit and of its first block, between the parts of two steps."""
    shardrt.manual_seed(3)
    model = Net()
    shard(model, init_device_mesh("auto"), strategy=strategy)
    optimizer, seen = optim.SGD(model.parameters(), lr=0.1), []

    def note():
        seen.append(tuple(unit.state.name for unit in units(model)[:2]))

    for batch in batches(2):
        loss = loss_of(model, *batch)
        note()
        loss.backward()
        note()
        optimizer.step()
        optimizer.zero_grad()
        note()
    unshard(model)
    note()
    reshard(model)
    note()
    return seen


@pytest.mark.parametrize(
    "strategy, forward, backward, update",
    [
        ("FULL_SHARD", ("KEPT", "SHARDED"), "SHARDED", "SHARDED"),
        ("SHARD_GRAD_OP", ("KEPT", "KEPT"), "SHARDED", "SHARDED"),
        ("SHARD_OPT", ("KEPT", "KEPT"), "KEPT", "STALE"),
    ],
)
def test_the_state_of_a_unit_follows_from_its_strategy(strategy, forward, backward, update):
    expected = [forward, (backward,) * 2, (update,) * 2] * 2 + [("KEPT",) * 2, ("SHARDED",) * 2]
    assert thread.run(2, states_in_a_step, strategy) == [expected] * 2


def moved_without_a_gather():
    model = Net()
    shard(model, init_device_mesh("auto"))
    with pytest.raises(RuntimeError, match=r"unit \(root\): illegal move from SHARDED to KEPT"):
        units(model)[0].move(State.KEPT)


def test_a_unit_makes_no_move_that_its_table_does_not_have():
    thread.run(1, moved_without_a_gather)


class BackwardInside(nn.Module):
    """Takes the gradient of an energy in its forward, as a force field does, and goes on."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Linear(5, 1)
        self.own = nn.Parameter((5,), nn.init.Constant(2.0))

    def forward(self, x):
        inside = shardrt.Tensor(x, requires_grad=True)
        self.energy(inside).sum().backward()
        return (shardrt.Tensor(inside.grad) * self.own).sum()


def with_a_backward_inside():
    shardrt.manual_seed(3)
    model = BackwardInside()
    mesh = init_device_mesh("auto")
    fully_shard(model.energy, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = np.ones((2, 5), np.float32)
    loss = model(x)
    loss.backward()
    return loss.item(), gradients(model)["own"]


def test_a_backward_inside_of_a_forward_leaves_the_unit_around_it_gathered():
    shardrt.manual_seed(3)
    plain = BackwardInside()
    loss = plain(np.ones((2, 5), np.float32))
    loss.backward()
    for found, gradient in thread.run(2, with_a_backward_inside):
        assert found == pytest.approx(loss.item())
        np.testing.assert_allclose(gradient, plain.own.grad, rtol=1e-6)
