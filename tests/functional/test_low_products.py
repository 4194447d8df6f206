"""Products in bfloat16 inside a unit: gradients beside PyTorch's bfloat16, and what saves what as bits."""

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from models.plans import plan_of
from shardrt import Tensor, device, nn
from shardrt import functional as F
from shardrt.comm import init_device_mesh
from shardrt.fsdp import MixedPrecisionPolicy, full_parameters, fully_shard
from shardrt.functional._again import Again
from shardrt.kernels import cpu as K
from shardrt.kernels import determinism, onednn
from shardrt.kernels.cpu.matmul import widened
from shardrt.parallel import parallelize_module, set_tensor_invariant
from tests.kernels.bits import bits
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not onednn.computes_bf16(), reason="no products of bfloat16 here")

ROWS, TIME, WIDTH, HEADS = 2, 40, 64, 2


class Layer(nn.Module):
    """Attention, and a linear layer with a GELU behind it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = F.self_attention(self.qkv(x), HEADS)
        return self.down(F.linear_gelu(y, self.up.weight, self.up.bias))


def rounded(x):
    return F.cast(Tensor(x), "bfloat16").data


def trained():
    """(name -> values, x, dy, name -> gradient) of one step; the gradient of x is called "x"."""
    shardrt.manual_seed(3)
    model = Layer()
    policy = MixedPrecisionPolicy("bfloat16", "float32")
    fully_shard(model, mesh=init_device_mesh("auto"), mp_policy=policy)
    random = np.random.default_rng(0)
    x, dy = (rounded(random.standard_normal((ROWS, TIME, WIDTH)).astype(np.float32)) for _ in range(2))
    given = Tensor(x, requires_grad=True)
    model(given).backward(dy)
    with full_parameters(model):
        values = {name: rounded(p.data) for name, p in model.named_parameters()}
    gradients = {}
    for name, p in model.named_parameters():
        gradients[name] = p.grad.reshape(p.shape).copy()  # one rank has all
    return values, x, dy, gradients | {"x": given.grad}


def in_torch(values, x, dy, dtype):
    """Name -> gradient, of the same in PyTorch."""
    import torch

    p = {name: torch.from_numpy(v.copy()).to(dtype).requires_grad_() for name, v in values.items()}
    given = torch.from_numpy(x.copy()).to(dtype).requires_grad_()
    linear = torch.nn.functional.linear
    q, k, v = (
        part.reshape(ROWS, TIME, HEADS, -1).transpose(1, 2)
        for part in linear(given, p["qkv.weight"], p["qkv.bias"]).chunk(3, -1)
    )
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = y.transpose(1, 2).reshape(ROWS, TIME, WIDTH)
    inner = torch.nn.functional.gelu(linear(y, p["up.weight"], p["up.bias"]), approximate="tanh")
    linear(inner, p["down.weight"], p["down.bias"]).backward(torch.from_numpy(dy.copy()).to(dtype))
    return {name: t.grad.double().numpy() for name, t in (p | {"x": given}).items()}


@pytest.mark.torch
def test_gradients_are_at_least_as_near_to_exact_ones_as_those_of_torch_in_bfloat16():
    torch = pytest.importorskip("torch")
    values, x, dy, ours = trained()
    exact, theirs = (in_torch(values, x, dy, kind) for kind in (torch.float64, torch.bfloat16))
    for name, true in exact.items():
        far, allowed = (np.linalg.norm(found[name] - true) for found in (ours, theirs))
        assert far <= allowed, f"{name}: {far:.1e}, {allowed:.1e}"


@pytest.fixture
def read(monkeypatch):
    """The types of what products and convolutions with weights have read."""
    read = []
    names = [(K.linear, name) for name in ("forward", "forward_gelu", "backward_input", "backward_weight")]
    names += [(K.conv2d, name) for name in ("forward", "backward_input", "backward_weight")]
    for module, name in (*names, (K.matmul, "matmul")):
        real = getattr(module, name)

        def spied(a, b, *rest, real=real, **how):
            read.append((a.dtype, b.dtype))
            real(a, b, *rest, **how)

        monkeypatch.setattr(module, name, spied)
    return read


def test_every_product_of_the_unit_reads_bits(read, monkeypatch):
    real_attention = K.attention.backward
    monkeypatch.setattr(
        K.attention,
        "backward",
        lambda dy, q, *rest, **how: read.append((q.dtype, q.dtype)) or real_attention(dy, q, *rest, **how),
    )
    trained()
    assert read == [(np.uint16, np.uint16)] * (3 + 3 + 3 + 1)


def test_a_repeated_step_has_the_same_bits():
    (*_, first), (*_, second) = trained(), trained()
    for name, gradient in first.items():
        np.testing.assert_array_equal(gradient, second[name])


@pytest.mark.parametrize("chunk", [0, 8])
@pytest.mark.parametrize("parts", [0, 4])
def test_products_of_what_is_cut_over_ranks_read_bits_and_follow_those_in_float32(read, parts, chunk):
    def step(low):
        mesh = init_device_mesh("cpu", (1, 2), ("dp", "tp"))
        shardrt.manual_seed(3)
        model = GPT(GPTConfig(2, 4, WIDTH, block_size=TIME, vocab_size=50, loss_chunk=chunk, init_std=0.1))
        parallelize_module(model, mesh["tp"], plan_of(model))
        if parts:
            set_tensor_invariant(model, parts)
        for module in (*model.blocks, model):
            policy = MixedPrecisionPolicy("bfloat16", "float32", full_precision=(nn.LayerNorm,))
            fully_shard(module, mesh=mesh["dp"], mp_policy=policy if low else None)
        tokens = np.random.default_rng(0).integers(0, 50, (ROWS, TIME))
        loss = model(tokens, tokens)
        loss.backward()
        return loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    exact = run_ranks(2, step, False)
    read.clear()
    low = run_ranks(2, step, True)
    assert len(read) > 2 * 3 * 2 * 4 and all(pair == (np.uint16, np.uint16) for pair in read)
    assert low[0] == low[1] != exact[0]
    np.testing.assert_allclose(low[0], exact[0], rtol=2e-2)


def test_products_of_experts_read_bits_and_those_of_their_router_float32(read):
    def step(policy):
        shardrt.manual_seed(3)
        model = nn.MoE(nn.TopKRouter(WIDTH, 4, 2), nn.Experts(4, WIDTH, 96))
        fully_shard(model, mesh=init_device_mesh("auto"), mp_policy=policy)
        random = np.random.default_rng(0)
        x, dy = (random.standard_normal((30, WIDTH)).astype(np.float32) for _ in range(2))
        given = Tensor(x, requires_grad=True)
        y, balance = model(given)
        (y * Tensor(dy)).sum().backward()
        return {"y": y.data, "x": given.grad} | {name: p.grad for name, p in model.experts.named_parameters()}

    exact = step(None)
    read.clear()
    low = step(MixedPrecisionPolicy("bfloat16", "float32", "float32", cast_forward_inputs=False))
    of_bits = [pair for pair in read if pair == (np.uint16, np.uint16)]
    assert len(read) - len(of_bits) == 3  # of the router
    assert len(of_bits) >= 3 * 2 * 3
    for name, true in exact.items():
        far = np.linalg.norm(low[name] - true) / np.linalg.norm(true)
        assert 0 < far < 0.02, f"{name}: {far:.1e}"


def test_convolutions_read_bits_and_follow_those_in_float32(read):
    def step(policy):
        shardrt.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 16, 4, stride=4), nn.GELU(), nn.Conv2d(16, 8, 3, padding=1))
        fully_shard(model, mesh=init_device_mesh("auto"), mp_policy=policy)
        random = np.random.default_rng(0)
        x = Tensor(random.standard_normal((2, 3, 16, 16)).astype(np.float32), requires_grad=True)
        y = model(x)
        y.backward(random.standard_normal(y.shape).astype(np.float32))
        return {"y": y.data, "x": x.grad} | {name: p.grad for name, p in model.named_parameters()}

    determinism.use_deterministic_algorithms(True)  # nothing is measured
    exact = step(None)
    read.clear()
    low = step(MixedPrecisionPolicy("bfloat16", "float32", "float32", cast_forward_inputs=False))
    assert len(read) == 6 and all(pair == (np.uint16, np.uint16) for pair in read)
    for name, true in exact.items():
        far = np.linalg.norm(low[name] - true) / np.linalg.norm(true)
        assert far < 0.02, f"{name}: {far:.1e}"
        assert far > 0 or name == "2.bias"  # whose gradient is a sum of what nobody rounds


def test_backward_finds_two_bytes_of_each_number_it_needs():
    shardrt.manual_seed(3)
    model = Layer()
    fully_shard(model, mesh=init_device_mesh("auto"), mp_policy=MixedPrecisionPolicy("bfloat16", "float32"))
    x = Tensor(np.ones((ROWS, TIME, WIDTH), np.float32), requires_grad=True)
    down = model(x).node
    while type(down).__name__ != "Linear":  # what leaves the unit has a node of its own
        down = down.edges[0].node
    up = down.edges[0].node
    attention = up.edges[0].node
    qkv, y, *_ = attention.saved
    assert {qkv.dtype, y.dtype, up.saved[3].dtype} == {np.dtype(np.uint16)}
    assert up.saved[0].array() is y and isinstance(down.saved[0], Again)
    expected = F.gelu(unpacked(up.saved[3]), "tanh").data
    np.testing.assert_array_equal(down.saved[0].array(), bits(expected))


def test_a_gelu_reads_the_bits_that_are_kept():
    random = np.random.default_rng(0)
    x, weight, bias = (random.standard_normal(s).astype(np.float32) for s in ((9, 8), (40, 8), 40))
    inner, y = np.empty((9, 40), np.uint16), np.empty((9, 40), np.float32)
    K.linear.forward_gelu(x, weight, bias, inner, y)
    sums = np.empty_like(y)
    K.linear.forward(x, weight, None, sums)
    exact = rounded(sums + bias)
    np.testing.assert_array_equal(unpacked(inner).data, exact)
    expected, again = np.empty_like(y), np.empty_like(y)
    K.activation.gelu_tanh_forward(exact.reshape(-1), expected.reshape(-1))
    K.activation.gelu_tanh_forward(inner.reshape(-1), again.reshape(-1))
    np.testing.assert_array_equal(y, again)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6)


def unpacked(x):
    return Tensor(widened(x))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((1000, WIDTH), init=nn.init.Normal(0.0, 0.3))

    def forward(self, x, targets):
        return F.linear_cross_entropy(x, self.weight, targets, chunk=0)


def head(policy):
    """(loss, gradients of x and of the weight, most bytes at once)."""
    shardrt.manual_seed(3)
    model = Head()
    fully_shard(model, mesh=init_device_mesh("auto"), mp_policy=policy)
    random = np.random.default_rng(0)
    x = Tensor(random.standard_normal((512, WIDTH)).astype(np.float32), requires_grad=True)
    targets = random.integers(0, 1000, 512)
    targets[100:110] = -100
    device.current().reset_peak()
    loss = model(x, targets)
    most = device.current().peak_bytes()
    loss.backward()
    return float(loss.item()), x.grad, model.weight.grad.copy(), most


def test_a_head_keeps_two_bytes_of_the_gradient_of_each_logit():
    (loss, *found, most), (true, *exact, _) = head(MixedPrecisionPolicy("bfloat16", "float32")), head(None)
    assert loss == pytest.approx(true, rel=2e-3)
    for far, near in zip(found, exact, strict=True):
        assert np.linalg.norm(far - near) < 0.01 * np.linalg.norm(near)
    assert most < 1.1 * ((2 * 512 + 4 * 128) * 1000 + (4 + 2) * 512 * WIDTH)
