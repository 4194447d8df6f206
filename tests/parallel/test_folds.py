"""Experts beside tensor, sequence and context parallelism: tokens that lie along several axes."""

import numpy as np
import pytest

import shardrt
from models.plans import plan_of
from shardrt import Tensor, nn, no_grad
from shardrt.autograd import enable_grad
from shardrt.comm import init_device_mesh
from shardrt.fsdp import explain, fully_shard, set_world_invariant
from shardrt.nn.parameter_placement import joined
from shardrt.nn.utils import grad_norm
from shardrt.parallel import (
    ColwiseParallel,
    ExpertParallel,
    TokenParallel,
    expert_plan,
    parallelize_module,
    shard_sequence,
)
from tests import lab
from tests.parallel.nets import TIME, VOCAB, alone, build, make, mesh_of, trained
from tests.parallel.routed import COUNT, WIDTH, K
from tests.parallel.routed import Model as Blocks
from tests.ranks import run_ranks

SP = {"sequence": True}
CASES = {  # name: axes, ep, how
    "tp 2, whole experts": ({"tp": 2}, 1, SP),
    "tp 2, sp, ep 2, experts first": ({"tp": 2}, 2, {**SP, "first": "ep"}),
    "tp 4, ep 2 in it": ({"tp": 4}, 2, {}),
    "cp 2, ep 2, documents": ({"cp": 2}, 2, {"documents": True}),
    "cp 2, tp 2, balanced by their plans": ({"cp": 2, "tp": 2}, 2, {"balanced": False}),
    "dp 2, tp 2, ep 2 over dp": ({"shards": 2, "tp": 2}, 2, {**SP, "over": ("dp_shard",)}),
    "dp 2, cp 2, tp 2, ep 4": ({"shards": 2, "cp": 2, "tp": 2}, 4, SP),
}


