"""The GPT, Llama and ViT of models/ in PyTorch, with the same parameter names: weights map one to one.

The peers of every comparison, written as a PyTorch user would write them: packed matmuls, fused attention, a
tied head of language models.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """kv_heads: of keys and values, where there are fewer than of queries."""

    def __init__(
        self, width: int, heads: int, kv_heads: int = 0, *, bias: bool = True, causal: bool = True
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads or heads, width // heads
        self.causal = causal
        self.qkv = nn.Linear(width, (heads + 2 * self.kv_heads) * self.size, bias=bias)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, *angles: Tensor) -> Tensor:
        q, k, v = self.split(x)
        if angles:
            q, k = rotate(q, *angles), rotate(k, *angles)
        grouped = self.kv_heads != self.heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        return self.output(y.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, (batch, heads, time, size) each."""
        packed = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        return packed.split((self.heads, self.kv_heads, self.kv_heads), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn elements i and i + size / 2 of x (..., time, size) as one pair; angles of T or more."""
    cos, sin = (each[: x.shape[-2]] for each in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    """The MLP of models/gpt.py in PyTorch."""

    def __init__(self, width: int, hidden: int, *, bias: bool = True, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class GatedMLP(nn.Module):
    """The gated MLP of models/llama.py in PyTorch."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention = norm(), attention
        self.norm2, self.mlp = norm(), mlp

    def forward(self, x: Tensor, *angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), *angles)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Subclasses have `begin`, which makes the residual stream, `blocks`, and `end`, which reads it."""

    BEGIN: tuple[str, ...]  # what is used before the blocks
    END: tuple[str, ...]  # and behind them

    def forward(self, inputs: Tensor) -> Tensor:
        return self.end(self.middle(self.begin(inputs)))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def draw(self, residual: float) -> None:
        """Initial weights. residual: the factor of those that write to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                writes = name.endswith(("attention.output.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=0.02 * (residual if writes else 1))


class GPT(Transformer):
    """The model of models/gpt.py in PyTorch."""

    BEGIN = "wte", "wpe"
    END = "norm", "wte"

    def __init__(
        self, *, layers: int, heads: int, width: int, time: int, vocab: int, bias: bool = True
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(time, width)
        self.blocks = nn.ModuleList(
            Block(
                lambda: nn.LayerNorm(width, bias=bias),
                Attention(width, heads, bias=bias),
                MLP(width, 4 * width, bias=bias),
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, bias=bias)
        self.draw(1 / math.sqrt(2 * layers))

    def begin(self, tokens: Tensor) -> Tensor:
        return self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))

    def end(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.wte.weight)


class Llama(Transformer):
    """The model of models/llama.py in PyTorch."""

    BEGIN = ("embedding",)
    END = "norm", "embedding"

    def __init__(
        self, *, layers: int, heads: int, kv_heads: int, width: int, hidden: int, time: int, vocab: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            Block(
                lambda: nn.RMSNorm(width, eps=1e-5),
                Attention(width, heads, kv_heads, bias=False),
                GatedMLP(width, hidden),
            )
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.draw(1 / math.sqrt(2 * layers))
        size = width // heads
        turns = torch.arange(time)[:, None] / 500000.0 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", turns.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", turns.sin().repeat(1, 2), persistent=False)

    def begin(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x

    def end(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)


class ViT(Transformer):
    """The head sees the class token."""

    BEGIN = "patches", "token", "positions"
    END = "norm", "head"

    def __init__(
        self, *, layers: int, heads: int, width: int, hidden: int, image: int, patch: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(
            Block(
                lambda: nn.LayerNorm(width, eps=1e-6),
                Attention(width, heads, causal=False),
                MLP(width, hidden, approximate="none"),
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        self.draw(1.0)

    def begin(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions

    def end(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)[:, 0])
