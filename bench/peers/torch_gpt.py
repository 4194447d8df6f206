"""The GPT of models/gpt.py in PyTorch, with the same parameter names, so that weights map one to one.

The peer of every comparison: written as a PyTorch user would write it, with fused attention and a tied head.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            piece.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for piece in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.output(y.transpose(1, 2).reshape(batch, time, width))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, width: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x), approximate="tanh"))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, heads, bias, dropout)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.mlp = MLP(width, bias, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    BEGIN = "wte", "wpe"  # what is used before the blocks
    END = "norm", "wte"  # and behind them

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        width: int,
        time: int,
        vocab: int,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, heads, bias, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=bias)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.end(self.middle(self.begin(tokens)))

    def begin(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return F.dropout(self.wte(tokens) + self.wpe(positions), self.dropout, self.training)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def end(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.wte.weight)
