"""LoRA: frozen linear layers, each with a small trainable matmul next to it (Hu et al., LoRA, 2021).

y = x W^T + b + (alpha / rank) x A^T B^T, A (rank, inputs) random, B (outputs, rank) zero at the start, so the
model begins as it was. The layers stay the same objects and W and b keep their names.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from math import sqrt

import numpy as np

from shardrt import device
from shardrt import functional as F
from shardrt.nn.init import Uniform, Zeros
from shardrt.nn.layers import Linear
from shardrt.nn.public import Module, Parameter
from shardrt.nn.storage import LocalStorage
from shardrt.tensor import Tensor

__all__ = ["adapted_layers", "add_lora", "columns_of_parts", "is_adapted"]

Parts = tuple[tuple[int, int], ...]  # ranges of a layer's output rows
Targets = tuple[str, ...] | Callable[[str, Linear], bool]  # paths of layers, or which of them


@dataclass(frozen=True)
class LowRank:
    """The `adapter` that add_lora gives a Linear: adds the output of the layer's `lora_a` and `lora_b`."""

    scale: float
    dropout: float
    parts: Parts = ()  # see add_lora

    def __call__(self, layer: Linear, x: Tensor) -> Tensor:
        beside = F.dropout(x, self.dropout, layer.training) if self.dropout else x
        small = F.linear(F.linear(beside, layer.lora_a), self._own_columns(layer.lora_b))
        y = F.linear(x, layer.weight, layer.bias) + small * self.scale
        return F.gelu(y, approximate="tanh") if layer.gelu else y

    def _own_columns(self, b: Parameter) -> Tensor:
        """B; the rows of a part have gradients only in the columns of that part, and stay zero elsewhere."""
        if not self.parts:
            return b
        mask = np.zeros(b.whole_shape, b.dtype)
        for rows, columns in columns_of_parts(self.parts, b.whole_shape[1]):
            mask[rows, columns] = 1
        if b.shape != mask.shape:
            raise ValueError(f"{b.name}: an adapter in parts does not work with tensor parallelism")
        return b * device.of(b.data).asarray(mask)


def columns_of_parts(parts: Parts, columns: int) -> list[tuple[slice, slice]]:
    """(rows, columns) of B of each part of an adapter: B has as many columns for each."""
    rank = columns // len(parts)
    return [(slice(*rows), slice(i * rank, i * rank + rank)) for i, rows in enumerate(parts)]


def add_lora(
    model: Module,
    rank: int,
    *,
    alpha: float | None = None,
    targets: Targets = ("*",),
    dropout: float = 0.0,
    parts: Mapping[str, Parts] | None = None,
) -> Module:
    """Freeze `model` and give its linear layers trainable adapters; gives `model` back.

    Load weights before and call fully_shard after: frozen parameters are then sharded and never reduced.

    Args:
        rank: of the two matrices, at most the smaller side of each layer.
        alpha: the adapter is scaled by alpha / rank; 2 * rank if None.
        targets: shell patterns for the layers' paths ("*.qkv"), or a function of (path, layer).
        dropout: of the adapters' input.
        parts: for layers that are several linear layers in one (queries, keys and values), by path: ranges of
            output rows, (start, stop), each of which gets an A and a B of its own, as separate layers would.
            A is then (parts * rank, inputs), B (outputs, parts * rank) and zero outside each part's columns.

    Raises:
        ValueError: if no layer is picked, for numbers that cannot be, or after fully_shard.

    Example:
        >>> from shardrt import nn
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> _ = nn.add_lora(model, rank=2, targets=("0",))
        >>> [parameter.name for parameter in nn.lora_parameters(model)]
        ['0.lora_a', '0.lora_b']
    """
    alpha = 2.0 * rank if alpha is None else alpha
    if rank < 1 or not alpha > 0 or not 0 <= dropout < 1:
        raise ValueError(
            f"add_lora: rank must be at least 1, alpha positive and dropout in [0, 1); got {rank}, {alpha} "
            f"and {dropout}"
        )
    layers = {path: module for path, module in model.named_modules() if _picked(path, module, targets)}
    if not layers:
        raise ValueError(
            f"add_lora: targets {targets!r} match no Linear of {type(model).__name__}{_there(model)}"
        )
    for layer in layers.values():
        _check(layer, rank)
    for parameter in model.parameters():
        parameter.requires_grad = False
    for path, layer in layers.items():
        _adapt(layer, rank, LowRank(alpha / rank, dropout, (parts or {}).get(path, ())))
    return model


