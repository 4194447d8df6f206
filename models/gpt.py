"""GPT-2 (Radford et al., Language Models are Unsupervised Multitask Learners, 2019).

Reads top to bottom like the figure: embeddings, blocks of attention and MLP with a norm before each, a last
norm, and a head that is the token embedding again. Knows nothing of sharding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from shardrt import Tensor, nn

from .attend import attend
from .cache import KVCache, LayerCache, extended, layer_of
from .head import head

__all__ = ["Attention", "Batch", "Block", "GPT", "GPTConfig", "MLP", "SIZES", "linear", "residual_linear"]

Array = Any
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. Raises ValueError for sizes below 1 or a width that the heads don't divide."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int = 50304  # 0: models.train takes that of the data
    dropout: float = 0.0
    bias: bool = True
    loss_chunk: int = 0  # rows of logits at a time where the model computes the loss; 0: all
    init_std: float = 0.02  # of the initial weights; narrow models learn faster with more

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.vocab_size < 0:
            raise ValueError(f"vocab_size must be at least 0, got {self.vocab_size}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd must be a multiple of n_head, got {self.n_embd} and {self.n_head}")
        if self.loss_chunk < 0:
            raise ValueError(f"loss_chunk must be at least 0, got {self.loss_chunk}")
        if not self.init_std > 0:
            raise ValueError(f"init_std must be positive, got {self.init_std}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")


SIZES = {
    "gpt2": GPTConfig(vocab_size=50257),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024, vocab_size=50257),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280, vocab_size=50257),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600, vocab_size=50257),
}


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    context: Any = None  # where sequences lie on several ranks: parallel/context.py

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.qkv = linear(config, config.n_embd, 3 * config.n_embd)
        self.output = residual_linear(config, config.n_embd)

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, starts: Array = None, positions: Array = None
    ) -> Tensor:
        qkv = self.qkv(x)
        heads = qkv.shape[-1] // (3 * self.head_dim)  # all, or this rank's
        how = {"context": self.context, "cache": cache, "starts": starts, "positions": positions}
        return self.output(attend(qkv, heads, heads, **how))


class MLP(nn.Module):
    """Four times as wide inside, with a GELU after the first layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = linear(config, config.n_embd, 4 * config.n_embd, gelu=True)
        self.down = residual_linear(config, 4 * config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Block(nn.Module):
    """Two residual steps: tokens look at one another, then each by itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, cache: LayerCache | None = None, starts: Array = None, positions: Array = None
    ) -> Tensor:
        branch = self.dropout(self.attention(self.norm1(x), cache, starts, positions))
        x, y = self.norm2(x, branch)  # the sum, and its norm
        return x + self.dropout(self.mlp(y))


class GPT(nn.Module):
    """model(tokens) -> logits: integer array (batch, time) -> tensor (batch, time, vocab_size).

    model(tokens, targets) -> the loss, a number, in config.loss_chunk rows at a time (models/head.py).
    starts: from F.document_starts, where a row holds several documents that don't see one another.
    positions: of the tokens of a row, integers (time,) of the host, where they are not 0, 1, 2, ...;
    (batch, time) where rows differ.
    cache: keys and values of the tokens before these (models/cache.py); then `tokens` go on from there.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError("vocab_size must be at least 1, got 0")
        self.config = config
        start = nn.init.Normal(0.0, config.init_std)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd, init=start)
        self.wpe = nn.Embedding(config.block_size, config.n_embd, init=start)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)

    def forward(
        self,
        tokens: np.ndarray,
        targets: np.ndarray | None = None,
        *,
        reduction: str = "mean",
        cache: KVCache | None = None,
        starts: Array = None,
        positions: Array = None,
    ) -> Tensor:
        given = tokens, positions, cache
        places, layers = extended(*given, len(self.blocks), self.config.block_size, of_rows=True)
        x = self.embedded(tokens, places)  # (batch, time, n_embd)
        for block, layer in zip(self.blocks, layers, strict=True):
            x = block(x, layer, starts, positions)
        return self.headed(x, targets, reduction)

    def embedded(self, tokens: np.ndarray, positions: range | Array) -> Tensor:
        """The input of the first block."""
        return self.dropout(self.wte(tokens) + self.wpe(positions))

    def headed(self, x: Tensor, targets: np.ndarray | None, reduction: str) -> Tensor:
        """The model's output, from the output of the last block."""
        return head(self.norm(x), self.wte, targets, reduction, self.config.loss_chunk)

    def pieces(self) -> list[nn.Piece]:
        """The forward, for a pipeline."""

        def first(x: None, batch: Batch) -> Tensor:
            given = batch["tokens"], batch.get("positions"), batch.get("cache")
            places, _ = extended(*given, 0, self.config.block_size, of_rows=True)
            return self.embedded(batch["tokens"], places)

        def middle(number: int, x: Tensor, batch: Batch) -> Tensor:
            return self.blocks[number](
                x, layer_of(batch, number), batch.get("starts"), batch.get("positions")
            )

        def last(x: Tensor, batch: Batch) -> Tensor:
            return self.headed(x, batch.get("targets"), batch.get("reduction", "mean"))

        return [
            nn.Piece("embedding", first, (self.wte, self.wpe, self.dropout)),
            *(nn.Piece(block.name, partial(middle, i), (block,)) for i, block in enumerate(self.blocks)),
            nn.Piece("head", last, (self.norm,), tied=(self.wte,)),
        ]


def linear(config: GPTConfig, inputs: int, outputs: int, *, gelu: bool = False) -> nn.Linear:
    """A linear layer that starts as GPT-2's do: N(0, init_std), zero bias."""
    start = nn.init.Normal(0.0, config.init_std)
    return nn.Linear(inputs, outputs, bias=config.bias, init=start, gelu=gelu)


def residual_linear(config: GPTConfig, inputs: int) -> nn.Linear:
    """One that adds to the residual stream: smaller by the root of how many of them add up."""
    start = nn.init.Normal(0.0, config.init_std / sqrt(2 * config.n_layer))
    return nn.Linear(inputs, config.n_embd, bias=config.bias, init=start)
