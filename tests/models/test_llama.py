"""models/llama.py and the sizes by name: counts, sharding, adapters, errors. Values: test_transformers.py."""

from dataclasses import replace

import numpy as np
import pytest

from models import gpt, llama
from models.llama import Block, Llama, LlamaConfig
from models.plans import plan_of
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import by_class, full_gradients, wrap
from shardrt.parallel import parallelize_module
from shardrt.recompute import checkpoint
from tests import lab

SMALL = LlamaConfig(
    n_layer=2,
    n_head=4,
    n_kv_head=2,
    n_embd=32,
    n_hidden=48,
    block_size=16,
    vocab_size=31,
    rope_factor=4.0,
    rope_original_size=8,
)
UNTIED = replace(SMALL, tied=False)
TOKENS = np.random.default_rng(0).integers(0, 31, (4, 16))


@pytest.mark.parametrize(
    ("kind", "name", "millions"),
    [
        (gpt.GPT, "gpt2", 124.439808),
        (gpt.GPT, "gpt2-medium", 354.823168),
        (gpt.GPT, "gpt2-large", 774.030080),
        (gpt.GPT, "gpt2-xl", 1557.611200),
        (Llama, "llama-100m", 100.092672),
        (Llama, "llama-3.2-1b", 1235.814400),
        (Llama, "llama-3.1-8b", 8030.261248),
        (Llama, "mixtral-8x7b", 46702.792704),
        (Llama, "qwen3-30b-a3b", 30532.122624),
        (Llama, "olmoe-1b-7b", 6919.161856),
        (Llama, "mistral-7b", 7241.732096),
        (Llama, "qwen2.5-0.5b", 494.032768),
        (Llama, "qwen2.5-7b", 7615.616512),
        (Llama, "qwen3-0.6b", 596.049920),
        (Llama, "qwen3-8b", 8190.735360),
    ],
)
def test_sizes_by_name_have_the_published_numbers_of_parameters(kind, name, millions):
    sizes = gpt.SIZES if kind is gpt.GPT else llama.SIZES
    assert sum(p.size for p in kind(sizes[name]).parameters()) == round(1e6 * millions)


def made(config):
    return lab.seeded(lambda: Llama(config))