def is_adapted(module: Module) -> bool:
    """Whether it is a Linear with an adapter."""
    return isinstance(module, Linear) and module.adapter is not None


def adapted_layers(model: Module) -> list[Linear]:
    """The layers with an adapter, in order."""
    return [module for module in model.modules() if is_adapted(module)]


def lora_parameters(model: Module) -> list[Parameter]:
    """The adapters' parameters: those to optimize, and those to save of a trained model."""
    return [p for layer in adapted_layers(model) for p in (layer.lora_a, layer.lora_b)]


def merge_lora(model: Module) -> Module:
    """Add every adapter's matrix to its layer's weight; gives `model` back, which computes the same.

    Adapters of a plain model are taken out, and its layers are as they were before add_lora, still frozen.
    Those of a model that is sharded, or has stages, stay, with B zero; where it is sharded, call it inside
    `with full_parameters(model, writeback=True)`.

    Raises:
        ValueError: if there is no adapter.
        RuntimeError: for sharded parameters outside of that.
    """
    layers = adapted_layers(model)
    if not layers:
        raise ValueError(f"merge_lora: {type(model).__name__} has no adapters; see add_lora")
    for layer in (layer for layer in layers if not layer.weight.absent):
        weight, a, b = layer.weight.data, layer.lora_a.data, layer.lora_b.data
        weight += (b @ a) * weight.dtype.type(layer.adapter.scale)
        b[...] = 0
        for parameter in (layer.weight, layer.lora_b):
            parameter.storage.modified()
        plain = all(isinstance(p.storage, LocalStorage) for p in (layer.lora_a, layer.lora_b))
        if plain and layer.weight.pipeline is None:  # else ranks of other stages would keep them
            _take_out(layer)
    return model


def _picked(path: str, module: Module, targets: Targets) -> bool:
    if not isinstance(module, Linear):
        return False
    if callable(targets):
        return bool(targets(path, module))
    return any(fnmatch(path, pattern) for pattern in targets)


def _there(model: Module) -> str:
    """The layers that could be picked, those of all blocks as one."""
    paths = [path for path, module in model.named_modules() if isinstance(module, Linear)]
    names = dict.fromkeys(re.sub(r"\b\d+\b", "*", path) for path in paths)
    return f"; there are {', '.join(names)}" if names else ""


def _check(layer: Linear, rank: int) -> None:
    if is_adapted(layer):
        raise ValueError(f"add_lora: {layer.name} has an adapter already")
    if layer.weight.pipeline is not None:
        raise ValueError(
            f"add_lora: {layer.name} is on a pipeline stage already; call add_lora before pipeline_stages"
        )
    if not isinstance(layer.weight.storage, LocalStorage):
        raise ValueError(f"add_lora: {layer.name} is sharded already; call add_lora before fully_shard")
    if layer.weight.placement is not None:
        raise ValueError(f"add_lora: {layer.name} is split already; call add_lora before parallelize_module")
    if rank > min(layer.weight.shape):
        raise ValueError(
            f"add_lora: rank must be at most the smaller size of {layer.name} {layer.weight.shape}, got "
            f"{rank}"
        )
    if type(layer).forward is not Linear.forward:
        raise ValueError(
            f"add_lora: {layer.name} is a {type(layer).__name__} with its own forward, which an adapter "
            "would not see"
        )


def _adapt(layer: Linear, rank: int, adapter: LowRank) -> None:
    """Give the layer its adapter. The layer stays the same object, and its parameters keep their names."""
    outputs, inputs = layer.weight.shape
    bound, rank = 1 / sqrt(inputs), rank * max(1, len(adapter.parts))
    layer.lora_a = Parameter((rank, inputs), Uniform(-bound, bound), dtype=layer.weight.dtype)
    layer.lora_b = Parameter((outputs, rank), Zeros(), dtype=layer.weight.dtype)
    layer.adapter = adapter


def _take_out(layer: Linear) -> None:
    del layer.lora_a, layer.lora_b
    layer.adapter = None
