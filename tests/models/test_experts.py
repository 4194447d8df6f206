"""models/llama.py with experts: sharding, loss, adapters, 16 bits, stages. Values: test_transformers.py."""

from dataclasses import replace

import numpy as np
import pytest

from models.llama import Block, Llama, LlamaConfig
from models.plans import plan_of
from shardrt import functional as F
from shardrt import nn, no_grad, optim
from shardrt.fsdp import MixedPrecisionPolicy, by_class, full_gradients, wrap
from shardrt.recompute import checkpoint
from tests import lab
from tests.models.test_llama import TOKENS, adapted, made, trained
from tests.parallel import piped

SMALL = LlamaConfig(
    n_layer=2,
    n_head=4,
    n_kv_head=2,
    n_embd=32,
    head_size=12,
    n_hidden=24,
    block_size=16,
    vocab_size=31,
    tied=False,
    qk_norm="head",
    experts=4,
    experts_per_token=2,
    balance_loss=0.1,
    init_std=0.2,
)
KINDS = {
    "mixtral": replace(SMALL, qk_norm="none"),
    "qwen3-moe": SMALL,
    "olmoe": replace(SMALL, head_size=0, qk_norm="all", clip_qkv=0.8, normalise_experts=False),
    "pooled": replace(SMALL, pooled_balance=True),
    "a capacity": replace(SMALL, capacity_factor=1.25),
}
PARTS = 4  # of a batch; each is balanced by itself


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_it_is_the_same_model(kind):
    """Experts are units of their own, inside of their blocks'."""
    how = {"parts": PARTS, "lr": 0.2}
    expected = trained(KINDS[kind], sharded=False, **how)
    for ranks in (1, 2, 4):
        found = lab.first(ranks, trained, KINDS[kind], True, recomputed=ranks == 2, **how)
        lab.assert_near(found, expected, ranks, rtol=2e-5)


def test_the_loss_has_the_balance_in_training_alone_and_counts_it_as_often_as_targets():
    model, targets = made(SMALL), TOKENS.copy()
    targets[0, :5] = -100
    count = int((targets != -100).sum())
    entropy = F.cross_entropy(model(TOKENS), targets).item()
    loss, total = model(TOKENS, targets).item(), model(TOKENS, targets, reduction="sum").item()
    assert loss > entropy + 0.1 * 2 * 0.99, "1 for each of the two layers, if they were in balance"
    assert total == pytest.approx(count * loss, rel=1e-5)
    each = np.asarray(model(TOKENS, targets, reduction="none"))
    assert each.sum() == pytest.approx(count * entropy, rel=1e-5)
    model.eval()
    assert model(TOKENS, targets).item() == pytest.approx(entropy, rel=1e-6)


def test_the_balance_loss_evens_the_load():
    def after(balance_loss):
        model = made(replace(SMALL, balance_loss=balance_loss, init_std=0.5))
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(20):
            model(TOKENS, TOKENS).backward()
            lab.update(optimizer)
        nn.update_expert_bias(model)
        model(TOKENS, TOKENS)
        return max(load.max() / load.mean() for load in nn.expert_load(model).values())

    assert after(1.0) < 1.3 < 1.45 < after(0.0)


def test_adapters_of_attention_and_head_learn_beside_frozen_experts():
    losses, changed, _ = lab.first(2, adapted, SMALL)
    assert losses == sorted(losses, reverse=True)
    layers = [f"blocks.{i}.attention.{name}" for i in range(2) for name in ("qkv", "output")]
    assert changed == {f"{layer}.lora_{half}" for layer in (*layers, "head") for half in "ab"}


def in_16_bits(policy):
    model = wrap(made(SMALL), by_class(Block), mp_policy=policy)
    loss = model(TOKENS, TOKENS)
    loss.backward()
    return loss.item(), {name: np.array(values) for name, values in full_gradients(model)}


def test_in_16_bits_the_loss_is_about_the_same_and_routers_are_in_32():
    policy = MixedPrecisionPolicy("bfloat16", "float32", "float32", full_precision=(nn.RMSNorm,))
    loss, gradients = lab.first(2, in_16_bits, policy)
    expected, others = lab.first(2, in_16_bits, None)
    assert loss == pytest.approx(expected, rel=1e-2)
    for name in ("blocks.0.mlp.router.weight", "blocks.1.mlp.experts.up", "embedding.weight"):
        cosine = (gradients[name] * others[name]).sum()
        assert cosine > 0.95 * np.linalg.norm(gradients[name]) * np.linalg.norm(others[name]), name


def in_stages():
    sizes = {"n_kv_head": 1, "n_hidden": 12, "tied": False, "experts": 3, "balance_loss": 0.1}
    return Llama(LlamaConfig(**sizes, **piped.SMALL))


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1", "Interleaved1F1B"])
def test_stages_pass_the_balance_on_and_have_the_bits_of_no_pipeline(schedule):
    expected = piped.trained((1, 1, 2), None, make=in_stages)
    lab.assert_equal(piped.trained((2, 1, 2), schedule, make=in_stages), expected)
    again = piped.trained((2, 1, 2), schedule, make=in_stages, before=checkpoint)
    lab.assert_equal(again, expected)


def test_evaluation_does_not_count_for_the_load():
    model = made(SMALL).eval()
    with no_grad():
        model(TOKENS, TOKENS)
    assert not any(load.any() for load in nn.expert_load(model).values())


def test_a_norm_of_all_queries_at_once_has_no_plan():
    with pytest.raises(ValueError, match="a model with qk_norm='all' can't be split"):
        plan_of(made(replace(SMALL, qk_norm="all")))
