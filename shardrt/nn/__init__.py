"""Layers: modules with named parameters. Import as `from shardrt import nn`."""

from shardrt.nn import init, utils
from shardrt.nn.layers import GELU, Dropout, Embedding, LayerNorm, Linear, RMSNorm
from shardrt.nn.lora import add_lora, lora_parameters, merge_lora
from shardrt.nn.module import Module, ModuleList, Sequential
from shardrt.nn.parameter import Parameter
from shardrt.nn.vision import BatchNorm2d, Conv2d, synchronise_batch_norm

__all__ = [
    "GELU",
    "BatchNorm2d",
    "Conv2d",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "ModuleList",
    "Parameter",
    "RMSNorm",
    "Sequential",
    "add_lora",
    "init",
    "lora_parameters",
    "merge_lora",
    "synchronise_batch_norm",
    "utils",
]
