"""functional/route.py: choices and rows by hand, gradients by differences, values beside PyTorch, errors."""

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, autograd
from shardrt import functional as F
from shardrt.functional.route import gumbel
from tests.gradcheck import LAYOUTS, check_gradients, leaf, normal

TOKENS, COUNT, K, WIDTH = 7, 5, 2, 3
LOGITS = normal(TOKENS, COUNT)


def experts_of(logits=LOGITS, k=K):
    return F.route(Tensor(logits), k)[1]


def order_of(logits=LOGITS, k=K, capacity=None):
    weights, experts, _ = F.route(Tensor(logits), k)
    return F.expert_order(experts, logits.shape[1], capacity=capacity, priority=weights)


# -- who goes where


def test_ties_go_to_the_lowest_expert():
    logits = Tensor(np.array([[1.0, 2, 2, 2], [0, 0, 0, 0], [3, 1, 3, 2]]))
    for k, expected in (
        (1, [[1], [0], [0]]),
        (2, [[1, 2], [0, 1], [0, 2]]),
        (3, [[1, 2, 3], [0, 1, 2], [0, 2, 3]]),
    ):
        for score in ("softmax", "sigmoid", "softmax_of_chosen"):
            assert F.route(logits, k, score=score)[1].tolist() == expected


def test_logits_that_a_softmax_does_not_tell_apart_are_told_apart():
    assert F.route(Tensor(np.array([[500.0, -500, -400]], np.float32)), 2)[1].tolist() == [[0, 2]]


def test_a_bias_moves_the_choice_and_not_the_weights():
    logits = Tensor(np.array([[2.0, 1, 0]]), requires_grad=True)
    weights, experts, _ = F.route(logits, 2, score="sigmoid", renormalise=False, bias=np.array([0, -1.0, 0]))
    assert experts.tolist() == [[0, 2]]
    np.testing.assert_allclose(weights.data, 1 / (1 + np.exp([[-2.0, 0]])))


def test_a_full_expert_keeps_the_highest_and_then_the_first():
    experts = np.array([[0], [0], [1], [0], [0]])
    priority = np.array([[0.5], [0.2], [0.1], [0.5], [0.9]])
    order = F.expert_order(experts, 2, capacity=2, priority=priority)
    assert order.counts.tolist() == [2, 1] and order.chosen.tolist() == [4, 1]
    assert order.copies.tolist() == [0, 4, 2, -1]  # of token 0 and token 3, alike, the first
    assert order.places.tolist() == [[0], [-1], [2], [-1], [1]]
    x, weights = normal(5, WIDTH), np.ones((5, 1))
    there = F.dispatch(x, order)
    np.testing.assert_array_equal(there.data, [x[0], x[4], x[2], [0] * WIDTH])
    back = F.combine(there, weights, order)
    np.testing.assert_array_equal(back.data, [x[0], [0] * WIDTH, x[2], [0] * WIDTH, x[4]])


def test_the_gradient_of_a_token_with_one_row_is_moved_and_not_added_up():
    order = F.expert_order(np.array([[1], [0], [1]]), 2)
    x = Tensor(np.ones((3, 2), np.float32), requires_grad=True)
    autograd.backward([F.dispatch(x, order)], [np.array([[1, -0.0], [2, -0.0], [3, 0]], np.float32)])
    np.testing.assert_array_equal(x.grad, [[2, 0], [1, 0], [3, 0]])
    assert np.signbit(x.grad[:, 1]).tolist() == [True, True, False]  # a sum that begins with 0 has no -0


def test_a_capacity_plans_the_same_rows_whatever_is_chosen():
    skewed = LOGITS + 10 * np.eye(COUNT)[0]
    assert order_of(capacity=2).rows == order_of(skewed, capacity=2).rows == 2 * COUNT
    assert order_of().rows == order_of(skewed).rows == TOKENS * K
    assert order_of(capacity=100).rows == TOKENS * K


@pytest.mark.parametrize("factor, expected", [(1.0, 4), (1.25, 5), (0.1, 1)])
def test_expert_capacity(factor, expected):
    assert F.expert_capacity(10, 3, 8, factor) == expected


# -- gradients


@pytest.mark.parametrize("k", [1, 2, COUNT])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_of_chosen"])
@pytest.mark.parametrize("renormalise", [False, True])
def test_gradients_of_weights_and_probabilities(k, score, renormalise):
    def routed(logits):
        weights, _, probabilities = F.route(logits, k, score=score, renormalise=renormalise, scale=2.5)
        return weights, probabilities

    check_gradients(routed, leaf(LOGITS))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("capacity", [None, 2])
