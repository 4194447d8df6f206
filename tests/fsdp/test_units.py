"""What a unit is made of, and reading and writing whole parameters outside forward."""

import numpy as np
import pytest

import shardrt
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
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
from tests import lab
from tests.lab import Block, Net

TOKENS, TARGETS = BATCH = lab.batches(1)[0]
BF16 = MixedPrecisionPolicy("bfloat16")
CALLS = ("all_gather", "reduce_scatter")


def plain_gradients(make=Net):
    """Of the whole batch."""
    model = lab.seeded(make)
    lab.backward(model)
    return lab.gradients(model)


def values_of(model):
    return {name: np.array(p.data) for name, p in model.named_parameters()}


# -- several modules as one unit


@lab.on_ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_list_of_modules_is_one_unit_gathered_and_reduced_once(prefetch):
    counts = lab.Counts()
    model, mesh = lab.seeded(), init_device_mesh("auto", wrap=counts)
    fully_shard([model.blocks[0], model.blocks[2]], mesh=mesh)
    fully_shard(model.blocks[1], mesh=mesh)
    fully_shard(model, mesh=mesh, prefetch=prefetch)
    for _ in range(2):
        counts.reset()
        lab.backward(model, mesh, scale=0.5)
    assert [unit.label for unit in units(model)] == ["(root)", "blocks.0 + blocks.2", "blocks.1"]
    assert counts.calls(*CALLS) == [2 * 2 + 1, 3]
    lab.assert_close(lab.gradients(model), plain_gradients(), rtol=1e-4, atol=1e-7)


class Half(nn.Module):
    """Calls one of its two layers; both are one unit."""

    def __init__(self):
        super().__init__()
        self.unused, self.used = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x):
        return x + self.used(x)


@lab.on_ranks(2)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_a_unit_of_which_a_part_is_called_is_released_like_others(strategy, recomputed):
    def six_halves():
        return nn.Sequential(*[Half() for _ in range(6)])

    counts, x = lab.Counts(), np.ones((2, 7), np.float32)
    model, mesh = lab.seeded(six_halves), init_device_mesh("auto", wrap=counts)
    for part in model:
        fully_shard([part.unused, part.used], mesh=mesh, strategy=strategy)
        if recomputed:
            checkpoint(part)
    fully_shard(model, mesh=mesh, strategy=strategy)

    def gathered():
        return sum(unit.gathered for unit in units(model)[1:])

    kept = strategy == "SHARD_GRAD_OP" and not recomputed  # from forward to backward
    for _ in range(2):
        counts.reset()
        loss = model(x).sum()
        assert gathered() == 6 * kept
        (loss * 0.5).backward()
        assert gathered() == 0
        with shardrt.no_grad():
            model(x)
        assert gathered() == 0
    assert counts.calls(*CALLS) == [6 * (2 if kept else 3), 6]  # the last third: the evaluation
    slots = units(model)[1].groups[0].arenas["gathered"].slots
    assert len(slots) == (1 if strategy == "SHARD_GRAD_OP" else 2)  # of each unit, or of all together
    plain = lab.seeded(six_halves)
    plain(x).sum().backward()
    expected = plain[5].used.weight.grad
    lab.assert_close(lab.gradients(model)["5.used.weight"], expected, rtol=1e-4)


# -- what is ignored


def is_plain(parameter):
    return isinstance(parameter.storage, LocalStorage)


