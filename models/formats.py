"""Names and settings of models in the files of Hugging Face, in and out: one Format for each kind.

A parameter is one tensor there, or several, one after the other; models/hub.py reads and writes them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardrt import nn

from .gpt import GPT, GPTConfig
from .llama import Llama, LlamaConfig
from .vit import ViT, ViTConfig


@dataclass(frozen=True)
class Stored:
    """A tensor's name in the files, without the prefix.

    rows: of the parameter, where it is several tensors one after the other. transposed: kept the other way
    round, as GPT-2's linear layers are.
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
    """

    kind: str
    architecture: str
    model: type[nn.Module]
    prefix: str
    ignored: re.Pattern
    read: Callable[["Settings"], Any]
    describe: Callable[[Any], dict[str, Any]]
    tensors: Callable[[Any], Iterator[tuple[str, list[Stored]]]]
    bare: tuple[str, ...] = ()
    fresh: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    names: tuple[str, ...] = ("bos_token_id", "eos_token_id")

    def full_name(self, name: str) -> str:
        """As it stands in files that are written."""
        return name if name in self.bare else self.prefix + name


LM_HEAD = "lm_head.weight"


def _gpt2_config(settings: "Settings") -> GPTConfig:
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


def _llama_config(settings: "Settings") -> LlamaConfig:
    settings.require("hidden_act", "silu")
    settings.require("attention_bias", False)
    settings.require("mlp_bias", False)
    heads = settings.size("num_attention_heads")
    config = LlamaConfig(
        n_layer=settings.layers("num_hidden_layers"),
        n_head=heads,
        n_kv_head=settings.size("num_key_value_heads", heads),
        n_embd=settings.size("hidden_size"),
        n_hidden=settings.size("intermediate_size"),
        block_size=settings.size("max_position_embeddings"),
        vocab_size=settings.size("vocab_size"),
        tied=settings.one_of("tie_word_embeddings", False, True, default=False),
        norm_eps=settings.number("rms_norm_eps", 1e-6),
    )
    if settings.get("head_dim") is not None:
        settings.require("head_dim", config.head_dim)
    rope = settings.table("rope_parameters") or settings.table("rope_scaling")
    theta = rope.number("rope_theta", settings.number("rope_theta", 10000.0))
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
        "intermediate_size": config.n_hidden,
        "max_position_embeddings": config.block_size,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
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


def _llama_tensors(config: LlamaConfig) -> Iterator[tuple[str, list[Stored]]]:
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
        yield f"{ours}.attention.output.weight", [Stored(f"{theirs}.self_attn.o_proj.weight")]
        yield f"{ours}.norm2.weight", [Stored(f"{theirs}.post_attention_layernorm.weight")]
        yield (
            f"{ours}.mlp.gate_up.weight",
            [
                Stored(f"{theirs}.mlp.gate_proj.weight", config.n_hidden),
                Stored(f"{theirs}.mlp.up_proj.weight", config.n_hidden),
            ],
        )
        yield f"{ours}.mlp.down.weight", [Stored(f"{theirs}.mlp.down_proj.weight")]
    yield "norm.weight", [Stored("norm.weight")]
    if not config.tied:
        yield "head.weight", [Stored(LM_HEAD)]


def _vit_config(settings: "Settings") -> ViTConfig:
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
        eps=settings.number("layer_norm_eps", 1e-12),
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
            ignored=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight"),
            read=_llama_config,
            describe=_llama_settings,
            tensors=_llama_tensors,
            bare=(LM_HEAD,),
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


class Settings:
    """A table of config.json, read with suspicion: errors name the file and the setting."""

    def __init__(self, path: Path, table: dict[str, Any]) -> None:
        self._path, self._table = path, table
        self.layers_at_most = 0

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it stands; `default` where it is absent or null."""
        value = self._table.get(name)
        return default if value is None else value

    def kept(self) -> dict[str, Any]:
        """All of the table, as it stands."""
        return dict(self._table)

    def one_of(self, name: str, *choices: Any, default: Any = None) -> Any:
        """A value that is one of `choices`."""
        value = self.get(name, default)
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            wanted = ", ".join(map(repr, choices))
            raise ValueError(f"{self._path}: {name} = {value!r} is not supported; supported: {wanted}")
        return value

    def require(self, name: str, wanted: Any) -> None:
        """What is there must be `wanted`."""
        value = self.get(name, wanted)
        if value != wanted:
            raise ValueError(f"{self._path}: {name} = {value!r} is not supported, only {wanted!r} is")

    def size(self, name: str, default: int | None = None) -> int:
        """An integer of at least 1."""
        value = self.get(name, default)
        if type(value) is not int or not 1 <= value < 2**31:
            raise ValueError(f"{self._path}: {name} must be an integer of at least 1, got {value!r}")
        return value

    def side(self, name: str, default: int) -> int:
        """Of a square: an integer of at least 1, or two that are the same."""
        value = self.get(name, default)
        sides = value if isinstance(value, list) else [value]
        if len(sides) not in (1, 2) or sides[0] != sides[-1]:
            raise ValueError(f"{self._path}: {name} = {value!r} is not supported, only squares are")
        return Settings(self._path, {name: sides[0]}).size(name)

    def layers(self, name: str) -> int:
        """A number of layers for which there can be tensors: nothing is made for more."""
        value = self.size(name)
        if value > self.layers_at_most:
            raise ValueError(f"{self._path}: {name} = {value}, but there are {self.layers_at_most} tensors")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(name, default)
        if type(value) not in (int, float) or not abs(value) < 1e300:  # integers have no largest one
            raise ValueError(f"{self._path}: {name} must be a number, got {value!r}")
        return float(value)

    def table(self, name: str) -> "Settings":
        """A table inside; an empty one where there is none."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ValueError(f"{self._path}: {name} must be an object, got {value!r}")
        return Settings(self._path, value)

    def __len__(self) -> int:
        return len(self._table)