def trained(config, sharded, recomputed=False, parts=None, lr=0.5):
    """Gradients of the first step, weights after three, each of so many parts of the batch: one of a rank."""
    model, mesh = made(config), init_device_mesh("auto")
    for block in model.blocks if recomputed else ():
        checkpoint(block)
    if sharded:
        wrap(model, by_class(Block, nn.Experts), mesh=mesh)
    optimizer, found, parts = optim.SGD(model.parameters(), lr=lr), None, parts or mesh.size
    for _ in range(3):
        for tokens in np.split(np.split(TOKENS, mesh.size)[mesh.rank], parts // mesh.size):
            (model(tokens, tokens) * (mesh.size / parts)).backward()
        found = found or {name: np.array(values) for name, values in full_gradients(model)}
        lab.update(optimizer)
    return found, full_state_dict(model)


@pytest.mark.parametrize(("config", "loss_chunk"), [(SMALL, 5), (UNTIED, 0)], ids=["tied", "untied"])
def test_sharded_it_is_the_same_model(config, loss_chunk):
    expected = trained(config, sharded=False)
    for ranks in (1, 2, 4):
        chunked = replace(config, loss_chunk=loss_chunk)
        found = lab.first(ranks, trained, chunked, True, recomputed=ranks == 2)
        lab.assert_near(found, expected, ranks, rtol=2e-5)


def cut_by_heads(config):
    mesh, model = init_device_mesh("cpu", (init_device_mesh("auto").size,), ("tp",)), made(config)
    parallelize_module(model, mesh["tp"], plan_of(model))
    loss = model(TOKENS, TOKENS)
    loss.backward()
    return loss.item(), np.array(model.norm.weight.grad)


def test_heads_that_are_not_as_wide_as_their_part_of_n_embd_are_cut_like_others():
    config = replace(SMALL, head_size=12)
    (expected, gradient), *_ = thread.run(1, cut_by_heads, config)
    for loss, other in thread.run(2, cut_by_heads, config):
        assert loss == pytest.approx(expected, rel=1e-6)
        np.testing.assert_allclose(other, gradient, rtol=1e-4, atol=1e-6)


def adapted(config, **how):
    """Losses of five steps with adapters, names of what has changed, and of what is trained."""
    model = nn.add_lora(made(config), 2, **how)
    wrap(model, by_class(Block))
    before, losses = full_state_dict(model), []
    optimizer = optim.AdamW(nn.lora_parameters(model), lr=1e-2)
    for _ in range(5):
        loss = model(TOKENS, TOKENS)
        losses.append(loss.item())
        loss.backward()
        lab.update(optimizer)
    after = full_state_dict(model)
    changed = {name for name in before if (before[name] != after[name]).any()}
    return losses, changed, {name for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_learn_and_nothing_else_changes():
    losses, changed, adapters = lab.first(2, adapted, SMALL, targets=("*.qkv", "*.gate_up"))
    assert losses == sorted(losses, reverse=True)
    assert changed == adapters and len(adapters) == 8


def test_slow_pairs_turn_slower_and_fast_ones_as_before():
    config = LlamaConfig(n_embd=2048, n_head=32, n_kv_head=8, rope_factor=32.0)
    plain = 500000.0 ** -(np.arange(32) / 32)
    ratio = llama.frequencies(config) / plain
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(ratio[turns > 4], 1, rtol=1e-5)
    np.testing.assert_allclose(ratio[turns < 1], 1 / 32, rtol=1e-5)
    between = (turns > 1) & (turns < 4)
    assert between.sum() >= 2 and (np.diff(ratio) <= 1e-5).all()
    expected = (turns[between] - 1) / 3
    np.testing.assert_allclose(ratio[between], (1 - expected) / 32 + expected, rtol=1e-4)


def configs(*rows):
    """(settings of a LlamaConfig, words)."""
    return lab.refusals(*((lambda how=how: LlamaConfig(**how), words) for how, words in rows), literal=True)


test_a_config_that_makes_no_model_is_refused_by_name = configs(
    ({"n_head": 4, "n_kv_head": 3}, "n_kv_head must divide n_head, got 3 and 4"),
    ({"n_embd": 36}, "even multiple of n_head, got 36 and 12"),
    ({"n_hidden": 0}, "n_hidden must be at least 1, got 0"),
    ({"rope_theta": float("nan")}, "rope_theta must be positive, got nan"),
    ({"rope_low_freq_factor": 4.0}, "must be above rope_low_freq_factor, got 4.0 and 4.0"),
    ({"experts": -1}, "experts must be at least 0, got -1"),
    ({"experts": 4, "experts_per_token": 5}, "experts_per_token must be in [1, 4], the experts, got 5"),
    ({"balance_loss": float("nan")}, "balance_loss must be at least 0, got nan"),
    ({"qk_norm": "heads"}, "qk_norm must be none, head or all, got 'heads'"),
    ({"sliding_window": -1}, "sliding_window must be at least 0, got -1"),
    ({"layer_types": ("full_attention",)}, "layer_types must name each of the 12 layers, got 1 names"),
    (
        {"n_layer": 1, "layer_types": ("chunked",)},
        "layer_types must be full_attention or sliding_attention, got 'chunked'",
    ),
    (
        {"n_layer": 1, "layer_types": ("sliding_attention",)},
        "layer_types: sliding_attention needs a sliding_window of at least 1, got 0",
    ),
    ({"head_size": 7}, "head_size must be even and at least 0, got 7"),
)


def test_gpt_gives_the_loss_of_its_logits():
    tokens = TOKENS[:, :12]
    for chunk in (0, 7):
        shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 12, "vocab_size": 31}
        model = gpt.GPT(gpt.GPTConfig(**shape, loss_chunk=chunk))
        expected = F.cross_entropy(model(tokens), tokens, reduction="sum").item()
        assert model(tokens, tokens, reduction="sum").item() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="loss_chunk must be at least 0, got -1"):
        gpt.GPTConfig(loss_chunk=-1)


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="block_size = 16 at a time, got 17"):
        Llama(SMALL)(np.zeros((1, 17), np.int64))
