"""Experts on several ranks: the bits of one rank with all their tokens, FSDP over what is left, errors."""

import json

import numpy as np
import pytest

import shardrt
from models.llama import Llama, LlamaConfig
from shardrt import Tensor, nn, optim
from shardrt.activation_offload import offload_activations
from shardrt.checkpoint import CheckpointManager, full_state_dict, get_optimizer_state_dict
from shardrt.comm import init_device_mesh, talk
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    full_gradients,
    fully_shard,
    register_forward_method,
    set_gradient_divide_factor,
    set_world_invariant,
)
from shardrt.nn.runs import take
from shardrt.nn.share import joined
from shardrt.nn.utils import clip_grad_norm_, grad_norm
from shardrt.parallel import ColwiseParallel, ExpertParallel, Pipeline, most_rows, parallelize_module
from shardrt.recompute import checkpoint
from tests import late
from tests.parallel import piped
from tests.parallel.nets import whole_gradients
from tests.parallel.routed import (
    COUNT,
    PLAN,
    TOKENS,
    WIDTH,
    K,
    Model,
    learn,
    make,
    spread,
    tokens_of,
    trained,
)
from tests.ranks import mpirun, run_ranks

ROUTERS = {
    "even": {"per_token": K},
    "skewed": {"per_token": K},
    "one expert gets all": {"per_token": 1, "renormalise": False},
    "all experts get all": {"per_token": COUNT},
    "sigmoid, biased": {"per_token": 3, "score": "sigmoid", "expert_bias": True, "scale": 2.5},
}


def layer_of(routing, **how):
    shardrt.manual_seed(2)
    router = nn.TopKRouter(WIDTH, COUNT, balance_loss=0.0, **(ROUTERS[routing] | how))
    layer = nn.MoE(router, nn.Experts(COUNT, WIDTH, 5))
    if routing in ("skewed", "one expert gets all"):  # tokens have a first element of 1
        router.weight.data[:, 0] = [0, 9, 3, 0]
    return layer


def passed(size, ranks, routing, **how):
    """(output, gradients by name, most rows) of `ranks` parts of a batch on `size` ranks of ep."""
    layer = layer_of(routing, **how)
    mesh = init_device_mesh("cpu", (size,), ("ep",))
    parallelize_module(layer, mesh, {"experts": ExpertParallel()})
    tokens = tokens_of(ranks)
    tokens[:, 0] = 1
    own = np.split(tokens, size)[mesh.rank]
    x = Tensor(own, requires_grad=True)
    y, _ = layer(x)
    (y * np.split(tokens_of(ranks, number=1), size)[mesh.rank]).sum().backward()
    found = {name: joined(p.share, p.grad) for name, p in layer.named_parameters()} | {"x": x.grad}
    counts = layer.experts.n_experts, layer.experts.up.whole_shape[0]
    return y.numpy(), found, most_rows(layer), counts


