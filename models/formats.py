"""Names and settings of models in the files of Hugging Face, in and out: one Format for each kind.

A parameter is one tensor there, or several, one after the other; models/hub.py reads and writes them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shardrt import nn

from .config_file import Settings
from .gpt import GPT, GPTConfig
from .llama import Llama, LlamaConfig
from .vit import ViT, ViTConfig


@dataclass(frozen=True)
class Stored:
    """A tensor's name in the files, without the prefix.

    rows: of the parameter, where it is several tensors one after the other; those of all its matrices, where
    it is several of these. transposed: kept the other way round, as GPT-2's linear layers are.
    """

    name: str
    rows: int | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Format:
    """How one kind of model is kept.

    read: settings -> config. describe: config -> settings. tensors: config -> (parameter, its tensors).
    ignored: matches names of tensors that hold nothing to be read. bare: tensors that never have the prefix.
    fresh: field of the config -> parameters that start as those of a new model if the field is changed.
    names: settings that a model has no opinion on: those of the files that it is from go over them.
    holds: config -> whether it is of this kind, where one class is a model of several.
    """

    kind: str
    architecture: str
    model: type[nn.Module]
    prefix: str
    ignored: re.Pattern
    read: Callable[[Settings], Any]
    describe: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any], Iterator[tuple[str, list[Stored]]]]
    bare: tuple[str, ...] = ()
    fresh: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: tuple[str, ...] = ("bos_token_id", "eos_token_id")
    holds: Callable[[Any], bool] = lambda config: True

    def full_name(self, name: str) -> str:
        """As it stands in files that are written."""
        return name if name in self.bare else self.prefix + name


LM_HEAD = "lm_head.weight"


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


def _llama_config(settings: Settings) -> LlamaConfig:
    settings.require("mlp_bias", False)
    return _decoder_config(settings)


def _mixtral_config(settings: Settings) -> LlamaConfig:
    settings.require("router_jitter_noise", 0.0)
    settings.require_no_window("sliding_window")
    experts = _experts(settings, "num_local_experts")
    return _decoder_config(settings, norm_eps=1e-5, rope_theta=1e6, **experts)


def _qwen3_moe_config(settings: Settings) -> LlamaConfig:
    settings.require("decoder_sparse_step", 1)
    settings.require("mlp_only_layers", [])
    if settings.get("use_sliding_window", False):
        settings.require_no_window("sliding_window")
    name = "num_experts" if settings.get("num_local_experts") is None else "num_local_experts"
    experts = _experts(settings, name) | {"normalise_experts": settings.flag("norm_topk_prob")}
    return _decoder_config(settings, hidden="moe_intermediate_size", qk_norm="head", **experts)


def _olmoe_config(settings: Settings) -> LlamaConfig:
    clip = settings.number("clip_qkv", 0.0)
    experts = _experts(settings, "num_experts") | {"normalise_experts": settings.flag("norm_topk_prob")}
    return _decoder_config(settings, norm_eps=1e-5, qk_norm="all", clip_qkv=clip, **experts)


def _experts(settings: Settings, number: str) -> dict[str, int]:
    """Fields of the config. number: what that of the experts is called."""
    layers = settings.layers("num_hidden_layers")
    return {
        "experts": settings.layers(number, each=layers),
        "experts_per_token": settings.size("num_experts_per_tok"),
    }


def _decoder_config(
    settings: Settings,
    *,
    hidden: str = "intermediate_size",
    norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    **own: Any,
) -> LlamaConfig:
    """Of a Llama or one of its kin: what all of them say, and its `own` fields.

    hidden: what the width of an MLP is called. norm_eps, rope_theta: where nothing is said of them.
    """
    settings.require("hidden_act", "silu")
    settings.require("attention_bias", False)
    heads, width = settings.size("num_attention_heads"), settings.size("hidden_size")
    head_size = settings.size("head_dim") if settings.get("head_dim") is not None else 0
    config = LlamaConfig(
        n_layer=settings.layers("num_hidden_layers"),
        n_head=heads,
        n_kv_head=settings.size("num_key_value_heads", heads),
        n_embd=width,
        head_size=0 if head_size * heads == width else head_size,
        n_hidden=settings.size(hidden),
        block_size=settings.size("max_position_embeddings"),
        vocab_size=settings.size("vocab_size"),
        tied=settings.flag("tie_word_embeddings"),
        norm_eps=settings.epsilon("rms_norm_eps", norm_eps),
        **own,
    )
    rope = settings.table("rope_parameters") or settings.table("rope_scaling")
    theta = rope.number("rope_theta", settings.number("rope_theta", rope_theta))
    rope.require("partial_rotary_factor", 1.0)
    kind = rope.one_of("rope_type", "default", "llama3", default=rope.get("type", "default"))
    if kind == "default":
        return replace(config, rope_theta=theta)
    return replace(
        config,
        rope_theta=theta,
        rope_factor=rope.number("factor"),
        rope_low_freq_factor=rope.number("low_freq_factor"),
        rope_high_freq_factor=rope.number("high_freq_factor"),
        rope_original_size=rope.size("original_max_position_embeddings"),
    )


def _llama_settings(config: LlamaConfig) -> dict[str, Any]:
    return _decoder_settings(config) | {"mlp_bias": False, "intermediate_size": config.n_hidden}


def _mixtral_settings(config: LlamaConfig) -> dict[str, Any]:
    return _decoder_settings(config) | {
        "head_dim": config.head_size or None,
        "intermediate_size": config.n_hidden,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def _qwen3_moe_settings(config: LlamaConfig) -> dict[str, Any]:
    return _decoder_settings(config) | {
        "moe_intermediate_size": config.n_hidden,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalise_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _olmoe_settings(config: LlamaConfig) -> dict[str, Any]:
    return _decoder_settings(config) | {
        "intermediate_size": config.n_hidden,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalise_experts,
        "clip_qkv": config.clip_qkv or None,
        "pad_token_id": None,
    }


def _decoder_settings(config: LlamaConfig) -> dict[str, Any]:
    """What a Llama and its kin say alike."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor != 1:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_factor,
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_size,
        }
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "head_dim": config.head_dim,
        "hidden_size": config.n_embd,
        "max_position_embeddings": config.block_size,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        # The same twice: transformers 5 reads the first, 4 the others.
        "rope_parameters": rope,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_factor == 1 else scaling,
    }