def check(found, expected):
    """The same training, to rounding; the same initial weights."""
    for kind in ("losses", "norms"):
        lab.assert_close(found[kind], expected[kind], kind, rtol=1e-6)
    lab.assert_equal(found["initial"], expected["initial"])
    for kind in ("gradients", "final"):
        lab.assert_close(found[kind], expected[kind], kind, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_model_with_experts_learns_as_on_one_rank(name):
    axes, ep, how = CASES[name]
    check(trained("experts", axes, ep=ep, **how), alone("experts", how.get("documents", False)))


@pytest.mark.parametrize(
    ("ep", "over"),
    [(4, ("dp_shard", "cp", "tp")), (2, ("dp_shard",))],
    ids=str,
)
def test_gradients_are_the_mean_over_the_ranks_that_have_losses_of_their_own(ep, over):
    """Those of tp have one together, whether experts lie along it, are sharded over it or summed."""
    axes = {"shards": 2, "tp": 2}
    check(trained("experts", axes, ep=ep, over=over, mean=True, **SP), alone("experts"))


def test_where_targets_do_not_count_the_balance_is_still_that_of_one_rank():
    """Ranks have different numbers of those that count, and equally many tokens."""
    found = trained("experts", {"shards": 2, "cp": 2}, ep=2, ignoring=True)
    check(found, alone("experts", ignoring=True))


@pytest.mark.parametrize(
    "changes",
    [{"qk_norm": "head"}, {"pooled_balance": True}, {"expert_bias": True}, {"capacity_factor": 4.0}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_models_differ_in_works_wherever_tokens_lie(changes):
    """A capacity of 4 drops nothing here: each expert may have all tokens of a rank."""
    expected = alone("experts", **changes)
    axes = {"tp": 4} if "qk_norm" in changes else {"cp": 2, "tp": 2}  # two ranks for each head of keys
    found = trained("experts", axes, ep=4, changes=changes, **SP)
    check(found, expected)
    for name, values in expected["final"].items():
        if name.endswith("expert_bias"):
            assert np.abs(values).max() > 0.01
            np.testing.assert_array_equal(found["final"][name], values)


def layer_on(size, ep, tokens, **how):
    """(output, gradients by name) of one layer of experts on `size` ranks of tp, along which ep lies."""
    shardrt.manual_seed(2)
    layer = nn.MoE(
        nn.TopKRouter(WIDTH, COUNT, K, **how), nn.Experts(COUNT, WIDTH, 5), nn.Linear(WIDTH, WIDTH)
    )
    mesh = init_device_mesh("cpu", (size,), ("tp",))
    whole = nn.ModuleList([layer])
    parallelize_module(whole, mesh, {"0": TokenParallel()})
    parallelize_module(whole, mesh.fold("ep", ep)["ep"], {"0.experts": ExpertParallel()})
    x = Tensor(tokens, requires_grad=True)
    y, loss = layer(x)
    ((y * tokens[::-1]).sum() + loss).backward()
    found = {name: joined(p.placement, p.grad) for name, p in layer.named_parameters()}
    return y.numpy(), loss.item(), x.grad, found


@pytest.mark.parametrize("skewed", [False, True])
def test_a_layer_whose_ranks_have_the_same_tokens_has_the_bits_of_one_rank(skewed):
    """Each routes its part, and an expert gets the rows in the order of one rank."""
    tokens = np.random.default_rng(0).normal(size=(2, 8, WIDTH)).astype(np.float32)
    tokens[..., 0] += 3 * skewed
    y, loss, dx, expected = run_ranks(1, layer_on, 1, 1, tokens)[0]
    for size in (2, 4):
        for mine, own_loss, own_dx, _ in (ranks := run_ranks(size, layer_on, size, size, tokens)):
            np.testing.assert_array_equal(mine, y)
            assert own_loss == pytest.approx(loss, rel=1e-6)
            np.testing.assert_allclose(own_dx, dx, atol=1e-6)
            np.testing.assert_array_equal(own_dx, ranks[0][2])
        found = ranks[0][3]
        for name in ("experts.up", "experts.down"):
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
        for name in ("router.weight", "shared.weight", "shared.bias"):  # sums over all tokens
            np.testing.assert_allclose(found[name], expected[name], atol=1e-5, err_msg=name)


def test_experts_on_a_part_of_the_ranks_with_tokens_get_the_gradient_of_all():
    """Four ranks along tp, experts over two of them: without fully_shard, backward adds up at its end."""
    tokens = np.random.default_rng(0).normal(size=(2, 8, WIDTH)).astype(np.float32)
    expected = run_ranks(1, layer_on, 1, 1, tokens)[0][3]
    found = run_ranks(4, layer_on, 4, 2, tokens)[0][3]
    lab.assert_close(found, expected, rtol=1e-7, atol=1e-5)


TOKENS = np.random.default_rng(5).integers(0, VOCAB, (1, 5))


def test_evaluation_takes_any_number_of_tokens_and_training_says_what_it_can_not_cut():
    def called(tp, ep):
        model = build("experts", mesh_of(tp=tp), ep=ep)
        with no_grad():
            logits = model(TOKENS).numpy()
        if tp > 1:
            with enable_grad(), pytest.raises(ValueError, match="5 tokens can't be split into 2 equal parts"):
                model(TOKENS)
        return logits

    expected = run_ranks(1, called, 1, 1)[0]
    for found in run_ranks(2, called, 2, 2):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_each_rank_draws_noise_of_its_own_for_its_tokens():
    """FairScale's gate: its noise and its capacity are of the tokens of one rank, its loss is of all."""

    def blocks():
        layer = nn.ModuleList([nn.MoE(nn.Top2Gate(WIDTH, COUNT), nn.Experts(COUNT, WIDTH, 5))])
        parallelize_module(layer, init_device_mesh("cpu", (2,), ("tp",)), {"0": TokenParallel()})
        y, loss = layer[0](Tensor(np.ones((2, 8, WIDTH), np.float32)))
        return layer[0].router.batch_block, loss.item()

    (first, loss), (second, other) = run_ranks(2, blocks)
    assert (first.indices, second.indices) == ((0,), (1,)) and loss == other


MESHES = {  # axes and ep -> ranks
    "1": ({}, 1, 1),
    "cp 2, tp 2, ep 2": ({"cp": 2, "tp": 2}, 2, 4),
    "dp 2, tp 2, ep 4": ({"shards": 2, "tp": 2}, 4, 4),
}
RANKS = {name: ranks for name, (*_, ranks) in MESHES.items()}


def on(name):
    """(model, what runs a backward of this rank's part of some tokens, mesh)."""
    axes, ep, _ = MESHES[name]
    mesh = mesh_of(**axes)
    model = build("experts", mesh, ep=ep, sequence=True, mean=True)
    part = shard_sequence(*np.random.default_rng(0).integers(0, VOCAB, (2, 2, TIME)), mesh=mesh["cp"])
    return model, lambda: model(part.tokens, part.targets, positions=part.positions).backward(), mesh


def life(name, folder, saves):
    model, backward, mesh = on(name)
    for parameter in model.parameters() if not saves else ():
        with parameter.writing() as shard:
            shard.fill(7)
    return lab.saved_or_restored(model, mesh, folder, backward if saves else None)


def test_a_checkpoint_of_any_mesh_is_restored_on_any_other_to_the_bit(tmp_path):
    lab.assert_restored_anywhere(tmp_path, RANKS, life)


def given_norms(name):
    model, backward, _ = on(name)
    backward()
    lab.give_gradients(model)
    return [grad_norm(model.parameters(), kind) for kind in (1, 2, 3, np.inf)]


def test_norms_count_each_element_once_on_every_mesh():
    expected = run_ranks(1, given_norms, "1")
    for name, ranks in RANKS.items():
        assert run_ranks(ranks, given_norms, name) == expected * ranks


TOKEN_PLAN = {"blocks.*.moe": TokenParallel()}
EXPERTS = {"blocks.*.moe.experts": ExpertParallel()}


def planned(*plans, model=Blocks):
    whole = model()
    for plan in plans:
        parallelize_module(whole, init_device_mesh("cpu", (2,), ("tp",)), plan)
    return whole


def with_a_shared_layer():
    router, shared = nn.TopKRouter(WIDTH, COUNT, K), nn.Linear(WIDTH, WIDTH)
    return nn.ModuleList([nn.MoE(router, nn.Experts(COUNT, WIDTH, 5), shared)])


def forgotten_experts():
    plan = plan_of(make("experts"), sequence_parallel=True)
    del plan["blocks.*.mlp"]
    parallelize_module(make("experts"), mesh_of(tp=2)["tp"], plan)


def in_a_tree():
    mesh, model = mesh_of(tp=2), make("experts")
    parallelize_module(model, mesh["tp"], plan_of(model))
    fully_shard(model, mesh=mesh["dp_shard"])
    set_world_invariant(model, 1)
    model(TOKENS)


test_what_can_not_be_is_said_in_one_line = lab.refusals(
    (lambda: planned({"head": ColwiseParallel()}, EXPERTS), "have the same tokens; give the nn.MoE"),
    (lambda: planned(EXPERTS), "have the same tokens; give the nn.MoE"),
    (
        lambda: planned(TOKEN_PLAN | {"blocks.0.moe.experts": TokenParallel()}),
        TypeError,
        "TokenParallel is for MoE",
    ),
    (lambda: planned(TOKEN_PLAN, TOKEN_PLAN), "is on .* already; give one plan"),
    (lambda: planned(TOKEN_PLAN, EXPERTS, EXPERTS), "experts are split along .* already"),
    (lambda: expert_plan(nn.Linear(2, 2)), TypeError, "a Linear has no nn.Experts"),
    (
        lambda: planned({"0": TokenParallel(), "0.shared": ColwiseParallel()}, model=with_a_shared_layer),
        "'0.shared' can't have ColwiseParallel: it is in '0', of whose",
    ),
    (forgotten_experts, "'blocks.0.mlp' would route only a part of each sequence"),
    (in_a_tree, "leave TokenParallel out"),
    ranks=2,
)


def test_explain_names_the_axes_of_experts():
    lines = run_ranks(
        4, lambda: explain(build("experts", mesh_of(shards=2, tp=2), ep=2, sequence=True)).splitlines()
    )[0]
    (experts,) = [line for line in lines if line.startswith("blocks.0.mlp.experts")]
    assert "FULL_SHARD on efsdp (0 2), cut on ep (0 1)" in experts
    within = [line for line in run_ranks(4, over_data)[0] if line.startswith("blocks.0.mlp.experts")]
    assert "cut on ep (0 2), summed on tp" in within[0]


def over_data():
    return explain(build("experts", mesh_of(shards=2, tp=2), ep=2, over=("dp_shard",))).splitlines()
