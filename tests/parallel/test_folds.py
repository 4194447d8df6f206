"""Experts beside tensor, sequence and context parallelism: tokens that lie along several axes."""

import numpy as np
import pytest

import shardrt
from models.plans import plan_of
from shardrt import Tensor, nn, no_grad, optim
from shardrt.activation_offload import offload_activations
from shardrt.autograd import enable_grad
from shardrt.checkpoint import CheckpointManager, full_state_dict, get_optimizer_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import explain, fully_shard, set_world_invariant
from shardrt.nn.runs import take
from shardrt.nn.share import joined
from shardrt.nn.utils import grad_norm
from shardrt.parallel import (
    ColwiseParallel,
    ExpertParallel,
    TokenParallel,
    expert_plan,
    parallelize_module,
    shard_sequence,
)
from shardrt.recompute import checkpoint
from tests.parallel.folded import alone, build, make, train, trained
from tests.parallel.routed import COUNT, WIDTH, K
from tests.parallel.routed import Model as Blocks
from tests.parallel.sequences import TIME, VOCAB, mesh_of
from tests.ranks import run_ranks

SP = {"sequence": True}
CASES = {  # name: axes, ep, how
    "tp 2, whole experts": ({"tp": 2}, 1, SP),
    "tp 2, ep 2": ({"tp": 2}, 2, {}),
    "tp 2, sp, ep 2, experts first": ({"tp": 2}, 2, {**SP, "experts_first": True}),
    "tp 4, ep 2 in it": ({"tp": 4}, 2, {}),
    "cp 2, whole experts": ({"cp": 2}, 1, {}),
    "cp 2, ep 2, documents": ({"cp": 2}, 2, {"documents": True}),
    "cp 2, tp 2, balanced by their plans": ({"cp": 2, "tp": 2}, 2, {"balanced": False}),
    "dp 2, tp 2, ep 2 over dp": ({"shards": 2, "tp": 2}, 2, {**SP, "over": ("dp_shard",)}),
    "cp 2, tp 2, ep 4": ({"cp": 2, "tp": 2}, 4, SP),
    "dp 2, cp 2, tp 2, ep 4": ({"shards": 2, "cp": 2, "tp": 2}, 4, SP),
}


def check(found, expected):
    """The same training, to rounding; the same initial weights."""
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-6)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-6)
    for name, values in expected["initial"].items():
        np.testing.assert_array_equal(found["initial"][name], values, err_msg=name)
    for kind in ("gradients", "final"):
        for name, values in expected[kind].items():
            np.testing.assert_allclose(found[kind][name], values, atol=1e-6, err_msg=f"{kind} {name}")


@pytest.mark.parametrize("name", CASES)
def test_a_model_with_experts_learns_as_on_one_rank(name):
    axes, ep, how = CASES[name]
    check(trained(axes, ep, **how), alone(how.get("documents", False)))


@pytest.mark.parametrize(
    ("ep", "over"),
    [(4, ("dp_shard", "cp", "tp")), (1, ("dp_shard", "cp", "tp")), (2, ("dp_shard",))],
    ids=str,
)
def test_gradients_are_the_mean_over_the_ranks_that_have_losses_of_their_own(ep, over):
    """Those of tp have one together, whether experts lie along it, are sharded over it or summed."""
    axes = {"shards": 2, "tp": 2}
    check(trained(axes, ep, over=over, mean=True, **SP), alone())


def test_where_targets_do_not_count_the_balance_is_still_that_of_one_rank():
    """Ranks have different numbers of those that count, and equally many tokens."""
    check(trained({"shards": 2, "cp": 2, "tp": 1}, 2, ignoring=True), alone(ignoring=True))