# Of a block's experts, in the files: the router, and an expert's three matrices.
_EXPERTS = {
    "router": "mlp.gate.weight",
    "gate": "mlp.experts.{}.gate_proj.weight",
    "up": "mlp.experts.{}.up_proj.weight",
    "down": "mlp.experts.{}.down_proj.weight",
}
_MIXTRAL_EXPERTS = {
    "router": "block_sparse_moe.gate.weight",
    "gate": "block_sparse_moe.experts.{}.w1.weight",
    "up": "block_sparse_moe.experts.{}.w3.weight",
    "down": "block_sparse_moe.experts.{}.w2.weight",
}


def _llama_tensors(
    config: LlamaConfig, experts: Mapping[str, str] = _EXPERTS
) -> Iterator[tuple[str, list[Stored]]]:
    yield "embedding.weight", [Stored("embed_tokens.weight")]
    width = config.head_dim
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"layers.{i}"
        yield f"{ours}.norm1.weight", [Stored(f"{theirs}.input_layernorm.weight")]
        yield (
            f"{ours}.attention.qkv.weight",
            [
                Stored(f"{theirs}.self_attn.q_proj.weight", config.n_head * width),
                Stored(f"{theirs}.self_attn.k_proj.weight", config.n_kv_head * width),
                Stored(f"{theirs}.self_attn.v_proj.weight", config.n_kv_head * width),
            ],
        )
        if config.qk_norm != "none":
            yield f"{ours}.attention.q_norm.weight", [Stored(f"{theirs}.self_attn.q_norm.weight")]
            yield f"{ours}.attention.k_norm.weight", [Stored(f"{theirs}.self_attn.k_norm.weight")]
        yield f"{ours}.attention.output.weight", [Stored(f"{theirs}.self_attn.o_proj.weight")]
        yield f"{ours}.norm2.weight", [Stored(f"{theirs}.post_attention_layernorm.weight")]
        inside = _expert_tensors(config, experts) if config.experts else _mlp_tensors(config)
        for name, parts in inside:
            yield f"{ours}.{name}", [replace(part, name=f"{theirs}.{part.name}") for part in parts]
    yield "norm.weight", [Stored("norm.weight")]
    if not config.tied:
        yield "head.weight", [Stored(LM_HEAD)]


def _mlp_tensors(config: LlamaConfig) -> Iterator[tuple[str, list[Stored]]]:
    """Those of a block's MLP, by their names in the block."""
    halves = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    yield "mlp.gate_up.weight", [Stored(half, config.n_hidden) for half in halves]
    yield "mlp.down.weight", [Stored("mlp.down_proj.weight")]


def _expert_tensors(config: LlamaConfig, names: Mapping[str, str]) -> Iterator[tuple[str, list[Stored]]]:
    """Those of a block's experts: one behind the other here, each in tensors of its own in the files."""
    numbers = range(config.experts)
    yield "mlp.router.weight", [Stored(names["router"])]
    halves = [names[half].format(e) for e in numbers for half in ("gate", "up")]
    yield "mlp.experts.up", [Stored(half, config.n_hidden) for half in halves]
    yield "mlp.experts.down", [Stored(names["down"].format(e), config.n_embd) for e in numbers]


def _vit_config(settings: Settings) -> ViTConfig:
    settings.require("hidden_act", "gelu")
    settings.require("qkv_bias", True)
    labels = settings.table("id2label")
    return ViTConfig(
        n_layer=settings.layers("num_hidden_layers"),
        n_head=settings.size("num_attention_heads"),
        n_embd=settings.size("hidden_size"),
        n_hidden=settings.size("intermediate_size"),
        image_size=settings.side("image_size", 224),
        patch_size=settings.side("patch_size", 16),
        channels=settings.size("num_channels", 3),
        classes=len(labels) or settings.size("num_labels", 2),  # transformers leaves two out
        eps=settings.epsilon("layer_norm_eps", 1e-12),
    )


