"""GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019).

Reads top to bottom like the figure: embeddings, blocks of attention and MLP with a norm before each, a last
norm, and a head that is the token embedding again. Knows nothing of sharding.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from shardrt import Tensor, nn
from shardrt import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. Raises ValueError for sizes below 1 or a width that the heads don't divide."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int = 50304
    dropout: float = 0.0
    bias: bool = True
    init_std: float = 0.02  # of the initial weights; narrow models learn faster with more

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}")
        if not self.init_std > 0:
            raise ValueError(f"init_std must be positive, got {self.init_std}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.n_head
        self.qkv = linear(config, config.n_embd, 3 * config.n_embd)
        self.output = residual_linear(config, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.self_attention(self.qkv(x), self.heads, is_causal=True))


class MLP(nn.Module):
    """Four times as wide inside, with a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = linear(config, config.n_embd, 4 * config.n_embd)
        self.down = residual_linear(config, 4 * config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Two residual steps: tokens look at one another, then each by itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """model(tokens) -> logits: integer array (batch, time) -> tensor (batch, time, vocab_size)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        start = nn.init.Normal(0.0, config.init_std)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd, init=start)
        self.wpe = nn.Embedding(config.block_size, config.n_embd, init=start)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)

    def forward(self, tokens: np.ndarray) -> Tensor:
        time = tokens.shape[1]
        if time > self.config.block_size:
            raise ValueError(f"tokens: at most block_size = {self.config.block_size} at a time, got {time}")
        x = self.wte(tokens) + self.wpe(range(time))  # (batch, time, n_embd)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.wte.weight)


def linear(config: GPTConfig, inputs: int, outputs: int) -> nn.Linear:
    """A linear layer that starts as GPT-2's do: N(0, init_std), zero bias."""
    return nn.Linear(inputs, outputs, bias=config.bias, init=nn.init.Normal(0.0, config.init_std))


def residual_linear(config: GPTConfig, inputs: int) -> nn.Linear:
    """One that adds to the residual stream: smaller by the root of how many of them add up."""
    start = nn.init.Normal(0.0, config.init_std / sqrt(2 * config.n_layer))
    return nn.Linear(inputs, config.n_embd, bias=config.bias, init=start)
