"""ViT in the files of Hugging Face."""

import re
from collections.abc import Iterator
from typing import Any

from ..config_file import Settings
from ..vit import ViT, ViTConfig
from .form import Format, Stored


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


VIT = Format(
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
)