def _vit_settings(config: ViTConfig) -> dict[str, Any]:
    if config.pool != "class":
        raise ValueError(
            f"save_pretrained: ViT's format has a class token, and this model has pool={config.pool!r}"
        )
    names = {i: f"LABEL_{i}" for i in range(config.classes)}
    return {
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "hidden_size": config.n_embd,
        "intermediate_size": config.n_hidden,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "id2label": {str(i): name for i, name in names.items()},
        "label2id": {name: i for i, name in names.items()},
        "hidden_act": "gelu",
        "qkv_bias": True,
        "layer_norm_eps": config.eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "dtype": "float32",
    }


def _vit_tensors(config: ViTConfig) -> Iterator[tuple[str, list[Stored]]]:
    yield "token", [Stored("embeddings.cls_token")]
    yield "positions", [Stored("embeddings.position_embeddings")]
    layers = [("patches", "embeddings.patch_embeddings.projection"), ("norm", "layernorm")]
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"encoder.layer.{i}"
        layers += [
            (f"{ours}.norm1", f"{theirs}.layernorm_before"),
            (f"{ours}.attention.output", f"{theirs}.attention.output.dense"),
            (f"{ours}.norm2", f"{theirs}.layernorm_after"),
            (f"{ours}.mlp.up", f"{theirs}.intermediate.dense"),
            (f"{ours}.mlp.down", f"{theirs}.output.dense"),
        ]
    for kind in ("weight", "bias"):
        for ours, theirs in layers:
            yield f"{ours}.{kind}", [Stored(f"{theirs}.{kind}")]
        for i in range(config.n_layer):
            inside = f"encoder.layer.{i}.attention.attention"
            parts = [Stored(f"{inside}.{part}.{kind}", config.n_embd) for part in ("query", "key", "value")]
            yield f"blocks.{i}.attention.qkv.{kind}", parts
        yield f"head.{kind}", [Stored(f"classifier.{kind}")]


# Of Llama and its kin: angles, and the head where it is the embedding.
_OF_NO_USE = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight")

FORMATS = {
    form.kind: form
    for form in (
        Format(
            kind="gpt2",
            architecture="GPT2LMHeadModel",
            model=GPT,
            prefix="transformer.",
            ignored=re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight"),  # masks; the head is tied
            read=_gpt2_config,
            describe=_gpt2_settings,
            tensors=_gpt2_tensors,
        ),
        Format(
            kind="llama",
            architecture="LlamaForCausalLM",
            model=Llama,
            prefix="model.",
            ignored=_OF_NO_USE,
            read=_llama_config,
            describe=_llama_settings,
            tensors=_llama_tensors,
            bare=(LM_HEAD,),
            holds=lambda c: not c.experts and c.qk_norm == "none" and not c.clip_qkv,
        ),
        Format(
            kind="mixtral",
            architecture="MixtralForCausalLM",
            model=Llama,
            prefix="model.",
            ignored=_OF_NO_USE,
            read=_mixtral_config,
            describe=_mixtral_settings,
            tensors=partial(_llama_tensors, experts=_MIXTRAL_EXPERTS),
            bare=(LM_HEAD,),
            holds=lambda c: (
                c.experts > 0
                and not c.expert_bias
                and c.normalise_experts
                and c.qk_norm == "none"
                and not c.clip_qkv
            ),
        ),
        Format(
            kind="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            model=Llama,
            prefix="model.",
            ignored=_OF_NO_USE,
            read=_qwen3_moe_config,
            describe=_qwen3_moe_settings,
            tensors=_llama_tensors,
            bare=(LM_HEAD,),
            holds=lambda c: c.experts > 0 and not c.expert_bias and c.qk_norm == "head" and not c.clip_qkv,
        ),
        Format(
            kind="olmoe",
            architecture="OlmoeForCausalLM",
            model=Llama,
            prefix="model.",
            ignored=_OF_NO_USE,
            read=_olmoe_config,
            describe=_olmoe_settings,
            tensors=_llama_tensors,
            bare=(LM_HEAD,),
            names=("bos_token_id", "eos_token_id", "pad_token_id"),
            holds=lambda c: (
                c.experts > 0
                and not c.expert_bias
                and c.qk_norm == "all"
                and c.n_head * c.head_dim == c.n_embd
            ),
        ),
        Format(
            kind="vit",
            architecture="ViTForImageClassification",
            model=ViT,
            prefix="vit.",
            ignored=re.compile(r"pooler\.dense\.(weight|bias)|embeddings\.mask_token"),  # of other heads
            read=_vit_config,
            describe=_vit_settings,
            tensors=_vit_tensors,
            bare=("classifier.weight", "classifier.bias"),
            fresh={"classes": ("head.weight", "head.bias")},
            names=("id2label", "label2id"),
        ),
    )
}
