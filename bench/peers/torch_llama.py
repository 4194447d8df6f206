"""The Llama of models/llama.py in PyTorch, with the same parameter names, so that weights map one to one.

Written as a PyTorch user would write it: packed matmuls, fused attention of grouped heads, a tied head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        packed = self.qkv(x).view(batch, time, -1, self.size).transpose(1, 2)
        q, k, v = packed.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(y.transpose(1, 2).reshape(batch, time, width))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (..., time, size) with element i and i + size / 2 turned as one pair."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, heads, kv_heads)
        self.norm2 = nn.RMSNorm(width, eps=1e-5)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    BEGIN = ("embedding",)  # what is used before the blocks
    END = "norm", "embedding"  # and behind them

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        kv_heads: int,
        width: int,
        hidden: int,
        time: int,
        vocab: int,
        theta: float = 500000.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
        size = width // heads
        turns = torch.arange(time)[:, None] / theta ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", turns.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", turns.sin().repeat(1, 2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.end(self.middle(self.begin(tokens)))

    def begin(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def middle(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return x

    def end(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)
