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

from bench.peers import torch_gpt, torch_llama

FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}  # which layers are made of which


def cut(model: nn.Module, mesh: DeviceMesh, *, sequence: bool, loss_parallel: bool) -> nn.Module:
    """`model` with split layers over the ranks of `mesh`; gives it back.

    sequence: norms and the residual stream on a part of the time each. loss_parallel: the model gives logits
    that stay cut, for a loss inside torch.distributed.tensor.parallel.loss_parallel.
    """
    split(model)
    weight = "wte" if isinstance(model, GPT) else "embedding"
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
    angles = (None, None) if isinstance(block.attention, LlamaAttention) else ()
    whole = {"desired_input_layouts": (Replicate(), *angles)}
    plan = {
        "attention": PrepareModuleInput(input_layouts=(between, *angles), **whole),
        "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "attention.output": RowwiseParallel(output_layouts=between),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    columns = ["attention.q", "attention.k", "attention.v", "mlp.up"]
    columns += ["mlp.gate"] if hasattr(block.mlp, "gate") else []
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


def split(model: nn.Module) -> None:
    """Make `model` one with layers of their own for queries, keys, values and gates, and a tied head."""
    is_gpt = isinstance(model, torch_gpt.GPT)
    embedding = model.wte if is_gpt else model.embedding
    for block in model.blocks:
        block.attention = (Attention if is_gpt else LlamaAttention)(block.attention)
        if not is_gpt:
            block.mlp = MLP(block.mlp)
    model.head = nn.Linear(*embedding.weight.shape[::-1], bias=False)
    model.head.weight = embedding.weight
    model.__class__ = GPT if is_gpt else Llama


class Attention(nn.Module):
    """As many heads as its layers give."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.size = whole.output.in_features // whole.heads
        kv_heads = getattr(whole, "kv_heads", whole.heads)
        sizes = [heads * self.size for heads in (whole.heads, kv_heads, kv_heads)]
        self.q, self.k, self.v = _rows_of(whole.qkv, sizes)
        self.output = whole.output

    def heads(self, x: Tensor) -> list[Tensor]:
        made = (layer(x) for layer in (self.q, self.k, self.v))
        return [y.unflatten(-1, (-1, self.size)).transpose(1, 2) for y in made]

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.output(y.transpose(1, 2).flatten(2))


class LlamaAttention(Attention):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = torch_llama.rotate(q, cos, sin), torch_llama.rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.gate, self.up = _rows_of(whole.gate_up, [whole.down.in_features] * 2)
        self.down = whole.down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GPT(torch_gpt.GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Llama(torch_llama.Llama):
    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


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