def test_what_is_ignored_stays_whole_is_reduced_by_no_rank_and_is_trained_and_saved():
    def rank():
        model, mesh = lab.seeded(), init_device_mesh("auto")
        fully_shard(model.blocks[0], mesh=mesh, ignored=[model.blocks[0].up.bias])
        fully_shard(model, mesh=mesh, ignored=[model.blocks[1], model.norm.weight, model.blocks[0].up.bias])
        assert all(p.grad is None and p.shard.size == p.size for p in model.parameters() if is_plain(p))
        lab.backward(model, mesh)
        own = {p.name: p.grad.copy() for p in model.parameters() if is_plain(p)}
        optim.SGD(model.parameters(), lr=0.1).step()
        return own, full_state_dict(model)

    (first, state), (second, _) = thread.run(2, rank)
    block = [f"blocks.1.{name}" for name, _ in Block().named_parameters()]
    assert sorted(first) == sorted(["norm.weight", "blocks.0.up.bias", *block])
    assert not any(np.array_equal(first[name], second[name]) for name in first)  # each has those of its rows
    weights, gradients = values_of(lab.seeded()), plain_gradients()
    for name in first:
        lab.assert_close((first[name] + second[name]) / 2, gradients[name], name, rtol=1e-4, atol=1e-7)
        lab.assert_close(state[name], weights[name] - 0.1 * first[name], name, rtol=1e-6)
    assert state.keys() == weights.keys()


# -- whole parameters outside forward


@lab.on_ranks(1, 2, 3)
@pytest.mark.parametrize("policy", [None, CPUOffloadPolicy()])
@pytest.mark.parametrize("precision", [None, BF16])
def test_full_parameters_are_read_and_written_back_in_float32(policy, precision):
    model, _ = lab.build(offload_policy=policy, mp_policy=precision)
    plain = lab.seeded()
    with full_parameters(model):
        lab.assert_equal(values_of(model), values_of(plain))
        for parameter in model.parameters():
            parameter.data *= 7  # without writeback this is forgotten
    with full_parameters(model.blocks, writeback=True):
        for parameter in (*model.blocks.parameters(), *plain.blocks.parameters()):
            parameter.data *= 0.5
    loss = lab.loss_of(model, *BATCH).item()
    lab.assert_weights(model, values_of(plain))
    if precision is None:
        assert loss == pytest.approx(lab.loss_of(plain, *BATCH).item(), rel=1e-6)


@lab.on_ranks(2)
def test_unshard_keeps_parameters_until_reshard():
    model, _ = lab.build()
    unshard(model)
    lab.assert_equal(values_of(model), values_of(lab.seeded()))
    lab.backward(model)
    assert [unit.gathered for unit in units(model)] == [True] * 4
    reshard(model)
    with pytest.raises(RuntimeError, match=r"'embed\.weight' is sharded"):
        model.embed.weight.data  # noqa: B018
    lab.assert_close(lab.gradients(model), plain_gradients(), rtol=1e-4, atol=1e-7)


@lab.on_ranks(2)
@pytest.mark.parametrize("precision", [None, BF16])
def test_what_is_held_follows_the_optimizer(precision):
    model, _ = lab.build(mp_policy=precision)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    unshard(model)
    lab.backward(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="is sharded"):
        model.embed.weight.data  # noqa: B018  gathered before the step
    held = lab.loss_of(model, *BATCH).item()
    assert not np.array_equal(model.embed.weight.data, lab.seeded().embed.weight.data)
    reshard(model)
    assert held == lab.loss_of(model, *BATCH).item()


@lab.on_ranks(2)
def test_gathered_parameters_are_not_written_to_where_it_would_be_lost():
    model, _ = lab.build(strategy="SHARD_OPT")
    lab.loss_of(model, *BATCH)
    with pytest.raises(RuntimeError, match="is sharded"):  # though SHARD_OPT keeps it gathered
        model.embed.weight.data  # noqa: B018
    unshard(model)
    with pytest.raises(RuntimeError, match=r"full_parameters\(module, writeback=True\)"):
        model.embed.weight.data = 0
    with pytest.raises(ValueError, match="read-only"):
        model.embed.weight.data *= 0


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


STRATEGIES = [
    *({"strategy": name} for name in ("NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP", "FULL_SHARD")),
    {"strategy": "HYBRID_SHARD", "shape": (1, 2)},
]


