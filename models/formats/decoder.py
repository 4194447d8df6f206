"""What Llama and its kin say alike in the files of Hugging Face: settings, windows, names of tensors."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ..config_file import Settings
from ..llama import FULL, SLIDING, Llama, LlamaConfig
from .form import Format, Stored

LM_HEAD = "lm_head.weight"
# Angles, and the head where it is the embedding.
_OF_NO_USE = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight")

decoder_format = partial(Format, model=Llama, prefix="model.", ignored=_OF_NO_USE, bare=(LM_HEAD,))


def decoder_config(
    settings: Settings,
    *,
    hidden: str = "intermediate_size",
    norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    head_dim: int = 0,
    **own: Any,
) -> LlamaConfig:
    """Of a Llama or one of its kin: what all of them say, and its `own` fields.

    hidden: what the width of an MLP is called. norm_eps, rope_theta, head_dim: where nothing is said of them;
    0: the width over the heads.
    """
    settings.require("hidden_act", "silu")
    settings.require("attention_dropout", 0.0)
    heads, width = settings.size("num_attention_heads"), settings.size("hidden_size")
    given = head_dim or settings.get("head_dim") is not None
    head_size = settings.size("head_dim", head_dim) if given else 0
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


def decoder_settings(config: LlamaConfig) -> dict[str, Any]:
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


def window_of_all(settings: Settings, unsaid: int | None = None) -> dict[str, Any]:
    """The field of the config, where all layers have the same window. unsaid: where nothing is said of it."""
    return {"sliding_window": settings.window("sliding_window", unsaid)}


def window_of_each(settings: Settings) -> dict[str, Any]:
    """Fields of the config, where a switch turns windows on, and then some of the layers have one.

    Those from max_window_layers on, which is what the Qwen team's code does, or as layer_types says.
    """
    count = settings.layers("num_hidden_layers")
    window = settings.window("sliding_window", 4096) if settings.flag("use_sliding_window") else 0
    whole = settings.size("max_window_layers", 28, least=0) if window else count
    kinds = settings.choices("layer_types", count, FULL, SLIDING) or tuple(
        SLIDING if i >= whole else FULL for i in range(count)
    )
    if not window:
        settings.require("layer_types", [FULL] * count)
    if len(set(kinds)) > 1:
        return {"sliding_window": window, "layer_types": kinds}
    return {"sliding_window": window if SLIDING in kinds else 0}


def settings_of_each(config: LlamaConfig) -> dict[str, Any]:
    """What window_of_each reads; the numbers of windows that are off stay as the model's files say."""
    kinds = config.attention_kinds()
    found: dict[str, Any] = {"use_sliding_window": SLIDING in kinds, "layer_types": list(kinds)}
    if SLIDING in kinds:
        found["sliding_window"] = config.sliding_window
        whole = kinds.index(SLIDING)
        if FULL not in kinds[whole:]:  # transformers before 4.53 knows nothing else
            found["max_window_layers"] = whole
    return found


def kin(
    *,
    experts: bool = False,
    qk_norm: str = "none",
    qkv_bias: bool = False,
    clips: bool = False,
    windows: str = "none",
) -> Callable[[LlamaConfig], bool]:
    """Whether a config is of a kind with these properties.

    clips: clip_qkv may be set. windows: of no layers ("none"), of all or none ("all"), or of some ("each").
    """

    def holds(config: LlamaConfig) -> bool:
        kinds = set(config.attention_kinds())
        return (
            (config.experts > 0) == experts
            and not config.expert_bias
            and config.qk_norm == qk_norm
            and config.qkv_bias == qkv_bias
            and (clips or not config.clip_qkv)
            and (windows == "each" or kinds == {FULL} or (windows == "all" and kinds == {SLIDING}))
        )

    return holds


def decoder_tensors(
    config: LlamaConfig, inside: Callable[[LlamaConfig], Iterator[tuple[str, list[Stored]]]]
) -> Iterator[tuple[str, list[Stored]]]:
    """All parameters, in order. inside: those of a block's MLP or experts, by their names in the block."""
    yield "embedding.weight", [Stored("embed_tokens.weight")]
    queries, keys = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"layers.{i}"
        yield f"{ours}.norm1.weight", [Stored(f"{theirs}.input_layernorm.weight")]
        for part in ("weight", "bias") if config.qkv_bias else ("weight",):
            yield (
                f"{ours}.attention.qkv.{part}",
                [
                    Stored(f"{theirs}.self_attn.q_proj.{part}", queries),
                    Stored(f"{theirs}.self_attn.k_proj.{part}", keys),
                    Stored(f"{theirs}.self_attn.v_proj.{part}", keys),
                ],
            )
        if config.qk_norm != "none":
            yield f"{ours}.attention.q_norm.weight", [Stored(f"{theirs}.self_attn.q_norm.weight")]
            yield f"{ours}.attention.k_norm.weight", [Stored(f"{theirs}.self_attn.k_norm.weight")]
        yield f"{ours}.attention.output.weight", [Stored(f"{theirs}.self_attn.o_proj.weight")]
        yield f"{ours}.norm2.weight", [Stored(f"{theirs}.post_attention_layernorm.weight")]
        for name, parts in inside(config):
            yield f"{ours}.{name}", [replace(part, name=f"{theirs}.{part.name}") for part in parts]
    yield "norm.weight", [Stored("norm.weight")]
    if not config.tied:
        yield "head.weight", [Stored(LM_HEAD)]
