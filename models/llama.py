"""Llama 3 (Grattafiori et al., The Llama 3 Herd of Models, 2024, after Touvron et al., LLaMA, 2023).

Reads top to bottom like the figure: embedding, blocks of attention and MLP with an RMS norm before each, a
last norm, and a head, which may be the embedding again. Positions are angles by which queries and keys are
turned. Knows nothing of sharding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import pi, sqrt
from typing import Any

import numpy as np

from shardrt import Tensor, device, nn
from shardrt import functional as F

from .cache import KVCache, LayerCache, extended, layer_of
from .head import head

Array = Any
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. Raises ValueError for sizes below 1 and for heads that don't fit."""

    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 4  # heads of keys and values; each serves n_head / n_kv_head heads of queries
    n_embd: int = 768
    n_hidden: int = 2048  # inside the MLP
    block_size: int = 1024
    vocab_size: int = 32000  # 0: models.train takes that of the data
    tied: bool = True  # the head is the embedding
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_factor: float = 1.0  # how much longer contexts are than those of the first training; 1: not scaled
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_size: int = 8192  # positions of the first training
    loss_chunk: int = 0  # rows of logits at a time where the model computes the loss; 0: all
    init_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = "n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "block_size"
        for name in (*sizes, "rope_original_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.vocab_size < 0:
            raise ValueError(f"vocab_size must be at least 0, got {self.vocab_size}")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(
                f"n_embd must be an even multiple of n_head, got {self.n_embd} and {self.n_head}"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head must divide n_head, got {self.n_kv_head} and {self.n_head}")
        for name in ("norm_eps", "rope_theta", "rope_factor", "rope_low_freq_factor", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.loss_chunk < 0:
            raise ValueError(f"loss_chunk must be at least 0, got {self.loss_chunk}")
        if not self.rope_high_freq_factor > self.rope_low_freq_factor:
            raise ValueError(
                f"rope_high_freq_factor must be above rope_low_freq_factor, got {self.rope_high_freq_factor} "
                f"and {self.rope_low_freq_factor}"
            )

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.n_embd // self.n_head

    def heads_in(self, width: int) -> tuple[int, int]:
        """(heads of queries, of keys and of values) in queries, keys and values of this width.

        All of them, or those that a rank has, which are one of keys and values at least.
        """
        total = width // self.head_dim
        kv_heads = max(1, total * self.n_kv_head // (self.n_head + 2 * self.n_kv_head))
        return total - 2 * kv_heads, kv_heads


SIZES = {
    "llama-100m": LlamaConfig(),  # for benchmarks; no weights of this shape were published
    "llama-3.2-1b": LlamaConfig(
        n_layer=16,
        n_head=32,
        n_kv_head=8,
        n_embd=2048,
        n_hidden=8192,
        block_size=131072,
        vocab_size=128256,
        rope_factor=32.0,
    ),
    "llama-3.1-8b": LlamaConfig(
        n_layer=32,
        n_head=32,
        n_kv_head=8,
        n_embd=4096,
        n_hidden=14336,
        block_size=131072,
        vocab_size=128256,
        tied=False,
        rope_factor=8.0,
    ),
}


class Attention(nn.Module):
    """Causal self-attention; several heads of queries share one of keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        packed = (config.n_head + 2 * config.n_kv_head) * config.head_dim
        self.qkv = linear(config, config.n_embd, packed)
        self.output = residual_linear(config, config.n_embd)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Array, Array],
        cache: LayerCache | None = None,
        starts: Array = None,
    ) -> Tensor:
        qkv = self.qkv(x)
        heads, kv_heads = self.config.heads_in(qkv.shape[-1])
        qkv = F.rotary(qkv, *angles, heads + kv_heads)
        if cache is not None:
            return self.output(cache.attend(qkv, heads, kv_heads))
        return self.output(F.self_attention(qkv, heads, kv_heads=kv_heads, starts=starts))


class MLP(nn.Module):
    """SwiGLU: one half of the widened values is the gate of the other."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up = linear(config, config.n_embd, 2 * config.n_hidden)
        self.down = residual_linear(config, config.n_hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.swiglu(self.gate_up(x)))


class Block(nn.Module):
    """Two residual steps: tokens look at one another, then each by itself."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Array, Array],
        cache: LayerCache | None = None,
        starts: Array = None,
    ) -> Tensor:
        x, y = self.norm2(x, self.attention(self.norm1(x), angles, cache, starts))  # the sum, and its norm
        return x + self.mlp(y)


class Llama(nn.Module):
    """model(tokens) -> logits: integer array (batch, time) -> tensor (batch, time, vocab_size).

    model(tokens, targets) -> the loss, a number, in config.loss_chunk rows at a time (models/head.py).
    starts: from F.document_starts, where a row holds several documents that don't see one another.
    cache: keys and values of the tokens before these (models/cache.py); then `tokens` go on from there.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError("vocab_size must be at least 1, got 0")
        self.config = config
        start = nn.init.Normal(0.0, config.init_std)
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd, init=start)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        if not config.tied:
            self.head = linear(config, config.n_embd, config.vocab_size)
        self._angles = Angles(config)

    def forward(
        self,
        tokens: np.ndarray,
        targets: np.ndarray | None = None,
        *,
        reduction: str = "mean",
        cache: KVCache | None = None,
        starts: Array = None,
    ) -> Tensor:
        first, last, layers = extended(tokens, cache, len(self.blocks), self.config.block_size)
        angles = self._angles.of(first, last)
        x = self.embedding(tokens)  # (batch, time, n_embd)
        for block, layer in zip(self.blocks, layers, strict=True):
            x = block(x, angles, layer, starts)
        return self.headed(x, targets, reduction)

    def headed(self, x: Tensor, targets: np.ndarray | None, reduction: str) -> Tensor:
        """What the model gives, from what comes out of the last block."""
        layer = self.embedding if self.config.tied else self.head
        return head(self.norm(x), layer, targets, reduction, self.config.loss_chunk)

    def pieces(self) -> list[nn.Piece]:
        """The forward, for a pipeline."""

        def first(x: None, batch: Batch) -> Tensor:
            extended(batch["tokens"], batch.get("cache"), 0, self.config.block_size)
            return self.embedding(batch["tokens"])

        def middle(number: int, x: Tensor, batch: Batch) -> Tensor:
            layer = layer_of(batch, number)
            start = 0 if layer is None else layer.length
            angles = self._angles.of(start, start + batch["tokens"].shape[1])
            return self.blocks[number](x, angles, layer, batch.get("starts"))

        def last(x: Tensor, batch: Batch) -> Tensor:
            return self.headed(x, batch.get("targets"), batch.get("reduction", "mean"))

        tied = self.config.tied
        return [
            nn.Piece("embedding", first, (self.embedding,)),
            *(nn.Piece(block.name, partial(middle, i), (block,)) for i, block in enumerate(self.blocks)),
            nn.Piece(
                "head",
                last,
                (self.norm,) if tied else (self.norm, self.head),
                tied=(self.embedding,) if tied else (),
            ),
        ]


class Angles:
    """Cosine and sine of the angles of every position, (positions, head_dim / 2), made as far as needed."""

    def __init__(self, config: LlamaConfig) -> None:
        self._config = config
        self._tables: tuple[Array, Array] | None = None

    def of(self, first: int, last: int) -> tuple[Array, Array]:
        """(cos, sin) of positions [first, last), views of arrays of the current device."""
        here = device.current()
        if self._tables is None or len(self._tables[0]) < last:
            count = min(self._config.block_size, 1 << (last - 1).bit_length())
            angles = np.arange(count, dtype=np.float32)[:, None] * frequencies(self._config)
            self._tables = here.asarray(np.cos(angles)), here.asarray(np.sin(angles))
        cos, sin = self._tables
        return cos[first:last], sin[first:last]


def frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians per position of each pair of a head's elements, float32, slowed down as Llama 3 does.

    Pairs that turn less than rope_low_freq_factor times in the positions of the first training turn
    rope_factor times slower, those that turn more than rope_high_freq_factor times as before; between the two
    limits the frequency is interpolated. In float32, as where the published weights were trained.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    plain = np.float32(1) / np.float32(config.rope_theta) ** exponent
    if config.rope_factor == 1:
        return plain
    turns = np.float32(config.rope_original_size) * plain / np.float32(2 * pi)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    return ((1 - kept) * plain / np.float32(config.rope_factor) + kept * plain).astype(np.float32)


def linear(config: LlamaConfig, inputs: int, outputs: int) -> nn.Linear:
    """A linear layer without bias that starts as N(0, init_std)."""
    return nn.Linear(inputs, outputs, bias=False, init=nn.init.Normal(0.0, config.init_std))


def residual_linear(config: LlamaConfig, inputs: int) -> nn.Linear:
    """One that adds to the residual stream: smaller by the root of how many of them add up."""
    start = nn.init.Normal(0.0, config.init_std / sqrt(2 * config.n_layer))
    return nn.Linear(inputs, config.n_embd, bias=False, init=start)
