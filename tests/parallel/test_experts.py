"""Experts on several ranks: the bits of one rank with all their tokens, FSDP over what is left, errors."""

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, nn
from shardrt.comm import init_device_mesh
from shardrt.fsdp import full_gradients, fully_shard, register_forward_method, set_world_invariant
from shardrt.nn.share import joined
from shardrt.parallel import ColwiseParallel, ExpertParallel, most_rows, parallelize_module
from tests.parallel.routed import COUNT, TOKENS, WIDTH, K, make, spread, tokens_of, trained
from tests.ranks import run_ranks

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
    found = {name: joined(p, p.grad) for name, p in layer.named_parameters()} | {"x": x.grad}
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
    def alone(rank):
        layer = layer_of("skewed", capacity_factor=0.75)
        x = tokens_of(4, rank)
        x[:, 0] = 1
        return layer(Tensor(x))[0].numpy()

    expected = np.concatenate([alone(rank) for rank in range(4)])
    for size in (2, 4):
        own = np.concatenate(
            [each[0] for each in run_ranks(size, passed, size, size, "skewed", capacity_factor=0.75)]
        )
        np.testing.assert_allclose(own, expected[: len(own)], atol=1e-6)


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


def test_what_can_not_be_is_said_in_one_line():
    def refused():
        mesh = init_device_mesh("cpu", (1, 2), ("efsdp", "ep"))
        named = init_device_mesh("cpu", (2,), ("tp",))
        plan = {"blocks.*.moe.experts": ExpertParallel()}
        both = plan | {"head": ColwiseParallel()}
        odd = nn.ModuleList([nn.Experts(3, WIDTH, 5)])
        twice = parallelize_module(make(), mesh["ep"], plan)
        for wrong, message in (
            (lambda: parallelize_module(make(), mesh["ep"], both), "without ColwiseParallel"),
            (lambda: parallelize_module(make(), named, plan), "have the same tokens"),
            (
                lambda: parallelize_module(odd, mesh["ep"], {"0": ExpertParallel()}),
                "2 ranks do not divide the 3",
            ),
            (lambda: parallelize_module(twice, mesh["ep"], plan), "experts are cut along .* already"),
            (lambda: parallelize_module(twice, mesh["ep"], {"head": ColwiseParallel()}), "not built yet"),
            (lambda: fully_shard(twice, mesh=mesh.flat()), "'blocks.0.moe.experts.up' is on .* already"),
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

    def invariant():
        model, data = spread(1, 2, over=False)
        with pytest.raises(ValueError, match="leave ExpertParallel out"):
            set_world_invariant(model, 4)
            model(Tensor(tokens_of(1)))

    run_ranks(4, wrong_rest)
    run_ranks(2, invariant)
