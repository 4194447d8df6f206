"""GPT-2 in the files of Hugging Face."""

import re
from collections.abc import Iterator
from typing import Any

from ..config_file import Settings
from ..gpt import GPT, GPTConfig
from .form import Format, Stored


def _gpt2_config(settings: Settings) -> GPTConfig:
    settings.one_of("activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")
    settings.require("layer_norm_epsilon", 1e-5)
    settings.require("scale_attn_weights", True)
    settings.require("scale_attn_by_inverse_layer_idx", False)
    settings.require("add_cross_attention", False)
    settings.require("tie_word_embeddings", True)
    config = GPTConfig(
        n_layer=settings.layers("n_layer"),
        n_head=settings.size("n_head"),
        n_embd=settings.size("n_embd"),
        block_size=settings.size("n_positions"),
        vocab_size=settings.size("vocab_size"),
    )
    if settings.get("n_inner") is not None:
        settings.require("n_inner", 4 * config.n_embd)
    return config


def _gpt2_settings(config: GPTConfig) -> dict[str, Any]:
    if not config.bias:
        raise ValueError(
            "save_pretrained: GPT-2's format has biases, and this model was made with bias=False"
        )
    return {
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_positions": config.block_size,
        "vocab_size": config.vocab_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _gpt2_tensors(config: GPTConfig) -> Iterator[tuple[str, list[Stored]]]:
    yield "wte.weight", [Stored("wte.weight")]
    yield "wpe.weight", [Stored("wpe.weight")]
    for i in range(config.n_layer):
        for ours, theirs in (
            ("norm1", "ln_1"),
            ("attention.qkv", "attn.c_attn"),
            ("attention.output", "attn.c_proj"),
            ("norm2", "ln_2"),
            ("mlp.up", "mlp.c_fc"),
            ("mlp.down", "mlp.c_proj"),
        ):
            linear = "ln" not in theirs
            yield f"blocks.{i}.{ours}.weight", [Stored(f"h.{i}.{theirs}.weight", transposed=linear)]
            yield f"blocks.{i}.{ours}.bias", [Stored(f"h.{i}.{theirs}.bias")]
    yield "norm.weight", [Stored("ln_f.weight")]
    yield "norm.bias", [Stored("ln_f.bias")]


GPT2 = Format(
    kind="gpt2",
    architecture="GPT2LMHeadModel",
    model=GPT,
    prefix="transformer.",
    ignored=re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight"),  # masks; the head is tied
    read=_gpt2_config,
    describe=_gpt2_settings,
    tensors=_gpt2_tensors,
)
