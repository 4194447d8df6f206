"""Models as people publish them: config.json, and the tensors that lie next to it, without their values.

The tables are those of the folders Qwen2.5-0.5B, Qwen2.5-7B, Qwen3-0.6B and Qwen3-8B of the Qwen team and of
Mistral-7B-v0.1 and v0.3 of Mistral AI. test_published.py compares the tensors with those of transformers.
"""

import json

import numpy as np

_QWEN = {
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
_QWEN2 = _QWEN | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "transformers_version": "4.40.1",
    "use_mrope": False,
}
_QWEN3 = _QWEN | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "transformers_version": "4.51.0",
    "vocab_size": 151936,
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
CONFIGS = {
    "qwen2.5-0.5b": _QWEN2
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "qwen2.5-7b": _QWEN2
    | {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    "mistral-7b": _MISTRAL
    | {
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "transformers_version": "4.34.0.dev0",
        "vocab_size": 32000,
    },
    "mistral-7b-v0.3": _MISTRAL
    | {
        "attention_dropout": 0.0,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "transformers_version": "4.42.0.dev0",
        "vocab_size": 32768,
    },
}


def tensors_of(config):
    """Name -> shape of each tensor in the files."""
    width, inner, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    head = config.get("head_dim", width // config["num_attention_heads"])
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    found = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        found |= {f"{block}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
        found |= {f"{block}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        found[f"{block}.mlp.down_proj.weight"] = width, inner
        for name, rows in ("q", queries), ("k", keys), ("v", keys):
            found[f"{block}.self_attn.{name}_proj.weight"] = rows, width
            if kind == "qwen2":
                found[f"{block}.self_attn.{name}_proj.bias"] = (rows,)
            if kind == "qwen3" and name != "v":
                found[f"{block}.self_attn.{name}_norm.weight"] = (head,)
        found[f"{block}.self_attn.o_proj.weight"] = width, queries
    found["model.norm.weight"] = (width,)
    return (
        found
        if config["tie_word_embeddings"]
        else found | {"lm_head.weight": found["model.embed_tokens.weight"]}
    )


def write(folder, config, *, files=3, values=None):
    """The folder: config.json, files of bfloat16 and their index. Without values they are all 0, sparse.

    values: gives as many uint16 as its argument says.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes, places = tensors_of(config), {}
    for number, names in enumerate(np.array_split(list(shapes), files), 1):
        file, header, end = f"model-{number:05}-of-{files:05}.safetensors", {}, 0
        for name in names.tolist():
            begin, end = end, end + 2 * int(np.prod(shapes[name], dtype=np.int64))
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
            places[name] = file
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            if values:
                out.write(values(end // 2).tobytes())
            else:
                out.truncate(8 + len(text) + end)
    index = {"metadata": {"total_size": 0}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
