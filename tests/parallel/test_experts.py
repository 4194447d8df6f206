"""Experts on several ranks: the bits of one rank with all their tokens, FSDP over what is left, errors."""

import json
from functools import partial

import numpy as np
import pytest

import shardrt
from models.llama import Llama, LlamaConfig
from shardrt import Tensor, nn, optim
from shardrt.comm import init_device_mesh, objects
from shardrt.fsdp import (
    MixedPrecisionPolicy,
    full_gradients,
    fully_shard,
    register_forward_method,
    set_gradient_divide_factor,
    set_world_invariant,
)
from shardrt.nn.parameter_placement import joined
from shardrt.parallel import ColwiseParallel, ExpertParallel, Pipeline, most_rows, parallelize_module
from tests import lab
from tests.parallel import piped
from tests.parallel.routed import COUNT, PLAN, TOKENS, WIDTH, K, learn, make, spread, tokens_of, trained
from tests.ranks import run_ranks

ADAMW = partial(optim.AdamW, lr=1e-2)
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
    found = {name: joined(p.placement, p.grad) for name, p in layer.named_parameters()} | {"x": x.grad}
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


def balanced(shards, ep, tokens, gate, over=True):
    """(loss of this rank, gradient of the router's weight) by the balance loss of the first block."""
    model = make()
    if gate:
        model.blocks[0].moe.router = nn.Top2Gate(WIDTH, COUNT)
    model, data = spread(shards, ep, over=over, model=model)
    model.balance = lambda x: model.blocks[0](x)[1]
    register_forward_method(model, "balance")
    loss = model.balance(Tensor(np.split(tokens, data.size)[data.rank]))
    loss.backward()
    found = {name: np.array(gradient) for name, gradient in full_gradients(model)}
    return loss.item(), found["blocks.0.moe.router.weight"]


@pytest.mark.parametrize("gate", [False, True], ids=["top k", "gate of FairScale"])
def test_the_balance_loss_and_its_gradient_are_the_same_on_every_mesh(gate):
    """A gate's shares of first choices are those of all tokens; noise and what is dropped do not matter."""
    tokens = tokens_of(4)[: 8 * COUNT]
    tokens[2 * COUNT :, 0] += 2  # the ranks' tokens differ, and with them what is balanced
    ((loss, expected),) = run_ranks(1, balanced, 1, 1, tokens, gate)
    largest = np.abs(expected).max()
    assert largest > 1e-4
    for mesh in ((2, 1), (1, 2), (2, 2)):
        found = run_ranks(mesh[0] * mesh[1], balanced, *mesh, tokens, gate)
        assert np.mean([own for own, _ in found]) == pytest.approx(loss, rel=1e-6)
        np.testing.assert_allclose(found[0][1], expected, atol=1e-6 * largest)
    _, own = lab.first(2, balanced, 2, 1, tokens, gate, over=False)
    assert np.abs(own - expected).max() > 1e-2 * largest


HEAD = {"head": ColwiseParallel()}


def on_two_ranks(*rows):
    """(call with a mesh efsdp x ep, words)."""
    made = [
        (lambda call=call: call(init_device_mesh("cpu", (1, 2), ("efsdp", "ep"))), words)
        for call, words in rows
    ]
    return lab.refusals(*made, ranks=2)


def cut(mesh, *others, model=None):
    model = model or make()
    for plan in (PLAN, *others):
        parallelize_module(model, mesh["ep"], plan)
    return model


def tied():
    model = make()
    model.blocks[1].moe.experts.up = model.blocks[0].moe.experts.up
    return model


test_what_can_not_be_is_said_in_one_line = on_two_ranks(
    (lambda mesh: parallelize_module(make(), mesh["ep"], PLAN | HEAD), "without ColwiseParallel"),
    (
        lambda mesh: parallelize_module(
            nn.ModuleList([nn.Experts(3, WIDTH, 5)]), mesh["ep"], {"0": ExpertParallel()}
        ),
        "2 ranks must divide the 3",
    ),
    (lambda mesh: cut(mesh, PLAN), "experts are split along .* already"),
    (
        lambda mesh: fully_shard(cut(mesh), mesh=mesh.flat()),
        "'blocks.0.moe.experts.up' is on .* already",
    ),
    (
        lambda mesh: parallelize_module(tied(), mesh["ep"], {"blocks.0.moe.experts": ExpertParallel()}),
        "is split and tied to 'blocks.1.moe.experts'",
    ),
    (lambda _: ExpertParallel(planned=0.5), "planned must be 1 or more, got 0.5"),
    (lambda mesh: nn.balance_over(nn.Linear(2, 2), mesh), "no TopKRouter or Top2Gate found in"),
)


def shards_alone(model, mesh, rest):
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh=mesh["efsdp"])
    return fully_shard(model, mesh=rest)