@pytest.mark.parametrize("routing", ROUTERS)
def test_it_is_one_rank_with_all_tokens_to_the_bit(routing):
    (y, expected, _, _), *_ = run_ranks(1, passed, 1, 4, routing)
    for size in (2, 4):
        found = run_ranks(size, passed, size, 4, routing)
        assert [here for *_, here in found] == [(COUNT // size, COUNT)] * size
        np.testing.assert_array_equal(np.concatenate([each[0] for each in found]), y)
        np.testing.assert_array_equal(np.concatenate([each[1]["x"] for each in found]), expected["x"])
        for name in ("experts.up", "experts.down"):
            np.testing.assert_array_equal(found[0][1][name], expected[name])
        # A product over tokens, which is the sum of the ranks' products here.
        router = sum(each[1]["router.weight"] for each in found)
        np.testing.assert_allclose(router, expected["router.weight"], rtol=1e-4, atol=1e-5)
        most = [each[2]["experts"] for each in found]
        if routing == "one expert gets all":
            assert most == [size * (1 in experts) for experts in np.split(np.arange(COUNT), size)]
        assert np.mean(most) == pytest.approx(1)


def test_a_capacity_drops_what_each_rank_alone_would_drop():
    """Outputs and gradients; with more than one source, experts get rows of several such ranks."""

    def alone(rank):
        layer = layer_of("skewed", capacity_factor=0.75)
        x = tokens_of(4, rank)
        x[:, 0] = 1
        x = Tensor(x, requires_grad=True)
        y, _ = layer(x)
        (y * tokens_of(4, rank, number=1)).sum().backward()
        assert (y.numpy() == 0).all(-1).any(), "nothing was dropped"
        return y.numpy(), x.grad, {name: p.grad for name, p in layer.named_parameters()}

    for size in (2, 4):
        ys, slopes, gradients = zip(*map(alone, range(size)), strict=True)
        found = run_ranks(size, passed, size, size, "skewed", capacity_factor=0.75)
        np.testing.assert_allclose(np.concatenate([each[0] for each in found]), np.concatenate(ys), atol=1e-6)
        dx = np.concatenate([each[1]["x"] for each in found])
        np.testing.assert_allclose(dx, np.concatenate(slopes), atol=1e-5)
        for name in ("experts.up", "experts.down"):
            total = sum(each[name] for each in gradients)
            np.testing.assert_allclose(found[0][1][name], total, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_capacity_is_of_the_rows_of_each_source_rank_and_not_of_all_together():
    """Each rank's tokens want another expert: both are over their share, though not of all tokens."""

    def kept(ranks, together):
        layer = layer_of("one expert gets all", capacity_factor=1.0)
        layer.router.weight.data[:, 0] = [-9, 9, 0, 0]
        mesh = init_device_mesh("cpu", (ranks,), ("ep",))
        parallelize_module(layer, mesh, {"experts": ExpertParallel()})
        tokens = tokens_of(2)
        tokens[:, 0] = np.repeat([1, -1], TOKENS)
        own = tokens if together else tokens[mesh.rank * TOKENS : (mesh.rank + 1) * TOKENS]
        y = layer(Tensor(own))[0].numpy()
        return np.any(y, axis=1).reshape(-1, TOKENS).sum(1).tolist()

    assert run_ranks(2, kept, 2, False) == [[3], [3]]  # ceil(10 / 4)
    assert run_ranks(1, kept, 1, True) == [[5, 5]]  # ceil(20 / 4)


MESHES = ((4, 1), (2, 2), (1, 4))


@pytest.fixture(scope="module")
def one_rank():
    return run_ranks(1, trained, 1, 1, ranks=4)[0]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_model_learns_as_on_one_rank_whatever_the_mesh(one_rank, mesh):
    """Gradients, balance loss and all, are the mean over all ranks; norms count each element once."""
    found = run_ranks(4, trained, *mesh)
    losses, norms, gradients, state = one_rank
    np.testing.assert_allclose(np.mean([each[0] for each in found], 0), losses, rtol=1e-6)
    assert all(each[1] == found[0][1] for each in found)
    np.testing.assert_allclose(found[0][1], norms, rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[0][2][name], gradient, atol=1e-7, err_msg=name)
    for name, values in state.items():
        np.testing.assert_allclose(found[0][3][name], values, atol=1e-6, err_msg=name)


def balance_gradients(shards, ep, tokens, over=True):
    """Those of the routers' weights by the balance loss of `tokens`, those of all ranks."""
    model, data = spread(shards, ep, over=over)

    def forward(x):
        balance = 0.0
        for block in model.blocks:
            x, own = block(x)
            balance = own + balance
        return balance

    model.balance = forward
    register_forward_method(model, "balance")
    model.balance(Tensor(np.split(tokens, data.size)[data.rank])).backward()
    return {name: np.array(gradient) for name, gradient in full_gradients(model) if "router" in name}


def test_the_gradient_of_the_balance_loss_is_the_same_on_every_mesh():
    tokens = tokens_of(4)
    tokens[TOKENS:, 0] += 2  # the ranks' tokens differ, and with them what is balanced
    expected = run_ranks(1, balance_gradients, 1, 1, tokens)[0]
    assert all(np.abs(gradient).max() > 1e-3 for gradient in expected.values())
    for mesh in ((2, 1), (1, 2), (2, 2)):
        found = run_ranks(mesh[0] * mesh[1], balance_gradients, *mesh, tokens)[0]
        for name, gradient in expected.items():
            np.testing.assert_allclose(
                found[name], gradient, atol=1e-6 * np.abs(gradient).max(), err_msg=name
            )
    own = run_ranks(2, balance_gradients, 2, 1, tokens, over=False)[0]
    assert any(np.abs(own[name] - gradient).max() > 1e-4 for name, gradient in expected.items())


def gate_gradient(shards, ep, tokens, over=True):
    """(loss, gradient of its weight) of a Top2Gate by its balance loss, of this rank."""
    model = make()
    for block in model.blocks:
        block.moe.router = nn.Top2Gate(WIDTH, COUNT)
    model, data = spread(shards, ep, over=over, model=model)
    model.balance = lambda x: model.blocks[0](x)[1]
    register_forward_method(model, "balance")
    loss = model.balance(Tensor(np.split(tokens, data.size)[data.rank]))
    loss.backward()
    found = {name: np.array(gradient) for name, gradient in full_gradients(model)}
    return loss.item(), found["blocks.0.moe.router.weight"]


def test_so_is_that_of_fairscales_gate():
    """Its shares of first choices are those of all tokens; it has neither noise nor what is dropped in it."""
    tokens = tokens_of(4)[: 8 * COUNT]
    tokens[2 * COUNT :, 0] += 2
    ((loss, expected),) = run_ranks(1, gate_gradient, 1, 1, tokens)
    assert np.abs(expected).max() > 1e-4
    for mesh in ((2, 1), (1, 2), (2, 2)):
        found = run_ranks(mesh[0] * mesh[1], gate_gradient, *mesh, tokens)
        assert np.mean([each[0] for each in found]) == pytest.approx(loss, rel=1e-6)
        np.testing.assert_allclose(found[0][1], expected, atol=1e-6 * np.abs(expected).max())
    own = run_ranks(2, gate_gradient, 2, 1, tokens, over=False)[0][1]
    assert np.abs(own - expected).max() > 1e-2 * np.abs(expected).max()


def test_what_can_not_be_is_said_in_one_line():
    def refused():
        mesh = init_device_mesh("cpu", (1, 2), ("efsdp", "ep"))
        named = init_device_mesh("cpu", (2,), ("tp",))
        plan = {"blocks.*.moe.experts": ExpertParallel()}
        both = plan | {"head": ColwiseParallel()}
        odd = nn.ModuleList([nn.Experts(3, WIDTH, 5)])
        twice = parallelize_module(make(), mesh["ep"], plan)
        tied = make()
        tied.blocks[1].moe.experts.up = tied.blocks[0].moe.experts.up
        first = {"blocks.0.moe.experts": ExpertParallel()}
        for wrong, message in (
            (lambda: parallelize_module(make(), mesh["ep"], both), "without ColwiseParallel"),
            (lambda: parallelize_module(make(), named, plan), "have the same tokens"),
            (
                lambda: parallelize_module(odd, mesh["ep"], {"0": ExpertParallel()}),
                "2 ranks do not divide the 3",
            ),
            (lambda: parallelize_module(twice, mesh["ep"], plan), "experts are cut along .* already"),
            (
                lambda: parallelize_module(twice, mesh["ep"], {"head": ColwiseParallel()}),
                r"have the same tokens: give the nn.MoE around them TokenParallel\(\)",
            ),
            (lambda: fully_shard(twice, mesh=mesh.flat()), "'blocks.0.moe.experts.up' is on .* already"),
            (
                lambda: parallelize_module(tied, mesh["ep"], first),
                "is cut, and tied to 'blocks.1.moe.experts'",
            ),
            (lambda: ExpertParallel(planned=0.5), "planned must be 1 or more, got 0.5"),
            (lambda: nn.balance_over(nn.Linear(2, 2), mesh), "must have routers"),
        ):
            with pytest.raises(ValueError, match=message):
                wrong()

    run_ranks(2, refused)


def test_units_of_experts_and_of_the_rest_must_be_on_the_same_ranks():
    def wrong_rest():
        mesh = init_device_mesh("cpu", (2, 2), ("efsdp", "ep"))
        model = parallelize_module(make(), mesh["ep"], {"blocks.*.moe.experts": ExpertParallel()})
        for block in model.blocks:
            fully_shard(block.moe.experts, mesh=mesh["efsdp"])
        fully_shard(model, mesh=mesh["efsdp"])
        with pytest.raises(ValueError, match="gradients would be summed over other ranks"):
            model(Tensor(tokens_of(1)))

    run_ranks(4, wrong_rest)


M = 8  # micro-batches of a step
ROUTED = {
    "dropless": {},
    "biased": {"expert_bias": True, "z_loss": 0.1},
    "capacity": {"capacity_factor": 0.75},
    "recomputed": {"before": lambda block: checkpoint(block, "matmul")},
    "float32 sums of bfloat16": {"mp_policy": MixedPrecisionPolicy("bfloat16", "float32")},
}
HOW = ("before", "mp_policy")  # of what is spread, not of routers


def by_a_tree(shards, ep, case, tree=True):
    """(losses of micro-batches in their order, norms, weights) of three steps."""
    settings = ROUTED[case]
    model = make(**{name: value for name, value in settings.items() if name not in HOW})
    how = {name: value for name, value in settings.items() if name in HOW}
    model, data = spread(shards, ep, over=False, model=model, **how)
    set_world_invariant(model, M) if tree else set_gradient_divide_factor(model, 1.0)
    optimizer, losses, norms = optim.AdamW(model.parameters(), lr=1e-2), [], []
    for step in range(3):
        x = tokens_of(M, number=step).reshape(M, TOKENS, WIDTH)
        for number in range(data.rank, M, data.size):
            loss = model(Tensor(x[number])) * (1 / M)
            loss.backward()
            losses.append((step, number, loss.item()))
        norms.append(clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        nn.update_expert_bias(model, 0.01)
        optimizer.zero_grad()
    everyone = talk.from_all(data.communicator("control"), losses)
    return sorted(tuple(each) for own in everyone for each in own), norms, full_state_dict(model)


@pytest.mark.parametrize("case", ROUTED)
def test_with_a_tree_over_micro_batches_every_mesh_trains_to_the_same_bits(case):
    """Without experts on several ranks as well: their products and sums are those of each micro-batch."""
    ((losses, norms, weights),) = run_ranks(1, by_a_tree, 1, 1, case)
    for mesh in ((2, 1), (1, 2), (2, 2), (1, 4)) if case == "dropless" else ((2, 2),):
        found = run_ranks(mesh[0] * mesh[1], by_a_tree, *mesh, case)[0]
        assert found[:2] == (losses, norms)
        for name, values in weights.items():
            np.testing.assert_array_equal(found[2][name], values, err_msg=f"{name} {mesh}")
    assert run_ranks(2, by_a_tree, 1, 2, case, tree=False)[0][1] != norms


def test_what_no_tree_can_have_is_said_in_one_line():
    def spread_over_no_neighbours():
        mesh = init_device_mesh("cpu", (2, 2), ("ep", "efsdp"))
        model = parallelize_module(make(), mesh["ep"], PLAN)
        for block in model.blocks:
            fully_shard(block.moe.experts, mesh=mesh["efsdp"])
        return fully_shard(model, mesh=mesh.flat("ep", "efsdp"))

    low = MixedPrecisionPolicy("bfloat16")

    def refused():
        for model, told in (
            (spread_over_no_neighbours(), "are no neighbours among those of the data"),
            (spread(2, 2, over=False, mp_policy=low)[0], "are added before they are rounded to 16 bits"),
            (spread(2, 2)[0], "nn.balance_over makes a balance loss of"),
        ):
            set_world_invariant(model, M)
            with pytest.raises(ValueError, match=told):
                model(Tensor(tokens_of(1)))

    run_ranks(4, refused)


MOVES = {
    "recompute": {"before": checkpoint},
    "recompute but matmul": {"before": lambda block: checkpoint(block, "matmul")},
    "offload activations": {"before": offload_activations},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "step on the host": {"offload_policy": CPUOffloadPolicy(step="host")},
    "nothing kept": {"reshard_after_forward": True, "prefetch": 0},
    "gradients sharded alone": {"strategy": "SHARD_GRAD_OP"},
}


@pytest.fixture(scope="module")
def plain():
    return run_ranks(4, trained, 2, 2)


@pytest.mark.parametrize("name", MOVES)
def test_what_only_moves_things_changes_no_bit(plain, name):
    for found, expected in zip(run_ranks(4, trained, 2, 2, **MOVES[name]), plain, strict=True):
        assert found[:2] == expected[:2]
        for mine, theirs in zip(found[2:], expected[2:], strict=True):
            for key, values in theirs.items():
                np.testing.assert_array_equal(mine[key], values, err_msg=key)


def in_halves(order):
    """Gradients of three micro-batches, by one of the orders of tests/late.py."""
    model, data = spread(2, 2)

    def losses(number):
        return model(Tensor(tokens_of(4, data.rank, number)))

    order(losses, late.reducing_last(model))
    return whole_gradients(model)


@pytest.mark.parametrize("order", [late.each_at_its_end, late.all_inputs_first])
def test_backward_in_halves_gives_the_same_bits(order):
    expected, found = (run_ranks(4, in_halves, each)[0] for each in (late.usual, order))
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_mixed_precision_sends_rows_of_16_bits():
    losses = run_ranks(4, trained, 2, 2, mp_policy=MixedPrecisionPolicy(param_dtype="bfloat16"))[0][0]
    np.testing.assert_allclose(losses, run_ranks(4, trained, 2, 2)[0][0], rtol=2e-2)


@pytest.fixture(scope="module")
def memory():
    """(rank, skewed, capacity, along) -> (bytes of activations in the plan, in a step, the most rows)."""
    ran = mpirun(2, ["-m", "tests.parallel.routed"])
    assert ran.returncode == 0, ran.stderr
    told = map(json.loads, ran.stdout.splitlines())
    return {tuple(line[:4]): line[4:] for line in told}


@pytest.mark.mpi
def test_with_a_capacity_the_plan_is_what_a_step_takes_however_skewed_it_is(memory):
    for rank in range(2):
        for case in ((False, 1.25, "ep"), (True, 1.25, "ep"), (True, 1.25, "tp")):
            planned, taken, _ = memory[rank, *case]
            assert planned == taken > 1024 * 64 * 4


@pytest.mark.mpi
def test_without_one_the_plan_is_for_a_stated_factor_and_the_most_rows_are_told(memory):
    for rank in range(2):
        for along in ("ep", "tp"):
            planned, taken, most = memory[rank, False, None, along]
            assert taken < planned and 0.5 < most < 1.5
    (planned, taken, most), (_, less, least) = memory[0, True, None, "ep"], memory[1, True, None, "ep"]
    assert (most, least) == (2.0, 0.0)
    assert planned == taken > less


def first_life(mesh, folder):
    """Train a step on efsdp x ep ranks and save; the whole state."""
    model, data = spread(*mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    model(Tensor(tokens_of(4).reshape(data.size, -1, WIDTH)[data.rank])).backward()
    optimizer.step()
    CheckpointManager(folder, model, optimizer, data).save(1)
    return full_state_dict(model), get_optimizer_state_dict(model, optimizer)


def second_life(mesh, folder):
    shardrt.manual_seed(9)
    model, data = spread(*mesh, model=Model())
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    assert CheckpointManager(folder, model, optimizer, data).restore() == (1, {})
    return full_state_dict(model), get_optimizer_state_dict(model, optimizer)


def test_a_checkpoint_of_any_mesh_is_restored_on_any_other_to_the_bit(tmp_path):
    meshes = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))
    for number, mesh in enumerate(meshes):
        folder = tmp_path / str(number)
        weights, state = run_ranks(mesh[0] * mesh[1], first_life, mesh, folder)[0]
        for other in meshes:
            found, theirs = run_ranks(other[0] * other[1], second_life, other, folder)[0]
            for name, values in weights.items():
                np.testing.assert_array_equal(found[name], values, err_msg=f"{name} {mesh} {other}")
            for name, entry in state["state"].items():
                for key, values in entry.items():
                    np.testing.assert_array_equal(theirs["state"][name][key], values, err_msg=f"{name} {key}")


def given_norms(shards, ep):
    """Norms of gradients that are the same wherever they are."""
    model, data = spread(shards, ep)
    model(Tensor(tokens_of(data.size, data.rank))).backward()
    generator = np.random.default_rng(7)
    for parameter in model.parameters():
        whole = generator.normal(size=parameter.whole_shape).astype(np.float32)
        parameter.grad.reshape(-1)[...] = take(parameter.part, whole)
    return [grad_norm(model.parameters(), kind) for kind in (1, 2, 3, np.inf)]


def test_norms_of_equal_gradients_have_the_same_bits_on_every_mesh():
    expected = run_ranks(1, given_norms, 1, 1)[0]
    for mesh in MESHES:
        assert run_ranks(4, given_norms, *mesh) == [expected] * 4


def in_stages(stages):
    """{losses, norms, weights after two steps} of a Llama of experts on `stages` x efsdp 1 x ep 2 ranks."""
    mesh = init_device_mesh("cpu", (stages, 2), ("pp", "dp_shard"))
    fold = mesh.fold("ep", 2, over=("dp_shard",))
    shardrt.manual_seed(3)
    model = Llama(
        LlamaConfig(experts=4, experts_per_token=2, n_kv_head=1, n_hidden=12, tied=False, **piped.SMALL)
    )
    parallelize_module(model, fold["ep"], {"blocks.*.mlp.experts": ExpertParallel()})
    pipeline = piped.Whole(model)
    if stages > 1:
        pipeline = Pipeline(model, mesh["pp"], schedule="ZB-H1", micro_batches=piped.MICRO_BATCHES)
    for stage in pipeline.stages:
        for block in stage.blocks:
            fully_shard(block.mlp.experts, mesh=fold["efsdp"])
            fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(stage, mesh=mesh["dp_shard"])
    optimizer, norms = optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(2):
        pipeline.step(piped.loss_of, piped.batches_of(step, mesh["dp_shard"]))
        norms.append(clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return norms, full_state_dict(model)


def test_stages_with_experts_on_several_ranks_have_the_bits_of_one_piece():
    norms, weights = run_ranks(2, in_stages, 1)[0]
    found = run_ranks(4, in_stages, 2)[0]
    assert found[0] == norms
    for name, values in weights.items():
        np.testing.assert_array_equal(found[1][name], values, err_msg=name)


def biases(shards, ep):
    """The routers' biases after three steps, on this rank."""
    model, data = spread(shards, ep, model=make(expert_bias=True))
    for step in range(3):
        model(Tensor(np.split(tokens_of(4, number=step), data.size)[data.rank])).backward()
        nn.update_expert_bias(model, rate=0.01)
        model.zero_grad()
    return [block.moe.router.expert_bias.copy() for block in model.blocks]


def test_biases_move_by_the_choices_of_all_ranks():
    expected = run_ranks(1, biases, 1, 1)[0]
    assert np.abs(expected).max() > 0.005
    for mesh in MESHES:
        for found in run_ranks(4, biases, *mesh):
            np.testing.assert_array_equal(found, expected)


def with_copies(over):
    """Losses, norms and weights where the rest has two copies; experts are along `over`, and what is left."""
    mesh = init_device_mesh("cpu", (2, 2), ("dp_replicate", "dp_shard"))
    fold, model = mesh.fold("ep", 2, over=over), make()
    left = fold["efsdp"] if len(over) > 1 else mesh["dp_replicate"]
    parallelize_module(model, fold["ep"], {"blocks.*.moe.experts": ExpertParallel()})
    nn.balance_over(model, mesh)
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh=left)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return learn(model, mesh, 2)


@pytest.mark.parametrize("over", [("dp_shard",), ("dp_replicate", "dp_shard")])
def test_the_rest_may_have_copies(over):
    found = run_ranks(4, with_copies, over)
    expected = run_ranks(4, trained, 2, 2, steps=2)[0]
    assert all(each[1] == found[0][1] for each in found)
    np.testing.assert_allclose(found[0][1], expected[1], rtol=1e-6)
    for name, values in expected[3].items():
        np.testing.assert_allclose(found[0][3][name], values, atol=1e-6, err_msg=name)