@lab.on_ranks(2)
@pytest.mark.parametrize("settings", STRATEGIES, ids=lambda s: s["strategy"])
def test_forward_cannot_write_what_other_ranks_read(settings):
    model, _ = lab.build(Scaled, **settings)
    before = values_of(lab.seeded(Scaled))
    for how in (by_data, by_view, by_operator, by_shard):
        model.how = how
        with pytest.raises(ValueError, match="read-only"):
            lab.loss_of(model, *BATCH)
        lab.assert_weights(model, before, how)


@lab.on_ranks(2)
@pytest.mark.parametrize("precision", [None, MixedPrecisionPolicy("bfloat16", "float32")])
@pytest.mark.parametrize("settings", STRATEGIES, ids=lambda s: s["strategy"])
def test_what_is_written_to_shards_is_seen_by_the_next_forward(settings, precision):
    """Three steps of SGD, by the optimizer and by hand."""
    losses = []
    for by_hand in (False, True):
        model, _ = lab.build(mp_policy=precision, **settings)
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            losses.append(lab.backward(model))
            for parameter in model.parameters() if by_hand else ():
                with pytest.raises(ValueError, match="read-only"):
                    parameter.shard[...] -= np.float32(0.5) * parameter.grad
                with parameter.writing() as shard:
                    shard -= np.float32(0.5) * parameter.grad
            if not by_hand:
                optimizer.step()
            model.zero_grad()
    lab.assert_close(losses[3:], losses[:3], rtol=1e-6)
    assert losses[2] < losses[1] < losses[0]


@lab.on_ranks(2)
def test_loans_of_whole_parameters_may_lie_inside_one_another():
    model, _ = lab.build()
    expected = {name: 0.5 * value for name, value in values_of(lab.seeded()).items()}
    with full_parameters(model, writeback=True):
        for parameter in model.parameters():
            parameter.data *= 0.5
        with full_parameters(model.blocks[0]):
            pass
        for _ in range(2):
            lab.assert_weights(model, expected)


@lab.on_ranks(2)
def test_a_part_of_a_state_can_be_loaded():
    model, _ = lab.build()
    part = {"blocks.1.up.bias": np.full(13, 4.0, np.float32)}
    model.load_state_dict(part, strict=False)
    lab.assert_weights(model, values_of(lab.seeded()) | part)


# -- other entries than forward


@lab.on_ranks(1, 3)
@pytest.mark.parametrize("settings", [{}, {"strategy": "NO_SHARD"}, {"offload_policy": CPUOffloadPolicy()}])
def test_whole_gradients_are_those_of_the_pieces(settings):
    model, mesh = lab.build(**settings)
    assert set(dict(full_gradients(model)).values()) == {None}
    lab.backward(model, mesh)
    found = {name: np.array(gradient) for name, gradient in full_gradients(model)}
    lab.assert_equal(found, lab.gradients(model))


def test_a_plain_model_has_its_gradients_whole():
    plain = lab.seeded()
    lab.backward(plain)
    lab.assert_equal(dict(full_gradients(plain)), {name: p.grad for name, p in plain.named_parameters()})


class Scorer(Net):
    def score(self, tokens):
        return self(tokens).sum()

    def embedded(self, tokens):
        return self.embed(tokens)


@pytest.mark.filterwarnings("ignore:fully_shard. expected")  # the first forward came another way
@lab.on_ranks(2)
def test_a_registered_method_is_an_entry_like_forward():
    plain, (model, _) = lab.seeded(Scorer), lab.build(Scorer)
    with pytest.raises(RuntimeError, match=r"'embed\.weight' is sharded"):
        model.embedded(TOKENS)
    register_forward_method(model, "embedded")
    for each in (model, plain):
        (each.embedded(TOKENS) * 2.0).sum().backward()
    lab.assert_close(lab.gradients(model)["embed.weight"], plain.embed.weight.grad, rtol=1e-6)
    assert model.score(TOKENS).item() == pytest.approx(plain.score(TOKENS).item(), rel=1e-5)