def other_ranks_of_the_rest():
    mesh = init_device_mesh("cpu", (2, 2), ("efsdp", "ep"))
    shards_alone(cut(mesh), mesh, mesh["efsdp"])(Tensor(tokens_of(1)))


def no_neighbours():
    mesh = init_device_mesh("cpu", (2, 2), ("ep", "efsdp"))
    return shards_alone(cut(mesh), mesh, mesh.flat("ep", "efsdp"))


def in_a_tree(model):
    set_world_invariant(model, M)
    model(Tensor(tokens_of(1)))


LOW = {"mp_policy": MixedPrecisionPolicy("bfloat16")}
test_what_four_ranks_are_refused = lab.refusals(
    (other_ranks_of_the_rest, "gradients would be summed over other ranks"),
    (lambda: in_a_tree(no_neighbours()), "must be adjacent among those of the data"),
    (lambda: in_a_tree(spread(2, 2, over=False, **LOW)[0]), "are added before they are rounded to 16 bits"),
    (lambda: in_a_tree(spread(2, 2)[0]), "nn.balance_over makes a balance loss of"),
    ranks=4,
)


M = 8  # micro-batches of a step
ROUTED = {
    "dropless": {},
    "biased": {"expert_bias": True, "z_loss": 0.1},
    "capacity": {"capacity_factor": 0.75},
    "float32 sums of bfloat16": {"mp_policy": MixedPrecisionPolicy("bfloat16", "float32")},
}


def by_a_tree(shards, ep, case, tree=True):
    """(losses of micro-batches in their order, norms, weights) of three steps."""
    router = dict(ROUTED[case])
    how = {"mp_policy": router.pop("mp_policy", None)}
    model, data = spread(shards, ep, over=False, model=make(**router), **how)
    set_world_invariant(model, M) if tree else set_gradient_divide_factor(model, 1.0)
    losses = []

    def step(number):
        x = tokens_of(M, number=number).reshape(M, TOKENS, WIDTH)
        for turn in range(data.rank, M, data.size):
            loss = model(Tensor(x[turn])) * (1 / M)
            loss.backward()
            losses.append((number, turn, loss.item()))

    moved = lambda: nn.update_expert_bias(model, 0.01)  # noqa: E731
    found = lab.learn(model, step, steps=3, optimizer=ADAMW, clip=0.5, after=moved)
    everyone = objects.all_gather_object(data.communicator("control"), losses)
    return sorted(tuple(each) for own in everyone for each in own), found["norms"], found["final"]


@pytest.mark.parametrize("case", ROUTED)
def test_with_a_tree_over_micro_batches_every_mesh_trains_to_the_same_bits(case):
    """Without experts on several ranks as well: their products and sums are those of each micro-batch."""
    expected = lab.first(1, by_a_tree, 1, 1, case)
    for mesh in ((2, 1), (1, 2), (2, 2), (1, 4)) if case == "dropless" else ((2, 2),):
        lab.assert_equal(lab.first(mesh[0] * mesh[1], by_a_tree, *mesh, case), expected, mesh)
    assert lab.first(2, by_a_tree, 1, 2, case, tree=False)[1] != expected[1]


@pytest.fixture(scope="module")
def memory():
    """(rank, skewed, capacity, along) -> (bytes of activations in the plan, in a step, the most rows)."""
    message = map(json.loads, lab.printed(2, "-m", "tests.parallel.routed"))
    return {tuple(line[:4]): line[4:] for line in message}


@pytest.mark.mpi
def test_with_a_capacity_the_plan_is_what_a_step_takes_however_skewed_it_is(memory):
    for rank in range(2):
        for case in ((False, 1.25, "ep"), (True, 1.25, "ep"), (True, 1.25, "tp")):
            planned, taken, _ = memory[rank, *case]
            assert planned == taken > 1024 * 64 * 4


@pytest.mark.mpi
def test_without_one_the_plan_is_for_a_stated_factor_and_the_most_rows_are_reported(memory):
    for rank in range(2):
        for along in ("ep", "tp"):
            planned, taken, most = memory[rank, False, None, along]
            assert taken < planned and 0.5 < most < 1.5
    (planned, taken, most), (_, less, least) = memory[0, True, None, "ep"], memory[1, True, None, "ep"]
    assert (most, least) == (2.0, 0.0)
    assert planned == taken > less


def in_stages(stages):
    """Two steps of a Llama of experts on `stages` x efsdp 1 x ep 2 ranks."""
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

    def step(number):
        pipeline.step(piped.loss_of, piped.batches_of(number, mesh["dp_shard"]))

    return lab.learn(model, step, optimizer=ADAMW, clip=0.1, whole=None)


def test_stages_with_experts_on_several_ranks_have_the_bits_of_one_piece():
    lab.assert_equal(lab.first(4, in_stages, 2), lab.first(2, in_stages, 1))


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
    lab.assert_close(found[0][3], expected[3], rtol=1e-7, atol=1e-6)
