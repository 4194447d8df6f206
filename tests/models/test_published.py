"""Folders of Qwen2.5, Qwen3 and Mistral as they are published: settings, names and shapes of tensors."""

import json
from dataclasses import replace

import numpy as np
import pytest

from models.hub import load_pretrained
from models.llama import SIZES
from shardrt.__main__ import main
from tests.models.published import CONFIGS, tensors_of, write

EXPECTED = {name: SIZES[name] for name in CONFIGS if name in SIZES}
EXPECTED["mistral-7b-v0.3"] = replace(SIZES["mistral-7b"], vocab_size=32768, rope_theta=1e6, sliding_window=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_folder_is_the_model_of_that_name(tmp_path, name):
    """Of up to 16 GB; the weights are not read."""
    model = load_pretrained(write(tmp_path / name, CONFIGS[name]))
    assert model.config == EXPECTED[name]
    shapes = [parameter.whole_shape for parameter in model.parameters()]
    assert sum(map(np.prod, shapes)) == sum(map(np.prod, tensors_of(CONFIGS[name]).values()))


@pytest.mark.torch
@pytest.mark.parametrize("name", CONFIGS)
def test_the_tensors_are_those_of_transformers(name):
    torch, transformers = (pytest.importorskip(module) for module in ("torch", "transformers"))
    config = CONFIGS[name] | {"num_hidden_layers": 2}
    (architecture,) = config["architectures"]
    with torch.device("meta"):
        kind = getattr(transformers, architecture)
        model = kind(kind.config_class.from_dict(config))
    found = {key: tuple(values.shape) for key, values in model.state_dict().items()}
    assert model.config.tie_word_embeddings == config["tie_word_embeddings"]
    if config["tie_word_embeddings"]:
        del found["lm_head.weight"]
    assert found == tensors_of(config)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-8b", "mistral-7b"])
def test_such_a_folder_converts_there_and_back_bitwise(tmp_path, name):
    """All layers, and narrow ones."""
    random = np.random.default_rng(0)
    small = {"hidden_size": CONFIGS[name]["num_attention_heads"] * 4, "intermediate_size": 24}
    small |= {"vocab_size": 40} | ({"head_dim": 6} if "head_dim" in CONFIGS[name] else {})
    write(tmp_path / "hub", CONFIGS[name] | small, values=lambda n: random.integers(0, 0x7F80, n, np.uint16))
    back = "--config", tmp_path / "hub" / "config.json", "--dtype", "bfloat16"
    for source, target, *how in ("hub", "run", "shardrt"), ("run", "again", "huggingface", *back):
        words = "ckpt", "convert", tmp_path / source, tmp_path / target, "--to", *how
        assert main([str(word) for word in words]) == 0
    before, after = (load_pretrained(tmp_path / folder) for folder in ("hub", "again"))
    assert after.config == before.config
    assert tensors_in(tmp_path / "again") == tensors_in(tmp_path / "hub")


def tensors_in(folder):
    """Name -> (type, shape, bytes)."""
    found = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        for name, about in header.items():
            begin, end = about["data_offsets"]
            found[name] = about["dtype"], about["shape"], data[start + begin : start + end]
    return found