@pytest.mark.parametrize(
    "changes",
    [{"qk_norm": "head"}, {"pooled_balance": True}, {"expert_bias": True}, {"capacity_factor": 4.0}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_models_differ_in_works_wherever_tokens_lie(changes):
    """A capacity of 4 drops nothing here: each expert may have all tokens of a rank."""
    expected = alone(**changes)
    axes = {"tp": 4} if "qk_norm" in changes else {"cp": 2, "tp": 2}  # two ranks for each head of keys
    found = run_ranks(4, lambda: train(axes, 4, model=make(**changes), **SP))[0]
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
    found = {name: joined(p.share, p.grad) for name, p in layer.named_parameters()}
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
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5, err_msg=name)


TOKENS = np.random.default_rng(5).integers(0, VOCAB, (1, 5))


def test_evaluation_takes_any_number_of_tokens_and_training_says_what_it_can_not_cut():
    def called(tp, ep):
        model = build(mesh_of(tp=tp), ep)
        with no_grad():
            logits = model(TOKENS).numpy()
        if tp > 1:
            with enable_grad(), pytest.raises(ValueError, match="5 tokens can't be cut into 2 equal parts"):
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


def test_experts_that_a_plan_with_the_sequence_cut_forgets_are_refused():
    def forgotten():
        model, mesh = make(), mesh_of(tp=2)
        plan = plan_of(model, sequence_parallel=True)
        with pytest.raises(ValueError, match="'blocks.0.mlp' would route a part of the time"):
            parallelize_module(model, mesh["tp"], {k: v for k, v in plan.items() if k != "blocks.*.mlp"})

    run_ranks(2, forgotten)


MOVES = {
    "recompute": {"before": checkpoint},
    "offload activations": {"before": offload_activations},
    "nothing kept": {"reshard_after_forward": True, "prefetch": 0},
}


@pytest.mark.parametrize("name", MOVES)
def test_what_only_moves_things_changes_no_bit(name):
    expected = trained({"cp": 2, "tp": 2}, 2, steps=1)
    found = trained({"cp": 2, "tp": 2}, 2, steps=1, **MOVES[name])
    assert found["losses"].tolist() == expected["losses"].tolist() and found["norms"] == expected["norms"]
    for name, values in expected["final"].items():
        np.testing.assert_array_equal(found["final"][name], values, err_msg=name)


MESHES = [({}, 1), ({"tp": 2}, 1), ({"cp": 2, "tp": 2}, 2), ({"shards": 2, "tp": 2}, 4)]


def part_of(tokens, model, mesh):
    """The loss of this rank's part of the tokens."""
    part = shard_sequence(tokens, tokens, mesh=mesh["cp"])
    return model(part.tokens, part.targets, positions=part.positions)


def life(axes, ep, folder, begin):
    """Make a step with AdamW and save; or restore that. The whole state."""
    shardrt.manual_seed(3 if begin else 9)
    mesh = mesh_of(**axes)
    model = build(mesh, ep, sequence=True)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    manager = CheckpointManager(folder, model, optimizer, mesh)
    if begin:
        tokens = np.random.default_rng(0).integers(0, VOCAB, (2, TIME))
        part_of(tokens, model, mesh).backward()
        optimizer.step()
        manager.save(1)
    else:
        assert manager.restore() == (1, {})
    return full_state_dict(model), get_optimizer_state_dict(model, optimizer)


def test_a_checkpoint_of_any_mesh_is_restored_on_any_other_to_the_bit(tmp_path):
    ranks = [int(np.prod([*axes.values()])) for axes, _ in MESHES]
    for number, mesh in enumerate(MESHES):
        folder = tmp_path / str(number)
        weights, state = run_ranks(ranks[number], life, *mesh, folder, True)[0]
        for size, other in zip(ranks, MESHES, strict=True):
            found, theirs = run_ranks(size, life, *other, folder, False)[0]
            for name, values in weights.items():
                np.testing.assert_array_equal(found[name], values, err_msg=f"{name} {mesh} {other}")
            for name, entry in state["state"].items():
                for key, values in entry.items():
                    np.testing.assert_array_equal(theirs["state"][name][key], values, err_msg=f"{name} {key}")


def given_norms(axes, ep):
    """Norms of gradients that are the same wherever they are."""
    mesh = mesh_of(**axes)
    model = build(mesh, ep, sequence=True)
    part_of(np.zeros((2, TIME), np.int64), model, mesh).backward()
    generator = np.random.default_rng(7)
    for parameter in model.parameters():
        whole = generator.normal(size=parameter.whole_shape).astype(np.float32)
        parameter.grad.reshape(-1)[...] = take(parameter.part, whole)
    return [grad_norm(model.parameters(), kind) for kind in (1, 2, np.inf)]


def test_norms_count_each_element_once_on_every_mesh():
    expected = run_ranks(1, given_norms, *MESHES[0])
    for axes, ep in MESHES[1:]:
        ranks = int(np.prod([*axes.values()]))
        assert run_ranks(ranks, given_norms, axes, ep) == expected * ranks


def test_what_can_not_be_is_said_in_one_line():
    def refused():
        mesh = init_device_mesh("cpu", (2,), ("tp",))
        tokens, experts = {"blocks.*.moe": TokenParallel()}, {"blocks.*.moe.experts": ExpertParallel()}

        def planned(*plans):
            model = Blocks()
            for plan in plans:
                parallelize_module(model, mesh, plan)
            return model

        for wrong, message in (
            (lambda: planned({"head": ColwiseParallel()}, experts), "have the same tokens; give the nn.MoE"),
            (lambda: planned(experts), "have the same tokens; give the nn.MoE"),
            (lambda: planned(tokens | {"blocks.0.moe.experts": TokenParallel()}), "TokenParallel is for MoE"),
            (lambda: planned(tokens, tokens), "is on .* already; give one plan"),
            (lambda: planned(tokens, experts, experts), "experts are cut along .* already"),
            (lambda: expert_plan(nn.Linear(2, 2)), "a Linear has no nn.Experts"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                wrong()
        shared = nn.ModuleList(
            [nn.MoE(nn.TopKRouter(WIDTH, COUNT, K), nn.Experts(COUNT, WIDTH, 5), nn.Linear(WIDTH, WIDTH))]
        )
        with pytest.raises(ValueError, match="'0.shared' can't have ColwiseParallel: it is in '0', of whose"):
            parallelize_module(shared, mesh, {"0": TokenParallel(), "0.shared": ColwiseParallel()})

    run_ranks(2, refused)


def test_the_tree_over_micro_batches_takes_no_parts_of_tokens():
    def invariant():
        mesh = mesh_of(tp=2)
        model = make()
        parallelize_module(model, mesh["tp"], plan_of(model))
        fully_shard(model, mesh=mesh["dp_shard"])
        set_world_invariant(model, 1)
        with pytest.raises(ValueError, match="leave adapters and TokenParallel out"):
            model(TOKENS)

    run_ranks(2, invariant)


def test_explain_names_the_axes_of_experts():
    lines = run_ranks(4, lambda: explain(build(mesh_of(shards=2, tp=2), 2, sequence=True)).splitlines())[0]
    (experts,) = [line for line in lines if line.startswith("blocks.0.mlp.experts")]
    assert "FULL_SHARD on efsdp (0 2), cut on ep (0 1)" in experts
    within = [line for line in run_ranks(4, over_data)[0] if line.startswith("blocks.0.mlp.experts")]
    assert "cut on ep (0 2), summed on tp" in within[0]


def over_data():
    return explain(build(mesh_of(shards=2, tp=2), 2, over=("dp_shard",))).splitlines()
