"""nn/moe.py: the layer beside PyTorch, its promises of equal bits and memory, its load, its errors."""

import copy
from functools import partial

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, device, nn, optim
from shardrt import functional as F
from shardrt.activation_offload import offload_activations
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard, memory_plan, set_world_invariant
from shardrt.recompute import checkpoint
from tests import lab
from tests.gradcheck import check_direction, leaf, normal

WIDTH, HIDDEN, COUNT, K = 6, 5, 4, 2
ROUTERS = {
    "mixtral": partial(nn.TopKRouter, per_token=K),
    "olmoe": partial(nn.TopKRouter, per_token=K, renormalise=False, z_loss=1e-3),
    "deepseek": partial(
        nn.TopKRouter, per_token=3, score="sigmoid", expert_bias=True, scale=2.5, balance_loss=0.0
    ),
    "capacity": partial(nn.TopKRouter, per_token=K, capacity_factor=0.75),
    "pooled": partial(nn.TopKRouter, per_token=K, score="softmax_of_chosen", pooled=True),
    "all of them": partial(nn.TopKRouter, per_token=COUNT),
    "top2gate": nn.Top2Gate,
}


class Shared(nn.Module):
    """What every token goes through besides."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x):
        return F.silu(self.layer(x))


def moe(router="mixtral", activation="swiglu", shared=False, dtype=np.float32, seed=1):
    shardrt.manual_seed(seed)
    layer = nn.MoE(
        ROUTERS[router](WIDTH, COUNT, dtype=dtype),
        nn.Experts(COUNT, WIDTH, HIDDEN, activation=activation, dtype=dtype),
        Shared(dtype) if shared else None,
    )
    return layer


class Stack(nn.Module):
    """Two blocks that pass the balance loss on."""

    def __init__(self, router="mixtral", **how):
        super().__init__()
        self.blocks = nn.ModuleList(moe(router, **how) for _ in range(2))

    def forward(self, x):
        total = None
        for block in self.blocks:
            y, loss = block(x)
            x, total = x + y, loss if total is None else total + loss
        return x, total


def batch(number=0, tokens=12, dtype=np.float32):
    return Tensor(normal(2, tokens // 2, WIDTH, seed=number).astype(dtype))


def loss_of(model, number=0):
    shardrt.manual_seed(3)
    y, balance = model(batch(number))
    return (y * y).sum() + balance.sum()


def gradients(model):
    return {name: p.grad.copy() for name, p in model.named_parameters() if p.grad is not None}


# -- what it computes


@pytest.mark.parametrize(
    ("router", "activation"),
    [(router, "swiglu") for router in ROUTERS]
    + [("mixtral", activation) for activation in ("gelu", "gelu_tanh", "silu", "relu")],
)
def test_gradients(router, activation):
    layer = moe(router, activation, shared=router == "mixtral", dtype=np.float64)
    parameters = list(layer.parameters())

    def run(x, *_):
        shardrt.manual_seed(3)
        return layer(x)

    for parameter in parameters:
        _ = parameter.data
    check_direction(run, leaf(normal(2, 6, WIDTH)), *parameters)


def reference(torch, layer, x):
    """Mixtral's block, an expert at a time; (output, loss), and the leaves by name."""
    leaves = {name: torch.tensor(p.data, requires_grad=True) for name, p in layer.named_parameters()}
    scores = torch.softmax(x @ leaves["router.weight"].T, -1)
    weights, chosen = scores.topk(K, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for expert in range(COUNT):
        token, place = torch.where(chosen == expert)
        gate, up = (x[token] @ leaves["experts.up"][expert].T).chunk(2, -1)
        hidden = (torch.nn.functional.silu(gate) * up) @ leaves["experts.down"][expert].T
        y = y.index_add(0, token, hidden * weights[token, place, None])
    counts = torch.bincount(chosen.reshape(-1), minlength=COUNT)
    return y, COUNT / (K * len(x) ** 2) * (counts * scores.sum(0)).sum(), leaves


def even(layer):
    """Tokens as they come."""


def skewed(layer):
    """All tokens to experts 1 and 3, none to the others."""
    layer.router.weight.data[:] = 0
    layer.router.weight.data[1::2] = 3
    layer.router.weight.data[3] += 1


@pytest.mark.torch
@pytest.mark.parametrize("prepare", [even, skewed])
@pytest.mark.parametrize("tokens", [1, 40])
def test_values_and_gradients_are_those_of_pytorch(prepare, tokens):
    torch = pytest.importorskip("torch")
    layer = moe()
    prepare(layer)
    values = np.abs(normal(tokens, WIDTH)).astype(np.float32)
    x, theirs = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    y, loss = layer(x)
    expected, balance, leaves = reference(torch, layer, theirs)
    ((y * y).sum() + loss).backward()
    ((expected * expected).sum() + balance).backward()
    np.testing.assert_allclose(y.data, expected.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss.item(), balance.item(), rtol=1e-5)
    np.testing.assert_allclose(x.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(layer).items():
        np.testing.assert_allclose(gradient, leaves[name].grad, rtol=1e-5, atol=1e-5, err_msg=name)
    if prepare is skewed:
        assert nn.expert_load(layer)["router"].tolist() == [0, tokens, 0, tokens]


def test_what_is_dropped_keeps_the_shared_expert_and_no_more():
    layer = moe("capacity", shared=True)
    skewed(layer)
    x = Tensor(np.ones((16, WIDTH), np.float32))  # capacity 6
    y, plain = layer(x)[0].data, layer.shared(x).data
    assert (y[:6] != plain[:6]).all() and (y[6:] == plain[6:]).all()
    assert nn.expert_load(layer)["router"].tolist() == [0, 16, 0, 16]


def test_no_loss_is_a_zero_that_can_be_passed_on():
    layer = moe("deepseek")
    loss = layer(batch())[1]
    assert loss.shape == () and loss.item() == 0 and not loss.requires_grad


# -- the same bits


@pytest.mark.parametrize("router", ["mixtral", "deepseek", "capacity", "top2gate"])
@pytest.mark.parametrize("saving", [checkpoint, partial(checkpoint, policy="matmul"), offload_activations])
def test_recomputed_and_offloaded_it_is_the_same_bits_and_counts_once(router, saving):
    plain, again = Stack(router), Stack(router)
    for block in again.blocks:
        saving(block)
    for model in (plain, again):
        loss_of(model).backward()
    lab.assert_equal(gradients(again), gradients(plain))
    assert all(load.sum() for load in nn.expert_load(plain).values())
    lab.assert_equal(nn.expert_load(again), nn.expert_load(plain))


def trained_in_micro_batches(router):
    """Weights and biases after two steps of four micro-batches, shared among the ranks."""
    shardrt.manual_seed(5)
    model, mesh = Stack(router), init_device_mesh("auto")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    set_world_invariant(model, 4)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        shardrt.manual_seed(1, step)
        for number in range(mesh.rank, 4, mesh.size):
            y, balance = model(batch(10 * step + number))
            ((y * y).mean() + balance.sum()).backward()
        optimizer.step()
        nn.update_expert_bias(model, rate=0.01)
        optimizer.zero_grad()
    return full_state_dict(model)


@pytest.mark.parametrize("router", ["deepseek", "capacity", "top2gate"])
def test_a_run_has_the_same_bits_on_one_rank_and_on_two(router):
    one, two = (thread.run(ranks, trained_in_micro_batches, router)[0] for ranks in (1, 2))
    lab.assert_equal(one, two)


def test_mixed_precision_leaves_the_router_in_float32():
    model = Stack("deepseek")
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy("bfloat16"))
    loss = loss_of(model)
    loss.backward()
    assert np.isfinite(loss.item())
    whole = [group for group in lab.groups_of(model) if group.key.param == "float32"]
    names = {parameter.name for group in whole for parameter in group.parameters}
    assert names == {"blocks.0.router.weight", "blocks.1.router.weight"}


def routers(model):
    return [module for module in model.modules() if isinstance(module, nn.Router)]


# -- load and bias


def test_the_load_is_that_of_training_since_the_last_update():
    layer = moe("deepseek")
    layer(batch())
    first = nn.expert_load(layer)["router"]
    layer(batch(1))
    assert first.sum() == 36 and nn.expert_load(layer)["router"].sum() == 72
    layer.eval()(batch())
    assert nn.expert_load(layer)["router"].sum() == 72
    nn.update_expert_bias(layer)
    assert nn.expert_load(layer)["router"].sum() == 0


def test_the_bias_moves_against_the_load_and_not_where_it_is_the_mean():
    layer = moe("deepseek")
    layer.router.load[:] = [10, 2, 4, 0]
    nn.update_expert_bias(layer, rate=0.5)
    assert layer.router.expert_bias.tolist() == [-0.5, 0.5, 0, 0.5]


def test_the_bias_balances():
    layer = moe("deepseek")
    layer.router.weight.data[:2] += 0.3
    x = Tensor(np.abs(normal(200, WIDTH)).astype(np.float32))
    spreads = []
    for _ in range(60):
        layer(x)
        spreads.append(np.ptp(nn.expert_load(layer)["router"]))
        nn.update_expert_bias(layer, rate=0.01)
    assert np.mean(spreads[-10:]) < 0.3 * spreads[0]


def test_a_model_without_routers_is_left_alone():
    model = nn.Linear(2, 2)
    nn.update_expert_bias(model)
    assert nn.expert_load(model) == {}


def test_the_bias_is_state_and_the_load_is_not():
    layer = moe("deepseek")
    assert set(layer.state_dict()) == {"router.weight", "router.expert_bias", "experts.up", "experts.down"}
    twin = copy.deepcopy(layer)
    twin.router.load += 1
    assert layer.router.load.sum() == 0


# -- memory


def planned_and_taken(router, prepare):
    """Bytes of activations, in the plan and in a step."""
    shardrt.manual_seed(1)
    model = nn.MoE(ROUTERS[router](64, COUNT), nn.Experts(COUNT, 64, 128))
    prepare(model)
    fully_shard(model)
    x, here = Tensor(np.abs(normal(1024, 64)).astype(np.float32)), device.current()

    def step():
        y, balance = model(x)
        ((y * y).sum() + balance).backward()

    planned = memory_plan(model, step=step).device["activations"]
    assert nn.expert_load(model)["router"].sum() == 0, "a dry run has counted"
    step()
    model.zero_grad()
    here.reset_peak()
    before = here.peak_bytes()
    step()
    return planned, here.peak_bytes() - before


@pytest.mark.parametrize("router", ["mixtral", "capacity", "top2gate"])
def test_the_plan_is_what_a_step_takes_however_skewed_it_is(router):
    """Rows are the tokens times k, or what the capacity allows: what is planned does not depend on values."""
    for prepare in (even, skewed):
        planned, taken = planned_and_taken(router, prepare)
        assert planned == taken > 1024 * 64 * 4


# -- errors


test_what_does_not_fit_is_an_error = lab.refusals(
    (lambda: nn.TopKRouter(6, 4, 5), "TopKRouter: per_token must be at most 4, got 5"),
    (lambda: nn.TopKRouter(6, 4, 0), "TopKRouter: per_token must be at least 1, got 0"),
    (lambda: nn.TopKRouter(6, 0, 1), "TopKRouter: n_experts must be at least 1, got 0"),
    (lambda: nn.TopKRouter(6, 4, 1, score="max"), "TopKRouter: score must .* got 'max'"),
    (lambda: nn.TopKRouter(6, 4, 1, capacity_factor=0), "_factor must be positive, got 0"),
    (lambda: nn.Top2Gate(6, 1), "Top2Gate: n_experts must be at least 2, got 1"),
    (lambda: nn.Experts(4, 6, 5, activation="tanh"), "Experts: activation must .* got 'tanh'"),
    (lambda: nn.Experts(4, 6, 0), "Experts: hidden must be at least 1, got 0"),
    (lambda: nn.MoE(nn.TopKRouter(6, 3, 1), nn.Experts(4, 6, 5)), "one number of experts, got 3 and 4"),
    (lambda: moe()(Tensor(normal(3, 7))), r"linear: x must be \(\.\.\., 6\) for weight \(4, 6\)"),
    (lambda: moe()(Tensor(normal(3, 6))), TypeError, "all float64, got x float64, weight float32"),
)
