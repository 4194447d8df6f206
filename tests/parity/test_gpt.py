"""models/gpt.py: names, shapes and logits of the same model in PyTorch, initial values of GPT-2; refusals."""

from dataclasses import replace

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from tests import lab

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=31)


@pytest.mark.torch
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("time", [1, 12])
def test_weights_fit_the_peer_which_has_the_same_logits(time, bias):
    torch = pytest.importorskip("torch")
    from bench.peers.torch_models import GPT as Peer

    model = GPT(replace(SMALL, bias=bias))
    peer = Peer(layers=2, heads=2, width=16, time=12, vocab=31, bias=bias)
    peer.load_state_dict({name: torch.from_numpy(values) for name, values in model.state_dict().items()})
    tokens = np.random.default_rng(0).integers(0, SMALL.vocab_size, (3, time))
    with torch.no_grad(), shardrt.no_grad():
        theirs, ours = peer(torch.from_numpy(tokens)).numpy(), np.asarray(model(tokens))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_initial_values_are_those_of_gpt2():
    config = GPTConfig(n_layer=8, n_head=2, n_embd=128, block_size=64, vocab_size=256)
    for name, values in GPT(config).state_dict().items():
        if name.endswith("bias"):
            assert not values.any(), name
        elif "norm" in name:
            assert (values == 1).all(), name
        else:
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            expected = 0.02 / 4 if residual else 0.02  # sqrt(2 * 8) = 4
            assert values.std() == pytest.approx(expected, rel=0.03), name
            assert abs(values.mean()) < expected / 20, name


test_what_makes_no_model_is_refused_by_name = lab.refusals(
    (lambda: GPTConfig(n_embd=384, n_head=5), "n_embd.*n_head.*384.*5"),
    (lambda: GPTConfig(n_layer=0), "n_layer.*0"),
    (lambda: GPTConfig(vocab_size=-3), "vocab_size.*-3"),
    (lambda: GPTConfig(dropout=1.0), "dropout.*1.0"),
    (lambda: GPT(SMALL)(np.zeros((1, 13), np.int64)), "block_size = 12"),
)
