"""GPT-2 and Llama beside transformers: the same logits, losses, gradients and tokens, weights both ways."""

import os

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import hub
from models.generate import continued, greedy
from models.gpt import Block as GPTBlock
from models.hub import load_pretrained, save_pretrained
from models.llama import Block as LlamaBlock
from shardrt import functional as F
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import by_class, full_gradients, wrap

pytestmark = pytest.mark.torch

TOKENS = np.random.default_rng(0).integers(0, 61, (4, 20))


def made(kind):
    """A small model of transformers with random weights, wide enough that all of it matters."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        shape = {"vocab_size": 61, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return GPT2LMHeadModel(GPT2Config(**shape, **ends, initializer_range=0.2)).eval()
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if kind == "llama-scaled":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=kind == "llama-tied",
        rope_parameters=rope,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


KINDS = ["gpt2", "llama-tied", "llama-scaled"]


class Reference:
    """Its weights in a folder; logits, the mean loss and gradients for TOKENS; what it goes on with."""

    def __init__(self, kind, folder):
        import torch

        model = made(kind)
        model.save_pretrained(folder)
        tokens = torch.from_numpy(TOKENS)
        logits = model(tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        self.kind, self.folder = kind, folder
        self.logits, self.loss = logits.detach().numpy(), loss.item()
        self.gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
        how = {"max_new_tokens": 64, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        seen = torch.ones_like(tokens[:2, :5])  # or it takes tokens that are 0 for padding
        self.greedy = model.generate(tokens[:2, :5], attention_mask=seen, **how).numpy()


@pytest.fixture(scope="module", params=KINDS)
def reference(request, tmp_path_factory):
    return Reference(request.param, tmp_path_factory.mktemp(request.param))


def step(folder):
    """This rank's logits and loss, and the gradients under transformers' names."""
    mesh = init_device_mesh("auto")
    model = load_pretrained(folder)
    wrap(model, by_class(GPTBlock, LlamaBlock), mesh=mesh)
    tokens = np.split(TOKENS, mesh.size)[mesh.rank]
    logits = model(tokens)
    loss = F.cross_entropy(logits, tokens)
    loss.backward()
    form = next(form for form in hub.FORMATS.values() if isinstance(model, form.model))
    places, gradients = dict(form.tensors(model.config)), {}
    for name, values in full_gradients(model):
        for part, rows in hub.rows_of(values.shape, places[name]):
            whole = np.array(values[rows])
            gradients[form.full_name(part.name)] = whole.T if part.transposed else whole
    return np.array(logits.data), loss.item(), gradients


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_loss_and_gradients_are_those_of_transformers(reference, ranks):
    found = thread.run(ranks, step, reference.folder)
    logits = np.concatenate([logits for logits, _, _ in found])
    assert np.abs(logits - reference.logits).max() <= 1e-4 * np.abs(reference.logits).max()
    assert np.mean([loss for _, loss, _ in found]) == pytest.approx(reference.loss, rel=1e-5)
    gradients = found[0][2]
    assert gradients.keys() == reference.gradients.keys()
    for name, expected in reference.gradients.items():
        difference = np.linalg.norm(gradients[name] - expected)
        assert difference <= 1e-4 * np.linalg.norm(expected), name


def went_on(folder):
    model = load_pretrained(folder).eval()
    wrap(model, by_class(GPTBlock, LlamaBlock))
    return continued(model, TOKENS[:2, :5], 64, greedy, block_size=128)


@pytest.mark.parametrize("ranks", [1, 2])
def test_greedy_it_goes_on_as_transformers_does_token_for_token(reference, ranks):
    for found in thread.run(ranks, went_on, reference.folder):
        np.testing.assert_array_equal(found, reference.greedy[:, 5:])
    assert len(np.unique(reference.greedy)) > 10  # not one token over and over


def exported(source, target):
    model = load_pretrained(source)
    wrap(model, by_class(GPTBlock, LlamaBlock))
    save_pretrained(model, target, file_bytes=40_000)


def test_transformers_reads_what_was_exported_and_gives_the_same_logits(reference, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    thread.run(2, exported, reference.folder, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    assert type(model) is type(made(reference.kind))
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits, reference.logits, rtol=1e-6, atol=1e-6)