def test_gradients_of_the_way_there_and_back(layout, capacity):
    order = order_of(capacity=capacity)
    check_gradients(lambda x: F.dispatch(x, order), leaf(layout(normal(TOKENS, WIDTH))))
    rows, weights = leaf(layout(normal(order.rows, WIDTH))), leaf(layout(normal(TOKENS, K)))
    check_gradients(lambda x, w: F.combine(x, w, order), rows, weights)
    check_gradients(lambda w: F.combine(rows.data, w, order), weights)
    check_gradients(lambda x: F.combine(x, weights.data, order), rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("counts", [(2, 0, 1, 3), (0, 0, 7, 0), (0, 0, 0, 0), (1, 1, 1, 1)], ids=str)
def test_gradients_of_grouped_products(layout, counts):
    x, weight = leaf(layout(normal(7, 3))), leaf(layout(normal(4, 2, 3)))
    check_gradients(lambda x, w: F.grouped_linear(x, w, counts), x, weight)
    assert (weight.grad[[not count for count in counts]] == 0).all()


def test_a_weight_of_groups_may_be_the_result_of_an_op_and_be_used_twice():
    def twice(x, w):
        return F.grouped_linear(F.grouped_linear(x, w * 2, (2, 5)), w, (4, 3))

    check_gradients(twice, leaf(normal(7, 3)), leaf(normal(2, 3, 3)))


def test_sources_have_products_of_their_own_and_sums_as_neighbours():
    counts = np.array([[3, 0, 2], [0, 4, 1], [1, 1, 1], [0, 0, 5]])
    x, dy, weight = normal(20, 6), normal(20, 4), leaf(normal(3, 4, 6))
    y = F.grouped_linear(whole := leaf(x), weight, counts)
    y.backward(dy)
    each = []
    for own, rows in zip(counts, np.split(np.arange(18), np.cumsum(counts.sum(1))[:-1]), strict=True):
        part, alone = leaf(x[rows]), leaf(weight.data)
        F.grouped_linear(part, alone, own).backward(dy[rows])
        np.testing.assert_array_equal(y.data[rows], F.grouped_linear(x[rows], weight.data, own).data)
        np.testing.assert_array_equal(whole.grad[rows], part.grad)
        each.append(alone.grad)
    assert not y.data[18:].any() and not whole.grad[18:].any()
    np.testing.assert_array_equal(weight.grad, (each[0] + each[1]) + (each[2] + each[3]))
    check_gradients(lambda x, w: F.grouped_linear(x, w, counts), leaf(normal(20, 6)), leaf(normal(3, 4, 6)))
    with pytest.raises(RuntimeError, match="can be used once in a backward"):
        F.grouped_linear(whole, weight, counts).backward(dy)
    with pytest.raises(ValueError, match="sources a power of two"):
        F.grouped_linear(x, weight, counts[:3])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_group_gives_the_bits_of_its_own_layer(dtype):
    x, weight = normal(60, 16).astype(dtype), normal(3, 24, 16).astype(dtype)
    y = F.grouped_linear(x, weight, np.array([20, 1, 39])).data
    for rows, w in zip((slice(0, 20), slice(20, 21), slice(21, 60)), weight, strict=True):
        np.testing.assert_array_equal(y[rows], F.linear(x[rows], w).data)


def test_gradients_of_the_losses():
    counts = np.bincount(experts_of().reshape(-1), minlength=COUNT)
    check_gradients(lambda x: F.balance_loss(F.softmax(x), counts, K), leaf(LOGITS))
    check_gradients(lambda x: F.pooled_balance_loss(F.balance_sums(F.softmax(x), counts), 7), leaf(LOGITS))
    check_gradients(F.router_z_loss, leaf(LOGITS))


def test_the_balance_loss_is_a_layer_of_the_pooled_one_to_the_bit_in_four_ops():
    probabilities = Tensor(normal(TOKENS, COUNT).astype(np.float32) ** 2, requires_grad=True)
    sums = F.balance_sums(probabilities, np.arange(COUNT))
    expected = F.sum(sums[0] * sums[1]) * (COUNT / (K * TOKENS**2))
    expected.backward()
    slope, probabilities.grad = probabilities.grad, None
    found = F.balance_loss(probabilities, np.arange(COUNT), K)
    ops, left = 0, [found.node]
    while left:
        ops, left = ops + len(left), [e.node for n in left for e in n.edges if e is not None and e.node]
    assert ops == 4 and found.item() == expected.item()
    found.backward()
    np.testing.assert_array_equal(probabilities.grad, slope)


def test_the_balance_loss_is_1_in_balance_and_more_elsewhere():
    even = Tensor(np.full((8, 4), 0.25))
    assert F.balance_loss(even, [4, 4, 4, 4], 2).item() == 1
    all_to_two = Tensor(np.tile([0.5, 0.5, 0, 0], (8, 1)))
    assert F.balance_loss(all_to_two, [8, 8, 0, 0], 2).item() == 2


# -- beside others, restated in PyTorch


@pytest.mark.torch
@pytest.mark.parametrize("score, renormalise", [("softmax", True), ("softmax", False), ("sigmoid", True)])
def test_weights_and_losses_are_those_of_pytorch(score, renormalise):
    """transformers' MixtralTopKRouter, Qwen3MoeTopKRouter, OlmoeTopKRouter and DeepseekV3TopkRouter."""
    torch = pytest.importorskip("torch")
    values = normal(50, 8).astype(np.float32)
    x, theirs = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    weights, experts, probabilities = F.route(x, 3, score=score, renormalise=renormalise)
    scores = torch.sigmoid(theirs) if score == "sigmoid" else torch.softmax(theirs, -1)
    chosen = scores.topk(3, -1).indices.sort(-1).values
    expected = scores.gather(1, chosen)
    if renormalise:
        expected = expected / expected.sum(-1, keepdim=True)
    shares = scores / scores.sum(-1, keepdim=True)
    counts = torch.bincount(chosen.reshape(-1), minlength=8)
    balance = 8 / (3 * 50**2) * (counts * shares.sum(0)).sum()  # Megatron's switch_load_balancing_loss_func
    z_loss = torch.logsumexp(theirs, -1).square().mean()
    ((expected**2).sum() + balance + z_loss).backward()
    mine = F.balance_loss(probabilities, np.bincount(experts.reshape(-1), minlength=8), 3)
    total = (weights**2).sum() + mine + F.router_z_loss(x)
    total.backward()
    np.testing.assert_array_equal(experts, chosen)
    np.testing.assert_allclose(weights.data, expected.detach(), rtol=1e-5)
    np.testing.assert_allclose(mine.item(), balance.item(), rtol=1e-5)
    np.testing.assert_allclose(x.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.torch
def test_the_pooled_balance_loss_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = [normal(20, 6, seed=seed).astype(np.float32) for seed in range(3)]
    theirs = [torch.tensor(layer, requires_grad=True) for layer in layers]
    expected = modeling.load_balancing_loss_func(tuple(theirs), 6, 2)
    expected.backward()
    mine, sums = [Tensor(layer, requires_grad=True) for layer in layers], 0
    for layer in mine:
        _, experts, probabilities = F.route(layer, 2)
        sums = F.balance_sums(probabilities, np.bincount(experts.reshape(-1), minlength=6)) + sums
    loss = F.pooled_balance_loss(sums, 60)
    loss.backward()
    np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-5)
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one.grad, other.grad, rtol=1e-5, atol=1e-7)


