"""Layers: modules with named parameters. Import as `from shardrt import nn`."""

from typing import Any

from shardrt.nn import elsewhere, init, utils
from shardrt.nn.activations import (
    ELU,
    GELU,
    CrossEntropyLoss,
    Flatten,
    Identity,
    LeakyReLU,
    LogSoftmax,
    MSELoss,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from shardrt.nn.containers import ModuleDict, ModuleList, ParameterDict, ParameterList, Sequential
from shardrt.nn.layers import Dropout, Embedding, LayerNorm, Linear, RMSNorm
from shardrt.nn.lora import add_lora, lora_parameters, merge_lora
from shardrt.nn.moe import (
    Experts,
    MoE,
    Router,
    Routing,
    Top2Gate,
    TopKRouter,
    balance_over,
    balance_targets,
    expert_load,
    update_expert_bias,
)
from shardrt.nn.pieces import Piece
from shardrt.nn.public import Module, Parameter
from shardrt.nn.vision import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    ConvTranspose2d,
    GroupNorm,
    MaxPool2d,
    synchronise_batch_norm,
)

__all__ = [
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm2d",
    "Conv1d",
    "Conv2d",
    "ConvTranspose2d",
    "CrossEntropyLoss",
    "Dropout",
    "ELU",
    "Embedding",
    "Experts",
    "Flatten",
    "GELU",
    "GroupNorm",
    "Identity",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MSELoss",
    "MaxPool2d",
    "MoE",
    "Module",
    "ModuleDict",
    "ModuleList",
    "Parameter",
    "ParameterDict",
    "ParameterList",
    "Piece",
    "RMSNorm",
    "ReLU",
    "Router",
    "Routing",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "Top2Gate",
    "TopKRouter",
    "add_lora",
    "balance_over",
    "balance_targets",
    "expert_load",
    "init",
    "lora_parameters",
    "merge_lora",
    "synchronise_batch_norm",
    "update_expert_bias",
    "utils",
]


def __getattr__(name: str) -> Any:
    raise elsewhere.missing_from(__name__, name, elsewhere.LAYER)
