"""LoRA adapters next to PEFT: what it saved is loaded and trained as there, what is saved is loaded there."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from models.adapters import CONFIG, WEIGHTS, load_adapter, save_adapter
from models.hub import load_pretrained, save_pretrained
from models.llama import Block as LlamaBlock
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import CheckpointError
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import by_class, fully_shard, wrap
from tests import lab

pytestmark = pytest.mark.torch("transformers", "peft")

TOKENS = np.random.default_rng(0).integers(0, 61, (4, 12))
KINDS = {  # kind -> layers that PEFT adapts
    "llama": ["q_proj", "v_proj"],  # the default of PEFT: parts of a layer here, with a gap
    "llama-all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
}


def base(kind):
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        shape = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        still = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **still, initializer_range=0.2))
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config)


def theirs(kind, folder, **settings):
    """A model of PEFT's whose adapters are not zero, saved with its base in `folder`."""
    import peft
    import torch

    model = base(kind)
    model.save_pretrained(folder / "base")
    settings = {"r": 3, "lora_alpha": 5, "target_modules": KINDS[kind], "task_type": "CAUSAL_LM"} | settings
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder / "adapter")
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def of(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, theirs(kind, folder)
        return made[kind]

    return of


def ours(folder):
    return load_adapter(load_pretrained(folder / "base"), folder / "adapter")


def their_logits(model):
    import torch

    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS)).logits.numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_computes_here_what_it_does_there(saved, kind):
    folder, model = saved(kind)
    np.testing.assert_allclose(ours(folder)(TOKENS).numpy(), their_logits(model), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_as_it_was_bitwise_and_peft_reads_it(saved, kind, tmp_path):
    import peft

    folder, model = saved(kind)
    save_adapter(ours(folder), tmp_path / "again")
    before, after = load_file(folder / "adapter" / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert np.array_equal(values, after[name]), name
    read = peft.PeftModel.from_pretrained(base(kind), tmp_path / "again")
    assert np.array_equal(their_logits(read), their_logits(model))
    assert set(read.peft_config["default"].target_modules) == set(KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_in_peft(saved, kind, tmp_path):
    """Five steps of AdamW with weight decay: nothing leaks between queries, keys and values."""
    import peft
    import torch

    folder, _ = saved(kind)
    model = peft.PeftModel.from_pretrained(base(kind), folder / "adapter", is_trainable=True)
    inputs = torch.from_numpy(TOKENS)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        logits = model(inputs).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs.flatten()).backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "theirs")
    thread.run(2, trained, folder, tmp_path / "ours")
    wanted, found = load_file(tmp_path / "theirs" / WEIGHTS), load_file(tmp_path / "ours" / WEIGHTS)
    assert wanted.keys() == found.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, atol=2e-5, err_msg=name)


def trained(folder, target):
    mesh, model = init_device_mesh("auto"), ours(folder)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optim.AdamW(nn.lora_parameters(model), lr=1e-2, weight_decay=0.1)
    (tokens,) = lab.rows(mesh, TOKENS)
    for _ in range(5):
        F.cross_entropy(model(tokens), tokens).backward()
        lab.update(optimizer)
    save_adapter(model, target)


def test_one_adapter_of_a_whole_layer_becomes_one_for_each_of_peft(saved, tmp_path):
    import peft
    import transformers

    folder, _ = saved("llama")
    logits = thread.run(2, with_own_adapter, folder, tmp_path / "own")[0]
    read = peft.PeftModel.from_pretrained(base("llama"), tmp_path / "own")
    np.testing.assert_allclose(their_logits(read), logits, atol=2e-5, rtol=1e-4)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "own-merged")
    np.testing.assert_allclose(their_logits(merged), logits, atol=2e-5, rtol=1e-4)


def with_own_adapter(folder, target):
    mesh, model = init_device_mesh("auto"), load_pretrained(folder / "base")
    wrap(nn.add_lora(model, 2, targets=("*.qkv",)), by_class(LlamaBlock), mesh=mesh)
    optimizer = optim.AdamW(nn.lora_parameters(model), lr=1e-1)
    (tokens,) = lab.rows(mesh, TOKENS)
    F.cross_entropy(model(tokens), tokens).backward()
    lab.update(optimizer)
    save_adapter(model, target)
    save_pretrained(model, target.with_name("own-merged"))
    return model(TOKENS).numpy()


def test_scales_by_the_root_of_the_rank_are_read(tmp_path):
    model = theirs("llama", tmp_path, use_rslora=True)
    np.testing.assert_allclose(ours(tmp_path)(TOKENS).numpy(), their_logits(model), atol=2e-5, rtol=1e-4)


WRONG = {
    "r is 4": ({"r": 4}, "must have shape"),
    "DoRA": ({"use_dora": True}, "use_dora = True is not supported"),
    "ranks by layer": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "IA3": ({"peft_type": "IA3"}, "peft_type"),
    "dropout": ({"lora_dropout": 2}, "dropout"),
    "a part of the base": ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not supported"),
    "Kasa": ({"kasa_config": {"beta": 0.1}}, "kasa_config"),
    "no rank": ({"r": None}, "r must be an integer"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_settings_that_compute_something_else_are_refused_in_a_line(saved, tmp_path, wrong):
    change, message = WRONG[wrong]
    shutil.copytree(saved("llama")[0], tmp_path / "copy")
    config = tmp_path / "copy" / "adapter" / CONFIG
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(ValueError, match=message) as error:
        ours(tmp_path / "copy")
    assert "\n" not in str(error.value)


def test_settings_that_are_empty_are_not_there(saved, tmp_path):
    shutil.copytree(saved("llama")[0], tmp_path / "copy")
    config = tmp_path / "copy" / "adapter" / CONFIG
    empty = {"modules_to_save": [], "target_parameters": [], "init_lora_weights": None}
    config.write_text(json.dumps(json.loads(config.read_text()) | empty))
    wanted = their_logits(saved("llama")[1])
    np.testing.assert_allclose(ours(tmp_path / "copy")(TOKENS).numpy(), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "rename, message",
    [
        (lambda name: name.replace("q_proj", "w_proj"), "which is no linear layer in this model"),
        (lambda name: name.replace("lora_A", "lora_embedding_A"), "no matrix of a LoRA adapter"),
        (
            lambda name: name.replace("layers.0.self_attn.q_proj.lora_A", "layers.0.a.lora_A"),
            "has one matrix",
        ),
    ],
)
def test_tensors_without_a_place_are_refused_in_a_line(saved, tmp_path, rename, message):
    shutil.copytree(saved("llama")[0], tmp_path / "copy")
    path = tmp_path / "copy" / "adapter" / WEIGHTS
    save_file({rename(name): values for name, values in load_file(path).items()}, path)
    with pytest.raises(ValueError, match=message):
        ours(tmp_path / "copy")


def test_a_folder_that_is_not_empty_is_an_error_on_every_rank(saved, tmp_path):
    folder, _ = saved("gpt2")
    with pytest.raises(CheckpointError, match="exists already"):
        save_adapter(ours(folder), folder / "adapter")
    with pytest.raises(ValueError, match="no adapters"):
        save_adapter(load_pretrained(folder / "base"), tmp_path / "none")
