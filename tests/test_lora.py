"""LoRA: the model begins as it was, only adapters are trained and reduced, and merging changes nothing."""

from functools import partial

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import full_parameters, fully_shard, memory_plan
from shardrt.nn.lora import adapted_layers
from tests import lab
from tests.gradcheck import normal

TOKENS = np.random.default_rng(0).integers(0, 31, (12, 16))


def gpt(lora=True, dropout=0.0):
    shardrt.manual_seed(5)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=31))
    return nn.add_lora(model, 4, targets=_targets, dropout=dropout) if lora else model


def _targets(path, layer):
    return "blocks" in path


def loss_of(model, tokens=TOKENS):
    return F.cross_entropy(model(tokens), tokens)


def train(model, mesh=None, steps=4):
    optimizer = optim.AdamW(nn.lora_parameters(model), lr=1e-2)
    for _ in range(steps):
        loss_of(model, *lab.rows(mesh, TOKENS)).backward()
        lab.update(optimizer)


def test_the_model_begins_as_it_was_with_the_same_names():
    plain, adapted = gpt(lora=False), gpt()
    assert loss_of(plain).item() == loss_of(adapted).item()
    names = [name for name, _ in adapted.named_parameters()]
    assert [name for name in names if "lora" not in name] == [name for name, _ in plain.named_parameters()]
    assert {name.rpartition(".")[2] for name in names if "lora" in name} == {"lora_a", "lora_b"}
    assert [p for p in adapted.parameters() if p.requires_grad] == nn.lora_parameters(adapted)


def test_an_adapter_of_a_head_is_in_the_logits_and_in_the_loss():
    model = nn.add_lora(Llama(LlamaConfig(1, 2, 1, 16, 16, 16, 31, tied=False, loss_chunk=8)), 2)
    model.head.lora_b.data = normal(31, 2)
    logits, loss = model(TOKENS), model(TOKENS, TOKENS)
    loss.backward()
    assert np.abs(model.head.lora_a.grad).max() > 0
    assert abs(loss.item() - F.cross_entropy(logits, TOKENS).item()) < 1e-6
    merged = nn.merge_lora(model)
    np.testing.assert_allclose(logits.numpy(), merged(TOKENS).numpy(), atol=1e-5)
    assert abs(loss.item() - merged(TOKENS, TOKENS).item()) < 1e-5


def test_forward_and_gradients_are_the_formula():
    layer = nn.Linear(5, 3, dtype=np.float64)
    holder = nn.Sequential(layer)
    nn.add_lora(holder, 2, alpha=3.0)
    layer.lora_b.data = normal(3, 2)
    x, dy = normal(7, 5), normal(7, 3)
    y = holder(shardrt.Tensor(x))
    a, b, w = layer.lora_a.data, layer.lora_b.data, layer.weight.data
    np.testing.assert_allclose(y.data, x @ w.T + layer.bias.data + 1.5 * x @ a.T @ b.T, rtol=1e-12)
    (y * shardrt.Tensor(dy)).sum().backward()
    np.testing.assert_allclose(layer.lora_a.grad, 1.5 * b.T @ dy.T @ x, rtol=1e-12)
    np.testing.assert_allclose(layer.lora_b.grad, 1.5 * dy.T @ x @ a.T, rtol=1e-12)
    assert layer.weight.grad is None and layer.bias.grad is None


def test_training_changes_adapters_only_and_lowers_the_loss():
    model = gpt()
    before = {name: p.data.copy() for name, p in model.named_parameters()}
    first = loss_of(model).item()
    train(model, steps=20)
    assert loss_of(model).item() < first - 0.03
    for name, parameter in model.named_parameters():
        assert np.array_equal(parameter.data, before[name]) == ("lora" not in name), name


def test_dropout_acts_on_adapters_in_training_alone():
    model = gpt(dropout=0.5)
    for parameter in nn.lora_parameters(model):
        parameter.data = np.full(parameter.shape, 0.1, np.float32)
    first, second = (loss_of(model).item() for _ in range(2))
    assert first != second
    model.eval()
    assert loss_of(model).item() == loss_of(model).item()


def test_merging_changes_no_output_and_leaves_the_model_as_it_was_made():
    model = gpt()
    train(model)
    expected = model(TOKENS).data
    names = [name for name, _ in gpt(lora=False).named_parameters()]
    nn.merge_lora(model)
    np.testing.assert_allclose(model(TOKENS).data, expected, rtol=1e-5, atol=1e-5)
    assert [name for name, _ in model.named_parameters()] == names
    assert not adapted_layers(model)


def sharded(strategy=None):
    counts = lab.Counts()
    model, mesh = gpt(), init_device_mesh("auto", wrap=counts)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, strategy=strategy)
    fully_shard(model, mesh=mesh, strategy=strategy)
    plan = memory_plan(model)
    train(model, mesh)
    (reduced,) = counts.bytes("reduce_scatter")
    state = full_state_dict(model)
    with full_parameters(model, writeback=True):
        nn.merge_lora(model)
    merged = loss_of(model).item()
    return state, reduced, merged, plan


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, "FULL_SHARD"), (2, "SHARD_OPT"), (3, "FULL_SHARD"), (3, "NO_SHARD")]
)
def test_sharded_training_equals_that_of_one_rank(ranks, strategy):
    plain = gpt()
    train(plain)
    results = thread.run(ranks, sharded, strategy)
    lab.assert_close(plain.state_dict(), results[0][0], rtol=1e-4, atol=2e-6)
    expected = loss_of(plain).item()
    assert all(merged == pytest.approx(expected, rel=1e-5) for _, _, merged, _ in results)


def test_only_adapters_are_reduced():
    ranks = 4
    state, reduced, _, plan = thread.run(ranks, sharded)[0]
    adapters = 4 * sum(values.size for name, values in state.items() if "lora" in name)
    padding = 4 * 2 * ranks * 64 * 4  # at most, over units and steps
    wire = 4 * adapters * (ranks - 1) // ranks  # four steps
    assert wire <= reduced <= wire + padding
    assert plan.device["sharded gradients"] <= (adapters + padding) / ranks


plain = partial(gpt, lora=False)
NO_LINEAR = r"targets \('\*\.nothing',\) match no Linear of GPT; there are blocks\.\*\.attention\.qkv, "
test_what_is_wrong_is_said = lab.refusals(
    (lambda: nn.add_lora(plain(), 0), "add_lora: rank must be at least 1"),
    (lambda: nn.add_lora(plain(), 2, alpha=-1.0), "add_lora: rank must be at least 1"),
    (lambda: nn.add_lora(plain(), 2, dropout=1.0), "add_lora: rank must be at least 1"),
    (lambda: nn.add_lora(plain(), 2, targets=("*.nothing",)), NO_LINEAR),
    (lambda: nn.add_lora(plain(), 99), "rank must be at most the smaller size of blocks"),
    (lambda: nn.add_lora(gpt(), 2), "has an adapter already"),
    (lambda: nn.merge_lora(plain()), "GPT has no adapters"),
    (lambda: nn.merge_lora(fully_shard(gpt())), RuntimeError, "is sharded"),
    (lambda: nn.add_lora(fully_shard(plain()), 2), "is sharded already; call add_lora before"),
)
