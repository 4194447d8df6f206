"""Llama's kin with experts in each block, in the files of Hugging Face.

| kind | norms of q, k | weights of a token's experts | windows |
|---|---|---|---|
| mixtral | none | add up to 1 | one for all layers, or none |
| qwen3_moe | of each head | add up to 1, or not | as mixtral, with a switch |
| olmoe | of all heads at once | add up to 1, or not | none |
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ..config_file import Settings
from ..llama import LlamaConfig
from .decoder import decoder_config, decoder_format, decoder_settings, decoder_tensors, kin, window_of_all
from .form import Stored


def _mixtral_config(settings: Settings) -> LlamaConfig:
    settings.require("router_jitter_noise", 0.0)
    experts = _experts(settings, "num_local_experts")
    return decoder_config(settings, norm_eps=1e-5, rope_theta=1e6, **experts, **window_of_all(settings))


def _qwen3_moe_config(settings: Settings) -> LlamaConfig:
    settings.require("decoder_sparse_step", 1)
    settings.require("mlp_only_layers", [])
    window = window_of_all(settings, 4096) if settings.flag("use_sliding_window") else {}
    name = "num_experts" if settings.get("num_local_experts") is None else "num_local_experts"
    experts = _experts(settings, name) | {"normalise_experts": settings.flag("norm_topk_prob")}
    return decoder_config(settings, hidden="moe_intermediate_size", qk_norm="head", **experts, **window)


def _olmoe_config(settings: Settings) -> LlamaConfig:
    clip = settings.number("clip_qkv", 0.0)
    experts = _experts(settings, "num_experts") | {"normalise_experts": settings.flag("norm_topk_prob")}
    return decoder_config(settings, norm_eps=1e-5, qk_norm="all", clip_qkv=clip, **experts)


def _experts(settings: Settings, number: str) -> dict[str, int]:
    """Fields of the config. number: what that of the experts is called."""
    settings.require("attention_bias", False)
    layers = settings.layers("num_hidden_layers")
    return {
        "experts": settings.layers(number, each=layers),
        "experts_per_token": settings.size("num_experts_per_tok"),
    }


def _shared_settings(config: LlamaConfig) -> dict[str, Any]:
    return decoder_settings(config) | {
        "attention_bias": False,
        "num_experts_per_tok": config.experts_per_token,
    }


def _mixtral_settings(config: LlamaConfig) -> dict[str, Any]:
    return _shared_settings(config) | {
        "head_dim": config.head_size or None,
        "intermediate_size": config.n_hidden,
        "num_local_experts": config.experts,
        "router_jitter_noise": 0.0,
        "sliding_window": config.window_of(0),
    }


def _qwen3_moe_settings(config: LlamaConfig) -> dict[str, Any]:
    return _shared_settings(config) | {
        "moe_intermediate_size": config.n_hidden,
        "num_experts": config.experts,
        "norm_topk_prob": config.normalise_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": config.window_of(0) is not None,
        "sliding_window": config.window_of(0),
    }


def _olmoe_settings(config: LlamaConfig) -> dict[str, Any]:
    return _shared_settings(config) | {
        "intermediate_size": config.n_hidden,
        "num_experts": config.experts,
        "norm_topk_prob": config.normalise_experts,
        "clip_qkv": config.clip_qkv or None,
        "pad_token_id": None,
    }


# Of a block's experts, in the files: the router, and an expert's three matrices.
_NAMES = {
    "router": "mlp.gate.weight",
    "gate": "mlp.experts.{}.gate_proj.weight",
    "up": "mlp.experts.{}.up_proj.weight",
    "down": "mlp.experts.{}.down_proj.weight",
}
_MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate.weight",
    "gate": "block_sparse_moe.experts.{}.w1.weight",
    "up": "block_sparse_moe.experts.{}.w3.weight",
    "down": "block_sparse_moe.experts.{}.w2.weight",
}


def _expert_tensors(
    config: LlamaConfig, names: Mapping[str, str] = _NAMES
) -> Iterator[tuple[str, list[Stored]]]:
    """One behind the other here, each in tensors of its own in the files."""
    numbers = range(config.experts)
    yield "mlp.router.weight", [Stored(names["router"])]
    halves = [names[half].format(e) for e in numbers for half in ("gate", "up")]
    yield "mlp.experts.up", [Stored(half, config.n_hidden) for half in halves]
    yield "mlp.experts.down", [Stored(names["down"].format(e), config.n_embd) for e in numbers]


_of_mixtral = kin(experts=True, windows="all")
_of_qwen3_moe = kin(experts=True, qk_norm="head", windows="all")
_of_olmoe = kin(experts=True, qk_norm="all", clips=True)

MIXTRAL = decoder_format(
    kind="mixtral",
    architecture="MixtralForCausalLM",
    read=_mixtral_config,
    describe=_mixtral_settings,
    tensors=partial(decoder_tensors, inside=partial(_expert_tensors, names=_MIXTRAL_NAMES)),
    holds=lambda config: _of_mixtral(config) and config.normalise_experts,
)
QWEN3_MOE = decoder_format(
    kind="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_qwen3_moe_config,
    describe=_qwen3_moe_settings,
    tensors=partial(decoder_tensors, inside=_expert_tensors),
    holds=_of_qwen3_moe,
)
OLMOE = decoder_format(
    kind="olmoe",
    architecture="OlmoeForCausalLM",
    read=_olmoe_config,
    describe=_olmoe_settings,
    tensors=partial(decoder_tensors, inside=_expert_tensors),
    names=("bos_token_id", "eos_token_id", "pad_token_id"),
    holds=lambda config: _of_olmoe(config) and config.n_head * config.head_dim == config.n_embd,
)
