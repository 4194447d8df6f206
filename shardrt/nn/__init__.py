"""Layers: modules with named parameters. Import as `from shardrt import nn`."""

from shardrt.nn import init, utils
from shardrt.nn.layers import GELU, Dropout, Embedding, LayerNorm, Linear, RMSNorm
from shardrt.nn.module import Module, ModuleList, Sequential
from shardrt.nn.parameter import Parameter

__all__ = [
    "GELU",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "ModuleList",
    "Parameter",
    "RMSNorm",
    "Sequential",
    "init",
    "utils",
]
