"""models/inputs.py: what is no input of a model is refused by a sentence, before anything is computed."""

import numpy as np
import pytest

from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.regnet import SIZES as REGNETS
from models.regnet import RegNet
from models.vit import SIZES, ViT
from shardrt import Tensor, no_grad
from shardrt import functional as F

SMALL = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "vocab_size": 16}
WRONG_TOKENS = [
    (np.array([1, 2]), ValueError, r"tokens: must be \(batch, time\), got \(2,\); one .* tokens\[None\]"),
    (Tensor([1, 2]), ValueError, "one sequence is"),
    (np.zeros((1, 2, 3), int), ValueError, r"must be \(batch, time\), got \(1, 2, 3\)"),
    ([[1, 2]], TypeError, "must be an array or a tensor, got list"),
    (None, TypeError, "got NoneType"),
    ("text", TypeError, "got str"),
    (np.ones((1, 2)), TypeError, "must be integers, got float64"),
]


@pytest.mark.parametrize("tokens, error, text", WRONG_TOKENS, ids=repr)
@pytest.mark.parametrize("model", [GPT(GPTConfig(**SMALL)), Llama(LlamaConfig(**SMALL, n_kv_head=1))])
def test_tokens(model, tokens, error, text):
    with no_grad(), pytest.raises(error, match=text):
        model(tokens)


@pytest.mark.parametrize("images", [np.zeros(3), np.zeros((1, 8, 8)), [[1.0]], None], ids=repr)
@pytest.mark.parametrize(
    "make", [lambda: ViT(SIZES["vit-digits"]), lambda: RegNet(next(iter(REGNETS.values())))]
)
def test_images(make, images):
    with pytest.raises((TypeError, ValueError), match=r"images: must be (an array|\(batch, [13], )"):
        make()(images)


def test_targets_and_indices_in_lists():
    logits = np.zeros((2, 3), np.float32)
    assert F.cross_entropy(logits, [0, 2]).shape == ()
    assert F.embedding([], logits).shape == (0, 3)
    with pytest.raises(
        ValueError, match="cross_entropy: targets must be an array, or nested lists of equal lengths"
    ):
        F.cross_entropy(logits, [[0], [1, 2]])
    with pytest.raises(ValueError, match=r"starts must be \(1, 2\)"):
        F.self_attention(np.zeros((1, 2, 6), np.float32), 1, starts=[0])