def top2gating(torch, logits, noise):
    """fairscale/nn/moe/top2gate.py, restated: (loss, combine weights (tokens, experts))."""
    tokens, count = logits.shape
    gates = torch.softmax(logits, 1)
    mask1 = torch.nn.functional.one_hot(gates.argmax(1), count)
    others = (logits + noise).masked_fill(mask1.bool(), -torch.inf)
    mask2 = torch.nn.functional.one_hot(others.argmax(1), count)
    places1 = mask1.cumsum(0) - 1
    places2 = mask2.cumsum(0) - 1 + mask1.sum(0, keepdim=True)
    loss = (gates.mean(0) * mask1.float().mean(0)).mean()
    capacity = 2 * tokens // count
    mask1, mask2 = mask1 * (places1 < capacity), mask2 * (places2 < capacity)
    gate1, gate2 = (gates * mask1).sum(1), (gates * mask2).sum(1)
    total = (gate1 + gate2).clamp(min=torch.finfo(gates.dtype).eps)
    return loss, (gate1 / total)[:, None] * mask1 + (gate2 / total)[:, None] * mask2


@pytest.mark.torch
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("skew", [0, 3])
def test_top2_gate_is_fairscales(noisy, skew):
    """What it drops included: of 24 tokens, with a skew most choose one expert first."""
    torch = pytest.importorskip("torch")
    values = (normal(24, 6) + skew * np.eye(6)[2]).astype(np.float32)
    shardrt.manual_seed(3)
    x, theirs = Tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
    weights, order, loss = F.top2_gate(x, noisy)
    shardrt.manual_seed(3)
    noise = gumbel(values.shape, np.float32) if noisy else np.zeros_like(values)
    their_loss, expected = top2gating(torch, theirs, torch.tensor(noise))
    scale = np.arange(1, 7, dtype=np.float32)
    ((expected**2 * torch.tensor(scale)).sum() + their_loss).backward()
    found = np.zeros((24, 6), np.float32)
    experts = np.zeros(48, np.int64)
    experts[order.copies[: order.counts.sum()]] = np.repeat(np.arange(6), order.counts)
    np.add.at(found, (np.repeat(np.arange(24), 2), experts), weights.data.reshape(-1))
    (((weights**2) * scale[experts].reshape(24, 2)).sum() + loss).backward()
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(loss.item(), their_loss.item(), rtol=1e-5)
    np.testing.assert_allclose(x.grad, theirs.grad, rtol=1e-5, atol=5e-6)
    assert (order.counts <= 8).all() and (skew == 0 or order.counts.sum() < 48)