class CountedBlock(Block):
    calls = 0

    def forward(self, x):
        return self.score(x)

    def score(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("name", ["__call__", "score"])
def test_a_registered_method_is_recomputed_like_forward(name):
    block = fully_shard(checkpoint(CountedBlock()), mesh=init_device_mesh("auto"))
    register_forward_method(block, "score")
    getattr(block, name)(shardrt.Tensor(np.ones((2, 7), np.float32))).sum().backward()
    assert block.calls == 2


NO_UNIT = "Net has no sharded unit; call fully_shard first"
test_calls_that_are_refused = lab.refusals(
    (lambda: register_forward_method(Net(), "run_blocks"), ValueError, "Net is not a unit"),
    (lambda: register_forward_method(fully_shard(Net()), "nothing"), AttributeError, "nothing"),
    (lambda: unshard(Net()), ValueError, NO_UNIT),
    (lambda: reshard(Net()), ValueError, NO_UNIT),
    (lambda: explain(Net()), ValueError, "explain: Net has no sharded unit"),
    (
        lambda: Net().load_state_dict({"blocks.9.up.bias": np.zeros(13, np.float32)}, strict=False),
        ValueError,
        r"missing keys \[\], unexpected keys \['blocks.9.up.bias'\]",
    ),
    (
        lambda: units(lab.build()[0])[0].move(State.KEPT),
        RuntimeError,
        r"unit \(root\): illegal move from SHARDED to KEPT",
    ),
)


# -- explain


@pytest.mark.parametrize("instructions", [True, False])
def test_explain_says_what_is_where(monkeypatch, instructions):
    monkeypatch.setattr(onednn, "computes_bf16", lambda: instructions)
    model = lab.seeded()
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


def test_the_recorded_order_is_explained_after_a_forward():
    model = lab.seeded()

    def backwards(x):
        for block in list(model.blocks)[::-1]:
            x = block(x)
        return x

    model.run_blocks = backwards
    lab.shard(model, None)
    F.cross_entropy(model(TOKENS), TARGETS)
    text = {line.split()[0]: line for line in explain(model).splitlines()}
    assert text["blocks.2"].endswith("with (root)") and text["blocks.0"].endswith("with blocks.1")


# -- states


@lab.on_ranks(2)
@pytest.mark.parametrize(
    "strategy, forward, backward, update",
    [
        ("FULL_SHARD", ("KEPT", "SHARDED"), "SHARDED", "SHARDED"),
        ("SHARD_GRAD_OP", ("KEPT", "KEPT"), "SHARDED", "SHARDED"),
        ("SHARD_OPT", ("KEPT", "KEPT"), "KEPT", "STALE"),
        ("NO_SHARD", ("KEPT", "KEPT"), "KEPT", "STALE"),
    ],
)
def test_the_state_of_a_unit_follows_from_its_strategy(strategy, forward, backward, update):
    """The states of the outermost unit and of its first block."""
    model, _ = lab.build(strategy=strategy)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def states():
        return tuple(unit.state.name for unit in units(model)[:2])

    for batch in lab.batches(2):
        loss = lab.loss_of(model, *batch)
        assert states() == forward
        loss.backward()
        assert states() == (backward,) * 2
        lab.update(optimizer)
        assert states() == (update,) * 2
    unshard(model)
    assert states() == ("KEPT",) * 2
    reshard(model)
    assert states() == ("SHARDED",) * 2


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


@lab.on_ranks(2)
def test_a_backward_inside_of_a_forward_leaves_the_unit_around_it_gathered():
    plain, model, mesh = lab.seeded(BackwardInside), lab.seeded(BackwardInside), init_device_mesh("auto")
    fully_shard(model.energy, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = [each(np.ones((2, 5), np.float32)) for each in (model, plain)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item())
    lab.assert_close(lab.gradients(model)["own"], plain.own.grad, rtol=1e-6)
