"""models/hub.py: weights to the bit at any number of ranks, memory bounded, bad folders refused."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shardrt
from models.gpt import GPT, GPTConfig
from models.gpt import Block as GPTBlock
from models.hub import load_pretrained, save_pretrained, starts_afresh
from models.llama import FULL, SLIDING, Llama, LlamaConfig
from models.llama import Block as LlamaBlock
from models.vit import Block as ViTBlock
from models.vit import ViT, ViTConfig
from shardrt import nn, no_grad, optim
from shardrt.checkpoint import CheckpointError, full_state_dict, tensorfiles
from shardrt.comm import thread
from shardrt.fsdp import by_class, wrap
from tests import lab

GPT_SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=31)
LLAMA_SMALL = LlamaConfig(
    n_layer=2, n_head=4, n_kv_head=2, n_embd=16, n_hidden=24, block_size=12, vocab_size=31, tied=False
)
MISTRAL_SMALL = replace(LLAMA_SMALL, sliding_window=4)
SOME = {"sliding_window": 5, "layer_types": (FULL, SLIDING)}
QWEN2_SMALL = replace(LLAMA_SMALL, qkv_bias=True, tied=True, **SOME)
QWEN3_SMALL = replace(LLAMA_SMALL, head_size=6, qk_norm="head", sliding_window=3)
MIXTRAL_SMALL = replace(LLAMA_SMALL, experts=3, experts_per_token=2)
QWEN3_MOE_SMALL = replace(MIXTRAL_SMALL, head_size=6, qk_norm="head", normalise_experts=False, tied=True)
OLMOE_SMALL = replace(MIXTRAL_SMALL, qk_norm="all", clip_qkv=2.5)
VIT_SMALL = ViTConfig(n_layer=2, n_head=2, n_embd=16, n_hidden=24, image_size=8, patch_size=4, classes=5)
EXPERTS = {
    "mixtral": lambda: Llama(MIXTRAL_SMALL),
    "qwen3_moe": lambda: Llama(QWEN3_MOE_SMALL),
    "olmoe": lambda: Llama(OLMOE_SMALL),
}
KIN = {
    "llama": lambda: Llama(LLAMA_SMALL),
    "mistral": lambda: Llama(MISTRAL_SMALL),
    "qwen2": lambda: Llama(QWEN2_SMALL),
    "qwen3": lambda: Llama(QWEN3_SMALL),
}
LANGUAGE = {"gpt2": lambda: GPT(GPT_SMALL), **KIN, **EXPERTS}
MODELS = {**LANGUAGE, "vit": lambda: ViT(VIT_SMALL)}


TOKENS = np.random.default_rng(0).integers(0, 31, (2, 12))


def made(kind):
    shardrt.manual_seed(4)
    return MODELS[kind]()


def sharded(model):
    return wrap(model, by_class(GPTBlock, LlamaBlock, ViTBlock))


def saved(kind, folder):
    save_pretrained(sharded(made(kind)), folder, file_bytes=5000)


def loaded(folder):
    model = load_pretrained(folder)
    sharded(model)
    return full_state_dict(model)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (3, 2)])
def test_what_was_exported_comes_back_to_the_bit(tmp_path, monkeypatch, kind, before, after):
    monkeypatch.setattr(tensorfiles, "BLOCK", 600)  # many pieces of each tensor
    thread.run(before, saved, kind, tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) > 4
    assert not list(tmp_path.glob(".tmp*"))
    expected = made(kind).state_dict()
    lab.assert_equal(thread.run(after, loaded, tmp_path / "out")[0], expected)
    assert load_pretrained(tmp_path / "out").config == made(kind).config
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind


@pytest.fixture
def folder(tmp_path):
    """A GPT-2 in one file."""
    save_pretrained(made("gpt2"), tmp_path / "gpt2")
    return tmp_path / "gpt2"


def rewritten(folder, change):
    """The tensors of model.safetensors changed by `change`."""
    file = folder / "model.safetensors"
    tensors = {name: np.array(values) for name, values in load_file(file).items()}
    save_file(change(tensors), file, metadata={"format": "pt"})


def test_names_without_the_prefix_masks_and_a_stored_head_are_taken(folder):
    def older(tensors):
        tensors = {name.removeprefix("transformer."): values for name, values in tensors.items()}
        mask = np.tril(np.ones((1, 1, 12, 12), np.float32))
        extra = {"h.0.attn.bias": mask, "h.1.attn.masked_bias": np.array(-1e4, np.float32)}
        return tensors | extra | {"lm_head.weight": tensors["wte.weight"].copy()}

    rewritten(folder, older)
    lab.assert_equal(load_pretrained(folder).state_dict(), made("gpt2").state_dict())


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float64"])
def test_other_floats_become_float32(folder, kind):
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    rewritten(folder, lambda tensors: {name: values.astype(dtype) for name, values in tensors.items()})
    model = load_pretrained(folder, dropout=0.1)
    assert model.config.dropout == 0.1
    for name, values in made("gpt2").state_dict().items():
        np.testing.assert_array_equal(model.state_dict()[name], values.astype(dtype).astype(np.float32))


def tuned(folder, kind):
    """A loaded model with adapters that an update has changed, exported: weights before, logits after."""
    save_pretrained(sharded(made(kind)), folder / "base")
    model = nn.add_lora(load_pretrained(folder / "base"), 2, targets=("*.qkv", "*.output"))
    sharded(model)
    before = full_state_dict(model)
    optimizer = optim.AdamW(nn.lora_parameters(model), lr=0.1)
    for _ in range(2):
        model(TOKENS, TOKENS).backward()
        lab.update(optimizer)
    save_pretrained(model, folder / "tuned")
    with no_grad():
        return before, np.array(model(TOKENS).data)


@pytest.mark.parametrize("kind", LANGUAGE)
def test_adapters_are_added_to_a_loaded_model_and_merged_in_the_export(tmp_path, kind):
    before, logits = lab.first(2, tuned, tmp_path, kind)
    for name, values in made(kind).state_dict().items():
        np.testing.assert_array_equal(before[name], values, err_msg=name)
    with no_grad():
        found, base = (np.asarray(load_pretrained(tmp_path / n)(TOKENS)) for n in ("tuned", "base"))
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-6)
    assert np.abs(base - logits).max() > 0.01


def test_for_other_classes_the_head_starts_afresh_and_all_else_as_the_files_say(tmp_path):
    save_pretrained(made("vit"), tmp_path / "vit", settings={"id2label": dict.fromkeys("01234", "x")})
    expected = made("vit").state_dict()
    assert starts_afresh(load_pretrained(tmp_path / "vit", classes=5)) == []
    model = load_pretrained(tmp_path / "vit", classes=3)
    assert starts_afresh(model) == ["head.weight", "head.bias"]
    found = model.state_dict()
    assert found["head.weight"].shape == (3, 16) and found["head.weight"].std() > 0.01
    for name in expected.keys() - {"head.weight", "head.bias"}:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)

    def headless(tensors):  # a ViTModel: without the head, without the prefix, with a pooler
        kept = {name.removeprefix("vit."): t for name, t in tensors.items() if "classifier" not in name}
        return kept | {"pooler.dense.weight": np.zeros((16, 16), np.float32)}

    rewritten(tmp_path / "vit", headless)
    assert starts_afresh(load_pretrained(tmp_path / "vit", classes=5)) == ["head.weight", "head.bias"]
    with pytest.raises(ValueError, match=r"2 tensors missing \['classifier.bias', 'classifier.weight'\]"):
        load_pretrained(tmp_path / "vit")


def setting(name, value):
    def change(folder):
        table = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(table | {name: value}))

    return change


def left_out(name, value):
    def change(folder):
        table = json.loads((folder / "config.json").read_text())
        del table[name]
        (folder / "config.json").write_text(json.dumps(table))

    return change


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def tensors(change):
    return lambda folder: rewritten(folder, change)


def indexed(name, prepare=lambda folder: None):
    """The one file as it would be found through an index that calls it `name`."""

    def change(folder):
        names = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        prepare(folder)
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def linked(folder):
    (folder / "link").symlink_to(folder / "model-1.safetensors")


def doubled(folder):
    """A header with one tensor twice, of which the library takes the last without a word."""
    entry = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = ("{" + entry + "," + entry + "}").encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def without(tensors):
    return {name: values for name, values in tensors.items() if "ln_1" not in name}


BAD = {
    "another kind": (
        setting("model_type", "bert"),
        "model_type = 'bert' is not supported; supported: 'gpt2'",
    ),
    "cut off": (text("config.json", '{"model_type": "gpt2"'), "config.json: not valid JSON"),
    "a list": (text("config.json", "[1]"), "config.json: must hold a JSON object, not a list"),
    "deep": (text("config.json", "[" * 100_000), "config.json: not valid JSON"),
    "activation": (setting("activation_function", "relu"), "activation_function = 'relu' is not supported"),
    "eps": (setting("layer_norm_epsilon", 1e-6), "layer_norm_epsilon = 1e-06 is not supported, only 1e-05"),
    "untied": (setting("tie_word_embeddings", False), "tie_word_embeddings = False is not supported"),
    "quantized": (setting("quantization_config", {"bits": 4}), "quantization_config = "),
    "negative": (setting("n_embd", -16), "n_embd must be an integer of at least 1, got -16"),
    "layers": (setting("n_layer", 10**9), "n_layer = 1000000000, but the files have only 28 tensors"),
    "enormous": (setting("vocab_size", 2**30), r"wte.weight must have shape .*, got \(31, 16\)"),
    "heads": (setting("n_head", 3), "n_embd must be a multiple of n_head"),
    "missing": (tensors(without), "4 tensors missing .*'h.0.ln_1.bias'.* 0 not expected"),
    "extra": (
        tensors(lambda t: t | {"odd": t["transformer.wpe.weight"].copy()}),
        r"1 not expected \['odd'\]",
    ),
    "shape": (
        tensors(lambda t: t | {"transformer.h.1.mlp.c_fc.weight": np.zeros((64, 16), np.float32)}),
        r"h.1.mlp.c_fc.weight must have shape \(16, 64\), got \(64, 16\)",
    ),
    "integers": (
        tensors(lambda t: t | {"transformer.wpe.weight": np.zeros((12, 16), np.int32)}),
        "wpe.weight has dtype I32; supported: F32",
    ),
    "both names": (
        tensors(lambda t: t | {"wpe.weight": t["transformer.wpe.weight"].copy()}),
        "tensor 'wpe.weight' exists with and without the prefix 'transformer.'",
    ),
    "a tensor twice": (doubled, "duplicate key 'a'"),
    "damaged": (text("model.safetensors", "x" * 100), "model.safetensors is damaged"),
    "out of the folder": (indexed("../gpt2/model-1.safetensors"), "is not a plain file name"),
    "the folder": (indexed(".."), "'..' is not a plain file name"),
    "a link": (indexed("link", linked), "'link' is a link"),
    "a pipe": (indexed("pipe", lambda f: os.mkfifo(f / "pipe")), "pipe is not a regular file"),
    "absent": (indexed("model-2.safetensors"), "'model-2.safetensors', which does not exist"),
    "no map": (
        lambda f: [(f / "model.safetensors").unlink(), text("model.safetensors.index.json", "{}")(f)],
        "weight_map must be a table",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_refused_in_one_line(folder, case):
    change, message = BAD[case]
    change(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_pretrained(folder)
    assert "\n" not in str(error.value)


def test_a_good_index_is_read_and_one_that_lacks_a_tensor_is_not(folder):
    indexed("model-1.safetensors")(folder)
    load_pretrained(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    where = index["weight_map"]
    path.write_text(json.dumps({"weight_map": where | {"ghost": "model-1.safetensors"}}))
    with pytest.raises(ValueError, match="the files that the index names lack .*'ghost'"):
        load_pretrained(folder)
    del where["transformer.wpe.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="the index does not know 'transformer.wpe.weight'"):
        load_pretrained(folder)


def test_a_snapshot_in_a_download_cache_is_read_through_its_links(folder, tmp_path):
    indexed("model-1.safetensors")(folder)
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "1f0c", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    for file in folder.iterdir():
        file.rename(blobs / f"hash-of-{file.name}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"hash-of-{file.name}")
    load_pretrained(snapshot)
    blob = (blobs / "hash-of-model-1.safetensors").rename(tmp_path / "elsewhere")
    (snapshot / "model-1.safetensors").unlink()
    (snapshot / "model-1.safetensors").symlink_to(blob)
    with pytest.raises(ValueError, match="is a link that leads outside the blobs of a download cache"):
        load_pretrained(snapshot)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("vit", {"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new' is not supported, only 'gelu'"),
        ("vit", {"qkv_bias": False}, "qkv_bias = False is not supported"),
        ("vit", {"image_size": [8, 16]}, r"image_size = \[8, 16\] is not supported; it must be square"),
        ("vit", {"image_size": ["8"]}, "image_size must be an integer of at least 1, got '8'"),
        ("vit", {"patch_size": 3}, "image_size must be a multiple of patch_size, got 8 and 3"),
        (
            "vit",
            {"id2label": {"0": "one"}},
            r"classifier.weight must have shape \(1, 16\), got \(5, 16\)",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type = 'yarn' is not supported",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": "2"}},
            "factor must be a number, got '2'",
        ),
        ("llama", {"rope_parameters": 7}, "rope_parameters must be an object, got 7"),
        ("llama", {"rope_theta": 10**400}, "rope_theta must be a number, got 1000"),
        ("llama", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("llama", {"head_dim": 8}, r"q_proj.weight must have shape \(32, 16\), got \(16, 16\)"),
        (
            "llama",
            {"head_dim": None, "num_attention_heads": 3},
            "n_embd must be an even multiple of n_head, got 16 and 3",
        ),
        ("llama", {"head_dim": "4"}, "head_dim must be an integer of at least 1, got '4'"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' is not supported"),
        ("llama", {"num_key_value_heads": 3}, "n_kv_head must divide n_head"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported, only 0.0 is"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be an integer of at least 1, got 0"),
        ("mistral", {"sliding_window": True}, "sliding_window must be an integer of at least 1, got True"),
        ("mistral", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("mistral", {"layer_types": [SLIDING, FULL]}, r"layer_types = \['sliding_attention', 'full_att"),
        ("qwen2", {"use_mrope": True}, "use_mrope = True is not supported, only False is"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn' is not supported"),
        ("qwen2", {"rope_parameters": None, "rope_scaling": {"type": "yarn"}}, "rope_type = 'yarn' is not"),
        ("qwen2", {"layer_types": [SLIDING]}, "layer_types must be a list of 2 times 'full.*, got 1 values"),
        ("qwen2", {"layer_types": [SLIDING, []]}, "layer_types must be a list of 2 times .*, got 2 values"),
        ("qwen2", {"layer_types": "full"}, "layer_types must be a list of 2 times .*, got 'full'"),
        (
            "qwen2",
            {"use_sliding_window": False},
            r"layer_types = .* is not supported, only \['full_attention'",
        ),
        (
            "qwen2",
            {"use_sliding_window": 1},
            "use_sliding_window = 1 is not supported; supported: False, True",
        ),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers must be an integer of at least 0, got -1"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("qwen3", {"head_dim": None}, r"q_proj.weight must have shape \(512, 16\), got \(24, 16\)"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported"),
        (
            "mixtral",
            {"num_local_experts": 10**6},
            "num_local_experts = 1000000, but the files have only 35 tensors",
        ),
        ("mixtral", {"num_local_experts": 2}, "0 tensors missing .*6 not expected"),
        ("mixtral", {"num_experts_per_tok": 4}, r"experts_per_token must be in \[1, 3\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] is not supported"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes' is not supported; supported: False"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("olmoe", {"clip_qkv": -1}, "clip_qkv must be at least 0, got -1"),
        ("vit", {"layer_norm_eps": 0}, r"config\.json: layer_norm_eps must be above 0 and below 1, got 0"),
        ("vit", {"layer_norm_eps": 1e19}, r"config\.json: layer_norm_eps must be above 0 and below 1, got"),
        ("vit", {"layer_norm_eps": "1e-6"}, r"config\.json: layer_norm_eps must be a number, got '1e-6'"),
    ],
)
def test_settings_that_are_not_known_are_refused(tmp_path, kind, changes, message):
    save_pretrained(made(kind), tmp_path / kind)
    for name, value in changes.items():
        setting(name, value)(tmp_path / kind)
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path / kind)


def test_other_names_and_what_says_nothing_are_taken(tmp_path):
    for kind, changes in (
        ("vit", {"image_size": [8, 8]}),
        ("mixtral", {"sliding_window": None, "head_dim": None}),
        ("mistral", {"head_dim": None, "layer_types": [SLIDING, SLIDING]}),
        ("qwen2", {"layer_types": None, "attention_bias": False}),
        ("qwen2", {"max_window_layers": 2}),  # layer_types goes over it
        ("qwen3_moe", {"sliding_window": 4, "use_sliding_window": False, "num_experts": None}),
        ("qwen3_moe", {"num_local_experts": None, "mlp_only_layers": None}),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        save_pretrained(made(kind), folder)
        if kind == "qwen3_moe":
            setting("num_local_experts", 3)(folder)
        for name, value in changes.items():
            setting(name, value)(folder)
        assert load_pretrained(folder).config == made(kind).config


@pytest.mark.parametrize(
    ("kind", "changes", "window", "kinds"),
    [
        ("mistral", {"sliding_window": None}, 0, ()),
        ("mistral", {"sliding_window": ...}, 4096, ()),  # left out
        ("mixtral", {"sliding_window": 6}, 6, ()),
        ("qwen2", {"use_sliding_window": False, "layer_types": None}, 0, ()),
        ("qwen2", {"sliding_window": None, "layer_types": None}, 0, ()),
        ("qwen2", {"layer_types": None, "max_window_layers": 0}, 5, ()),
        ("qwen2", {"layer_types": None, "max_window_layers": ...}, 0, ()),  # 28, and there are 2 layers
        ("qwen2", {"sliding_window": ..., "layer_types": [SLIDING, FULL]}, 4096, (SLIDING, FULL)),
        ("qwen3", {"layer_types": [FULL, SLIDING]}, 3, (FULL, SLIDING)),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}, 7, ()),
    ],
)
def test_windows_are_read_as_transformers_reads_them_and_written_again(
    tmp_path, kind, changes, window, kinds
):
    """The values are from its configuration classes."""
    save_pretrained(made(kind), tmp_path / "source")
    for name, value in changes.items():
        (left_out if value is ... else setting)(name, value)(tmp_path / "source")
    config = load_pretrained(tmp_path / "source").config
    assert (config.sliding_window, config.layer_types) == (window, kinds)
    for origin in (True, False):
        model, folder = load_pretrained(tmp_path / "source"), tmp_path / f"again {origin}"
        if not origin:
            del model.origin
        save_pretrained(model, folder)
        assert load_pretrained(folder).config == config
        written = json.loads((folder / "config.json").read_text())["model_type"]
        plain = kind == "mistral" and not window and not origin  # such a Mistral is a Llama
        assert written == ("llama" if plain else kind)


def test_the_settings_of_transformers_4_are_read(tmp_path):
    config = LlamaConfig(**{**vars(LLAMA_SMALL), "rope_factor": 8.0, "rope_theta": 1e4})
    save_pretrained(Llama(config), tmp_path / "llama")
    path = tmp_path / "llama" / "config.json"
    table = json.loads(path.read_text())
    del table["rope_parameters"]
    path.write_text(json.dumps(table))
    assert load_pretrained(tmp_path / "llama").config == config


def test_files_that_change_before_they_are_read_are_an_error(folder):
    model = load_pretrained(folder)
    rewritten(folder, lambda tensors: tensors)
    with pytest.raises(ValueError, match="has changed since it was opened"):
        model.state_dict()


class FullDisk(tensorfiles.Disk):
    def sync(self, file):
        raise OSError(28, "No space left on device")


def test_a_failed_export_is_told_to_every_rank_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()

    def attempts():
        report = []
        for name in ("there", "full"):
            with pytest.raises(CheckpointError) as error:
                save_pretrained(sharded(made("gpt2")), tmp_path / name)
            report.append(str(error.value))
        return report

    monkeypatch.setattr(tensorfiles, "Disk", FullDisk)
    for report in thread.run(2, attempts):
        assert re.search("there was not written: rank 0: FileExistsError", report[0])
        assert re.search("full was not written: rank 0: OSError.*No space left", report[1])
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_what_has_no_format_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a Linear has no format; supported: GPT, Llama, ViT"):
        save_pretrained(nn.Linear(2, 3), tmp_path / "out")
    with pytest.raises(ValueError, match="GPT-2's format has biases"):
        save_pretrained(GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, bias=False)), tmp_path / "out")
    with pytest.raises(
        ValueError, match="none of the formats llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, olmoe can "
    ):
        save_pretrained(Llama(replace(LLAMA_SMALL, qk_norm="all")), tmp_path / "out")
    for odd in (
        replace(MIXTRAL_SMALL, expert_bias=True),
        replace(LLAMA_SMALL, **SOME),
        replace(QWEN2_SMALL, qk_norm="head"),
    ):
        with pytest.raises(ValueError, match="none of the formats"):
            save_pretrained(Llama(odd), tmp_path / "out")
    with pytest.raises(ValueError, match="has a class token, and this model has pool='mean'"):
        save_pretrained(ViT(replace(VIT_SMALL, pool="mean")), tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="config.json"):
        load_pretrained(tmp_path)


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "kind"), [(2, "gpt2"), (3, "llama")])
def test_a_rank_takes_memory_for_its_shard_and_little_more(tmp_path, ranks, kind):
    printed = lab.printed(ranks, str(Path(__file__).with_name("memory.py")), kind, str(tmp_path / "model"))
    lines = [json.loads(line) for line in printed if line.startswith("{")]
    assert len(lines) == ranks
    for line in lines:
        assert line["shard"] <= line["model"] / ranks * 1.02, line
        assert line["loading"] <= line["shard"] + 16 * 2**20 < line["shard"] + line["largest tensor"], line
        assert line["saving"] <= line["largest unit"] + 8 * 2**20 < line["model"], line
