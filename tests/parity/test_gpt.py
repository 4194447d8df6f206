"""models/gpt.py beside the same model in PyTorch: names, shapes, logits, initial values; and its config."""

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=31)


def in_torch(config):
    pytest.importorskip("torch")
    from bench.peers.torch_models import GPT as TorchGPT

    return TorchGPT(
        layers=config.n_layer,
        heads=config.n_head,
        width=config.n_embd,
        time=config.block_size,
        vocab=config.vocab_size,
        bias=config.bias,
    )


@pytest.mark.torch
@pytest.mark.parametrize("bias", [True, False])
def test_names_and_shapes_are_those_of_the_peer(bias):
    config = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=31, bias=bias)
    theirs = {name: tuple(p.shape) for name, p in in_torch(config).named_parameters()}
    assert {name: p.shape for name, p in GPT(config).named_parameters()} == theirs


@pytest.mark.torch
@pytest.mark.parametrize("time", [1, 12])
def test_logits_are_those_of_the_peer(time):
    torch = pytest.importorskip("torch")
    model, peer = GPT(SMALL), in_torch(SMALL)
    weights = {name: torch.from_numpy(values) for name, values in model.state_dict().items()}
    peer.load_state_dict(weights)
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


def test_the_head_is_the_token_embedding():
    names = [name for name, _ in GPT(SMALL).named_parameters()]
    assert "wte.weight" in names and not [name for name in names if "head" in name]


def test_dropout_acts_in_training_only():
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=12, vocab_size=31, dropout=0.5))
    tokens = np.arange(12)[None]
    with shardrt.no_grad():
        first, second = np.array(model(tokens)), np.array(model(tokens))
        assert (first != second).any()
        model.eval()
        np.testing.assert_array_equal(np.array(model(tokens)), np.array(model(tokens)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_embd": 384, "n_head": 5}, ["n_embd", "n_head", "384", "5"]),
        ({"n_layer": 0}, ["n_layer", "0"]),
        ({"vocab_size": -3}, ["vocab_size", "-3"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
    ],
)
def test_a_config_that_makes_no_model_is_refused_by_name(settings, words):
    with pytest.raises(ValueError) as error:
        GPTConfig(**settings)
    message = str(error.value)
    assert all(word in message for word in words) and "\n" not in message


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match="block_size = 12"):
        GPT(SMALL)(np.zeros((1, 13), np.int64))
