"""Llama and its kin with one MLP in a block, in the files of Hugging Face.

| kind | biases of q, k, v | norms of q, k | windows |
|---|---|---|---|
| llama | none | none | none |
| mistral | none | none | one for all layers, or none |
| qwen2 (Qwen2.5) | all | none | off; else of the last layers, or by layer |
| qwen3 | none | of each head | as qwen2 |
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from ..config_file import Settings
from ..llama import FULL, SLIDING, LlamaConfig
from .decoder import (
    decoder_config,
    decoder_format,
    decoder_settings,
    decoder_tensors,
    kin,
    settings_of_each,
    window_of_all,
    window_of_each,
)
from .form import Stored


def _llama_config(settings: Settings) -> LlamaConfig:
    settings.require("mlp_bias", False)
    settings.require("attention_bias", False)
    return decoder_config(settings)


def _mistral_config(settings: Settings) -> LlamaConfig:
    settings.require("attention_bias", False)
    window = window_of_all(settings, unsaid=4096)
    kind = SLIDING if window["sliding_window"] else FULL
    settings.require("layer_types", [kind] * settings.layers("num_hidden_layers"))
    return decoder_config(settings, **window)


def _qwen2_config(settings: Settings) -> LlamaConfig:
    settings.require("use_mrope", False)
    return decoder_config(settings, qkv_bias=True, **window_of_each(settings))


def _qwen3_config(settings: Settings) -> LlamaConfig:
    settings.require("attention_bias", False)
    return decoder_config(settings, qk_norm="head", head_dim=128, **window_of_each(settings))


def _dense_settings(config: LlamaConfig) -> dict[str, Any]:
    return decoder_settings(config) | {"intermediate_size": config.n_hidden}


def _llama_settings(config: LlamaConfig) -> dict[str, Any]:
    return _dense_settings(config) | {"mlp_bias": False, "attention_bias": False}


def _mistral_settings(config: LlamaConfig) -> dict[str, Any]:
    return _dense_settings(config) | {"sliding_window": config.window_of(0)}


def _qwen2_settings(config: LlamaConfig) -> dict[str, Any]:
    return _dense_settings(config) | settings_of_each(config)


def _qwen3_settings(config: LlamaConfig) -> dict[str, Any]:
    return _dense_settings(config) | {"attention_bias": False} | settings_of_each(config)


def _mlp_tensors(config: LlamaConfig) -> Iterator[tuple[str, list[Stored]]]:
    halves = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    yield "mlp.gate_up.weight", [Stored(half, config.n_hidden) for half in halves]
    yield "mlp.down.weight", [Stored("mlp.down_proj.weight")]


_dense = partial(decoder_format, tensors=partial(decoder_tensors, inside=_mlp_tensors))

LLAMA = _dense(
    kind="llama",
    architecture="LlamaForCausalLM",
    read=_llama_config,
    describe=_llama_settings,
    holds=kin(),
)
MISTRAL = _dense(
    kind="mistral",
    architecture="MistralForCausalLM",
    read=_mistral_config,
    describe=_mistral_settings,
    holds=kin(windows="all"),
)
QWEN2 = _dense(
    kind="qwen2",
    architecture="Qwen2ForCausalLM",
    read=_qwen2_config,
    describe=_qwen2_settings,
    holds=kin(qkv_bias=True, windows="each"),
)
QWEN3 = _dense(
    kind="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_qwen3_config,
    describe=_qwen3_settings,
    holds=kin(qk_norm="head", windows="each"),
)
