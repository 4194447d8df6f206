"""models/generate.py, models/cache.py: with the cache the same tokens as without, at any number of ranks."""

import numpy as np
import pytest

import shardrt
from models.cache import KVCache, LayerCache
from models.gpt import GPT, GPTConfig
from models.gpt import Block as GPTBlock
from models.llama import FULL, SLIDING, Llama, LlamaConfig
from models.llama import Block as LlamaBlock
from models.sampling import ByteText, continued, draw, generate, greedy
from shardrt import Tensor, no_grad
from shardrt import functional as F
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import by_class, wrap
from shardrt.train.config import SampleConfig
from tests.gradcheck import normal

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 31, "init_std": 0.4}
KINDS = {
    "gpt": lambda: GPT(GPTConfig(**SIZES)),
    "llama": lambda: Llama(LlamaConfig(**SIZES, n_kv_head=2, n_hidden=48)),
    "windows": lambda: Llama(
        LlamaConfig(**SIZES, n_kv_head=2, n_hidden=48, sliding_window=5, layer_types=(SLIDING, FULL))
    ),
    "experts": lambda: Llama(LlamaConfig(**SIZES, n_kv_head=2, n_hidden=24, experts=4, qk_norm="all")),
}
PROMPT = np.random.default_rng(0).integers(0, 31, (3, 7))


def made(kind):
    shardrt.manual_seed(1)
    return KINDS[kind]().eval()


def without_cache(model, text, count):
    for _ in range(count):
        logits = np.asarray(model(text[:, -24:]))[:, -1]
        text = np.concatenate([text, logits.argmax(axis=1)[:, None]], axis=1)
    return text[:, -count:]


def with_cache(kind):
    model = made(kind)
    wrap(model, by_class(GPTBlock, LlamaBlock))
    return continued(model, PROMPT, 24, greedy, block_size=24)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_tokens_are_those_of_whole_forwards_beyond_the_window_as_well(kind, ranks):
    with no_grad():
        expected = without_cache(made(kind), PROMPT, 24)
    for found in thread.run(ranks, with_cache, kind):
        np.testing.assert_array_equal(found, expected)
    assert len(np.unique(expected)) > 5


def as_its_bits_say(kind):
    """The tokens of this rank, which would choose others than rank 0 from the same logits."""
    model, rank = made(kind), init_device_mesh().rank
    wrap(model, by_class(GPTBlock, LlamaBlock))
    return continued(model, PROMPT, 4, lambda logits: (greedy(logits) + rank) % 31, block_size=24)


def test_ranks_whose_logits_differ_in_rounding_go_on_with_the_tokens_of_rank_0():
    """An expert on another rank has the rows of all of them, and BLAS may round equal rows differently."""
    expected, *others = thread.run(2, as_its_bits_say, "experts")
    np.testing.assert_array_equal(expected, thread.run(1, as_its_bits_say, "experts")[0])
    for found in others:
        np.testing.assert_array_equal(found, expected)


def test_a_sequence_ends_behind_its_end_and_the_others_go_on():
    model = made("gpt")
    plain = continued(model, PROMPT, 24, greedy, block_size=24)
    (first, *_), (other, *_) = plain[0], np.setdiff1d(plain[1], plain[0])
    for ends in ([first], [first, other]):
        places = [np.flatnonzero(np.isin(row, ends)) for row in plain]
        last = [int(place[0]) if place.size else 23 for place in places]
        found = continued(model, PROMPT, 24, greedy, block_size=24, ends=ends)
        assert found.shape == (3, max(last) + 1), "no forward behind the last end"
        for row, expected, end in zip(found, plain, last, strict=True):
            np.testing.assert_array_equal(row[: end + 1], expected[: end + 1])
            assert (row[end:] == expected[end]).all(), "filled up with its end"


def test_a_text_says_how_far_it_is():
    shardrt.manual_seed(1)
    model, message = GPT(GPTConfig(**SIZES | {"vocab_size": 256})), []
    how = {"block_size": 24, "seed": 0}
    text = generate(model, SampleConfig(prompt="a", length=5), ByteText(), **how, on_token=message.append)
    assert message == [0, 1, 2, 3, 4]
    assert text == generate(model, SampleConfig(prompt="a", length=5), ByteText(), **how)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_one_row(kind):
    model, rows = made(kind), []
    first = model.blocks[0]
    forward = first.forward
    object.__setattr__(first, "forward", lambda x, *rest: rows.append(x.shape[1]) or forward(x, *rest))
    continued(model, PROMPT, 5, greedy, block_size=24)
    assert rows == [7, 1, 1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_with_the_cache_are_those_without(kind):
    model, cache = made(kind), KVCache(2, 7)
    with no_grad():
        expected = np.asarray(model(PROMPT))
        found = [np.asarray(model(PROMPT[:, :4], cache=cache))]
        found += [np.asarray(model(PROMPT[:, i : i + 1], cache=cache)) for i in (4, 5, 6)]
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 20])
def test_attention_in_a_window_with_the_cache_is_that_without(window):
    qkv, cache = normal(2, 9, 8 * 5), LayerCache(9)
    found = [cache.attend(Tensor(qkv[:, :4]), 4, 2, window).data]
    found += [cache.attend(Tensor(qkv[:, i : i + 1]), 4, 2, window).data for i in range(4, 9)]
    expected = F.self_attention(qkv, 4, kv_heads=2, window=window).data
    np.testing.assert_allclose(np.concatenate(found, 1), expected, rtol=1e-12, atol=1e-14)
    assert cache.keys.shape == cache.values.shape == (2, 2, min(window, 9), 5), "no token that is not seen"


def test_what_a_cache_cannot_do_is_an_error():
    model = made("llama")
    with pytest.raises(ValueError, match="with no_grad"):
        model(PROMPT, cache=KVCache(2, 8))
    with no_grad():
        with pytest.raises(ValueError, match="room = 6 is too small for 7 tokens"):
            model(PROMPT, cache=KVCache(2, 6))
        cache = KVCache(2, 20)
        model(PROMPT, cache=cache)
        with pytest.raises(ValueError, match="pass one token at a time after the first call, got 2"):
            model(PROMPT[:, :2], cache=cache)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_no_numbers_are_told_and_those_of_masked_tokens_are_none(temperature):
    logits = np.array([0.0, -np.inf, -np.inf], np.float32)
    assert draw(logits, temperature, 0, 0.999) == 0
    for wrong in (np.nan, np.inf):
        logits[1] = wrong
        with pytest.raises(ValueError, match="the model's logits are NaN or infinite"):
            draw(logits, temperature, 0, 0.5)
