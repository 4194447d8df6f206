"""Splits the peers' GPT and Llama over the ranks of a mesh as a PyTorch user would: parallelize_module.

PyTorch's styles cut neighbouring rows, so queries, keys and values, and a gate, become layers of their own:
`split`, which keeps their values. The head is the embedding, whose rows are the words of a rank.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from . import torch_models
from .torch_models import GPT, GatedMLP

FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # which layers are made of which


def cut(model: nn.Module, mesh: DeviceMesh, *, sequence: bool, loss_parallel: bool) -> nn.Module:
    """`model` with split layers over the ranks of `mesh`; gives it back.

    sequence: norms and the residual stream on a part of the time each. loss_parallel: the model gives logits
    that stay cut, for a loss inside torch.distributed.tensor.parallel.loss_parallel.
    """
    weight = "wte" if isinstance(model, GPT) else "embedding"
    split(model, getattr(model, weight))
    between = Shard(1) if sequence else Replicate()
    logits = {"output_layouts": Shard(-1) if loss_parallel else Replicate()}
    plan = {
        weight: RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, use_local_output=not loss_parallel, **logits),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    if sequence and isinstance(model, GPT):
        plan["wpe"] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    parallelize_module(model, mesh, plan)
    model.head.weight = getattr(model, weight).weight
    for block in model.blocks:
        parallelize_module(block, mesh, _plan_of(block, sequence, between))
    return model


def _plan_of(block: nn.Module, sequence: bool, between) -> dict[str, ParallelStyle]:
    gated = isinstance(block.mlp, MLP)
    angles = (None, None) if gated else ()  # of a Llama
    whole = {"desired_input_layouts": (Replicate(), *angles)}
    plan = {
        "attention": PrepareModuleInput(input_layouts=(between, *angles), **whole),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "attention.output": RowwiseParallel(output_layouts=between),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    columns = ["attention.q", "attention.k", "attention.v", "mlp.up"]
    columns += ["mlp.gate"] if gated else []
    norms = {"norm1": SequenceParallel(), "norm2": SequenceParallel()} if sequence else {}
    return plan | {path: ColwiseParallel() for path in columns} | norms


def parameters_of(model: nn.Module) -> list[dict]:
    """Groups for an optimizer: PyTorch's do not update plain tensors and DTensors in one call."""
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    parts = [p for p in model.parameters() if isinstance(p, DTensor)]
    return [{"params": group} for group in (whole, parts) if group]


def fused(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a split model by the names of the whole one."""
    found = dict(named)
    for whole, parts in FUSED.items():
        for name in [name for name in found if f".{parts[0]}." in name]:
            names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            found[name.replace(f".{parts[0]}.", f".{whole}.")] = torch.cat([found.pop(n) for n in names])
    return found


def split(model: nn.Module, embedding: nn.Embedding) -> None:
    """Give `model` layers of their own for queries, keys, values and gates, and for the tied head."""
    for block in model.blocks:
        block.attention = Attention(block.attention)
        if isinstance(block.mlp, GatedMLP):
            block.mlp = MLP(block.mlp)
    model.head = nn.Linear(*embedding.weight.shape[::-1], bias=False)
    model.head.weight = embedding.weight
    model.end = lambda x: model.head(model.norm(x))


class Attention(torch_models.Attention):
    """As many heads as its layers give."""

    def __init__(self, whole: torch_models.Attention) -> None:
        nn.Module.__init__(self)
        self.heads, self.kv_heads, self.size = whole.heads, whole.kv_heads, whole.size
        self.causal, self.output = whole.causal, whole.output
        sizes = [heads * self.size for heads in (self.heads, self.kv_heads, self.kv_heads)]
        self.q, self.k, self.v = _rows_of(whole.qkv, sizes)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        made = (layer(x) for layer in (self.q, self.k, self.v))
        return tuple(y.unflatten(-1, (-1, self.size)).transpose(1, 2) for y in made)


class MLP(nn.Module):
    """A gated MLP with gate and up as two layers, which PyTorch's plans can split."""

    def __init__(self, whole: GatedMLP) -> None:
        super().__init__()
        self.gate, self.up = _rows_of(whole.gate_up, [whole.down.in_features] * 2)
        self.down = whole.down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def _rows_of(layer: nn.Linear, sizes: list[int]) -> list[nn.Linear]:
    """Layers with these numbers of rows of `layer`, one behind the other."""
    made = [nn.Linear(layer.in_features, size, bias=layer.bias is not None) for size in sizes]
    with torch.no_grad():
        for own, weight in zip(made, layer.weight.split(sizes), strict=True):
            own.weight.copy_(weight)
        if layer.bias is not None:
            for own, bias in zip(made, layer.bias.split(sizes), strict=True):
                own.bias.copy_(bias)
    return made