def test_the_second_expert_is_drawn_by_its_probability():
    logits = Tensor(np.tile(np.log([0.5, 0.1, 0.3, 0.1]), (4000, 1)).astype(np.float32))
    shardrt.manual_seed(1)
    _, order, _ = F.top2_gate(logits, True)
    shares = order.chosen / 4000
    np.testing.assert_allclose(shares, [1, 0.2, 0.6, 0.2], atol=0.03)
    shardrt.manual_seed(1)
    np.testing.assert_array_equal(F.top2_gate(logits, True)[1].copies, order.copies)


# -- errors


def test_what_does_not_fit_is_an_error():
    order = order_of()
    with pytest.raises(ValueError, match=r"route: k must be in \[1, 5\], got 6"):
        F.route(LOGITS, 6)
    with pytest.raises(ValueError, match=r"route: logits must have two axes, got \(7, 5, 1\)"):
        F.route(LOGITS[..., None], 1)
    with pytest.raises(ValueError, match="score must be one of 'softmax', .* got 'hard'"):
        F.route(LOGITS, 1, score="hard")
    with pytest.raises(ValueError, match=r"route: bias must be \(5,\), got \(4,\)"):
        F.route(LOGITS, 1, bias=np.zeros(4))
    with pytest.raises(ValueError, match=r"experts must be int64 \(tokens, k\), got int32 \(3,\)"):
        F.expert_order(np.zeros(3, np.int32), COUNT)
    with pytest.raises(ValueError, match=r"expert_order: priority must be \(7, 2\), got \(7,\)"):
        F.expert_order(experts_of(), COUNT, capacity=1, priority=np.ones(7))
    with pytest.raises(ValueError, match="expert_order: capacity needs priority"):
        F.expert_order(experts_of(), COUNT, capacity=3)
    with pytest.raises(ValueError, match="expert_order: capacity must be at least 0, got -1"):
        F.expert_order(experts_of(), COUNT, capacity=-1, priority=np.ones((TOKENS, K)))
    with pytest.raises(ValueError, match="dispatch: x must have 7 rows, one for each token, got 8"):
        F.dispatch(normal(8, 3), order)
    with pytest.raises(ValueError, match=r"combine: x must have 14 rows and weights be \(7, 2\), got"):
        F.combine(normal(14, 3), normal(7, 3), order)
    with pytest.raises(ValueError, match="grouped_linear: x must be"):
        F.grouped_linear(normal(4, 3), normal(2, 5, 3), (4,))
    with pytest.raises(
        ValueError, match=r"grouped_linear: counts must not be negative, and sum to 4 at most, got \(5, 0\)"
    ):
        F.grouped_linear(normal(4, 3), normal(2, 5, 3), (5, 0))
    with pytest.raises(ValueError, match="top2_gate: the tokens must be a multiple of 5 experts, got 7"):
        F.top2_gate(LOGITS, False)


def test_other_types_are_an_error():
    order = order_of()
    with pytest.raises(
        TypeError, match="route: all arguments must be float32 or all float64, got logits int64"
    ):
        F.route(np.arange(6).reshape(2, 3), 1)
    with pytest.raises(TypeError, match="combine: weights must be float32, got float64"):
        F.combine(normal(14, 3).astype(np.float32), normal(7, 2), order)
    with pytest.raises(
        TypeError, match="grouped_linear: all arguments must be float32 or all float64, got x float64"
    ):
        F.grouped_linear(normal(4, 3), normal(2, 5, 3).astype(np.float32), (4, 0))
