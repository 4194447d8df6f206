"""Llama 3 (Grattafiori et al., The Llama 3 Herd of Models, 2024, after Touvron et al., LLaMA, 2023) and kin.

Reads top to bottom like the figure: embedding, blocks of attention and MLP with an RMS norm before each, a
last norm, and a head, which may be the embedding again. Positions are angles by which queries and keys are
turned. With `experts` a block has several MLPs, and each token goes through few of them: Mixtral (Jiang et
al., Mixtral of Experts, 2024); with norms of queries and keys as well, Qwen3-MoE (of each head; Qwen Team,
Qwen3 Technical Report, 2025) and OLMoE (of all at once; Muennighoff et al., OLMoE, 2024). Knows nothing of
sharding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import pi, sqrt
from typing import Any

import numpy as np

from shardrt import Tensor, device, nn
from shardrt import functional as F

from .attend import attend
from .cache import KVCache, LayerCache, extended, layer_of
from .head import head

__all__ = [
    "Angles",
    "Attention",
    "Batch",
    "Block",
    "IGNORED",
    "Llama",
    "LlamaConfig",
    "MLP",
    "Passed",
    "SIZES",
    "frequencies",
    "initial",
    "linear",
    "mixture",
    "passed",
    "residual_initial",
    "residual_linear",
]

Array = Any
Batch = Mapping[str, Any]
Passed = Tensor | tuple[Tensor, Tensor]  # from block to block: see `passed`
IGNORED = -100  # the target that F.cross_entropy leaves out


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
    head_size: int = 0  # elements of a head; 0: n_embd / n_head
    qk_norm: str = "none"  # RMS norm of queries and keys: "head": of each head, "all": of all heads at once
    clip_qkv: float = 0.0  # bound of the absolute values of queries, keys and values; 0: none
    experts: int = 0  # MLPs in each block, of which a token goes through a few; 0: one, for all tokens
    experts_per_token: int = 2
    normalise_experts: bool = True  # the weights of a token's experts add up to 1
    capacity_factor: float = 0.0  # the most tokens of an expert, over an equal share; 0: none is dropped
    balance_loss: float = 0.0  # how much the unequal load of experts counts in the loss, in each block
    pooled_balance: bool = False  # that load is of all blocks together, as in transformers
    expert_bias: bool = False  # balanced by a bias in the choice of experts (nn.update_expert_bias)
    loss_chunk: int = 0  # rows of logits at a time where the model computes the loss; 0: all
    init_std: float = 0.02

    def __post_init__(self) -> None:
        sizes = "n_layer", "n_head", "n_kv_head", "n_embd", "n_hidden", "block_size"
        for name in (*sizes, "rope_original_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.vocab_size < 0:
            raise ValueError(f"vocab_size must be at least 0, got {self.vocab_size}")
        if self.head_size < 0 or self.head_size % 2:
            raise ValueError(f"head_size must be even and at least 0, got {self.head_size}")
        if not self.head_size and self.n_embd % (2 * self.n_head):
            raise ValueError(
                f"n_embd must be an even multiple of n_head, got {self.n_embd} and {self.n_head}"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head must divide n_head, got {self.n_kv_head} and {self.n_head}")
        for name in ("norm_eps", "rope_theta", "rope_factor", "rope_low_freq_factor", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("loss_chunk", "clip_qkv", "experts", "capacity_factor", "balance_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.qk_norm not in ("none", "head", "all"):
            raise ValueError(f"qk_norm must be none, head or all, got {self.qk_norm!r}")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token must be in [1, {self.experts}], the experts, got {self.experts_per_token}"
            )
        if not self.rope_high_freq_factor > self.rope_low_freq_factor:
            raise ValueError(
                f"rope_high_freq_factor must be above rope_low_freq_factor, got {self.rope_high_freq_factor} "
                f"and {self.rope_low_freq_factor}"
            )

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.head_size or self.n_embd // self.n_head

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
    "mixtral-8x7b": LlamaConfig(
        n_layer=32,
        n_head=32,
        n_kv_head=8,
        n_embd=4096,
        n_hidden=14336,
        block_size=32768,
        vocab_size=32000,
        tied=False,
        rope_theta=1e6,
        experts=8,
    ),
    "qwen3-30b-a3b": LlamaConfig(
        n_layer=48,
        n_head=32,
        n_kv_head=4,
        n_embd=2048,
        head_size=128,
        n_hidden=768,
        block_size=40960,
        vocab_size=151936,
        tied=False,
        norm_eps=1e-6,
        qk_norm="head",
        rope_theta=1e6,
        experts=128,
        experts_per_token=8,
    ),
    "olmoe-1b-7b": LlamaConfig(
        n_layer=16,
        n_head=16,
        n_kv_head=16,
        n_embd=2048,
        n_hidden=1024,
        block_size=4096,
        vocab_size=50304,
        tied=False,
        qk_norm="all",
        rope_theta=10000.0,
        experts=64,
        experts_per_token=8,
        normalise_experts=False,
    ),
}


class Attention(nn.Module):
    """Causal self-attention; several heads of queries share one of keys and values.

    With config.qk_norm, queries and keys are normalised before they are turned: each head by itself, or all
    of them at once.
    """

    context: Any = None  # where sequences lie on several ranks: parallel/context.py

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.qkv = linear(config, config.n_embd, queries + 2 * keys)
        if config.qk_norm != "none":
            each = config.qk_norm == "head"
            self.q_norm = nn.RMSNorm(config.head_dim if each else queries, config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim if each else keys, config.norm_eps)
        self.output = residual_linear(config, queries)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Array, Array],
        cache: LayerCache | None = None,
        starts: Array = None,
        positions: Array = None,
    ) -> Tensor:
        qkv = self.qkv(x)
        heads, kv_heads = self.config.heads_in(qkv.shape[-1])
        if self.config.qk_norm != "none":
            qkv = self.normalised(qkv, heads, kv_heads)
        if self.config.clip_qkv:
            qkv = F.clamp(qkv, -self.config.clip_qkv, self.config.clip_qkv)
        qkv = F.rotary(qkv, *angles, heads + kv_heads)
        how = {"context": self.context, "cache": cache, "starts": starts, "positions": positions}
        return self.output(attend(qkv, heads, kv_heads, **how))

    def normalised(self, qkv: Tensor, heads: int, kv_heads: int) -> Tensor:
        """Return qkv with the norm of queries and keys; the values stay."""
        batch, time, _ = qkv.shape
        width = self.config.head_dim
        q, k, v = F.split(qkv, (heads * width, kv_heads * width, kv_heads * width), -1)
        q, k = (
            norm(x.reshape(batch, time, -1, norm.weight.shape[0])).reshape(x.shape)
            for norm, x in ((self.q_norm, q), (self.k_norm, k))
        )
        return F.concatenate((q, k, v), -1)


class MLP(nn.Module):
    """SwiGLU: one half of the widened values is the gate of the other."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up = linear(config, config.n_embd, 2 * config.n_hidden)
        self.down = residual_linear(config, config.n_hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.swiglu(self.gate_up(x)))


def mixture(config: LlamaConfig) -> nn.MoE:
    """Several such MLPs, and a router that chooses a few of them for each token."""
    router = nn.TopKRouter(
        config.n_embd,
        config.experts,
        config.experts_per_token,
        renormalise=config.normalise_experts,
        capacity_factor=config.capacity_factor or None,
        expert_bias=config.expert_bias,
        balance_loss=config.balance_loss,
        pooled=config.pooled_balance,
        init=initial(config),
    )
    sizes = config.experts, config.n_embd, config.n_hidden
    return nn.MoE(router, nn.Experts(*sizes, init=initial(config), down_init=residual_initial(config)))


class Block(nn.Module):
    """Two residual steps: tokens look at one another, then each by itself.

    With experts it gives (x, balance): the router's term of the loss (nn.MoE).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = mixture(config) if config.experts else MLP(config)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Array, Array],
        cache: LayerCache | None = None,
        starts: Array = None,
        positions: Array = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        branch = self.attention(self.norm1(x), angles, cache, starts, positions)
        x, y = self.norm2(x, branch)  # the sum, and its norm
        if isinstance(self.mlp, MLP):
            return x + self.mlp(y)
        y, balance = self.mlp(y)
        return x + y, balance


class Llama(nn.Module):
    """model(tokens) -> logits: integer array (batch, time) -> tensor (batch, time, vocab_size).

    model(tokens, targets) -> the loss, a number, in config.loss_chunk rows at a time (models/head.py). In
    training it has the balance losses of all blocks in it; in evaluation it is the cross-entropy alone.
    starts: from F.document_starts, where a row holds several documents that don't see one another.
    positions: of the tokens of a row, integers (time,) of the host, where they are not 0, 1, 2, ...
    cache: keys and values of the tokens before these (models/cache.py); then `tokens` go on from there.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError("vocab_size must be at least 1, got 0")
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd, init=initial(config))
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
        positions: Array = None,
    ) -> Tensor:
        places, layers = extended(tokens, positions, cache, len(self.blocks), self.config.block_size)
        angles = self._angles.of(places)
        x: Passed = self.embedding(tokens)  # (batch, time, n_embd)
        for block, layer in zip(self.blocks, layers, strict=True):
            x = passed(block, x, angles, layer, starts, positions)
        return self.headed(x, targets, reduction)

    def headed(self, x: Passed, targets: np.ndarray | None, reduction: str) -> Tensor:
        """The model's output, from the output of the last block."""
        x, balance = x if isinstance(x, tuple) else (x, None)
        layer = self.embedding if self.config.tied else self.head
        y = head(self.norm(x), layer, targets, reduction, self.config.loss_chunk)
        if targets is None or balance is None or reduction == "none" or not self.training:
            return y
        if self.config.pooled_balance:
            balance = F.pooled_balance_loss(balance, len(self.blocks) * targets.size)
            balance = balance * self.config.balance_loss
        # In a sum, once for each target: then micro-batches count as many times as they have targets.
        count = 1.0
        if reduction == "sum" and self.config.balance_loss:
            count = nn.balance_targets(self, int((targets != IGNORED).sum()), targets.size)
        return y + balance * count

    def pieces(self) -> list[nn.Piece]:
        """The forward, for a pipeline."""

        def first(x: None, batch: Batch) -> Tensor:
            given = batch["tokens"], batch.get("positions"), batch.get("cache")
            extended(*given, 0, self.config.block_size)
            return self.embedding(batch["tokens"])

        def middle(number: int, x: Passed, batch: Batch) -> Passed:
            layer, positions = layer_of(batch, number), batch.get("positions")
            start = 0 if layer is None else layer.length
            following = range(start, start + batch["tokens"].shape[1])
            angles = self._angles.of(following if positions is None else positions)
            return passed(self.blocks[number], x, angles, layer, batch.get("starts"), positions)

        def last(x: Passed, batch: Batch) -> Tensor:
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


def passed(block: Block, x: Passed, *how: Any) -> Passed:
    """What goes on behind a block: x; with experts (x, the balance losses so far)."""
    x, before = x if isinstance(x, tuple) else (x, None)
    y = block(x, *how)
    return (y[0], before + y[1]) if before is not None else y


class Angles:
    """Cosine and sine of the angles of positions, (positions, head_dim / 2) each, made as far as needed."""

    def __init__(self, config: LlamaConfig) -> None:
        self._config = config
        self._where: Any = None  # the device of what is kept
        self._tables: tuple[Array, Array] | None = None  # of 0, 1, 2, ...
        self._places: np.ndarray | None = None  # others that were asked for last, as they are in each step
        self._found: tuple[Array, Array]

    def of(self, positions: range | np.ndarray) -> tuple[Array, Array]:
        """(cos, sin) of positions on the current device, of a range as views."""
        if self._where is not device.current():
            self._where, self._tables, self._places = device.current(), None, None
        if not isinstance(positions, range):
            if self._places is None or not np.array_equal(self._places, positions):
                self._places, self._found = positions.copy(), self._made(positions)
            return self._found
        first, last = positions.start, positions.stop
        if self._tables is None or len(self._tables[0]) < last:
            count = min(self._config.block_size, 1 << (last - 1).bit_length())
            self._tables = self._made(np.arange(count))
        cos, sin = self._tables
        return cos[first:last], sin[first:last]

    def _made(self, positions: np.ndarray) -> tuple[Array, Array]:
        angles = positions.astype(np.float32)[:, None] * frequencies(self._config)
        return self._where.asarray(np.cos(angles)), self._where.asarray(np.sin(angles))


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
    """A linear layer without bias."""
    return nn.Linear(inputs, outputs, bias=False, init=initial(config))


def residual_linear(config: LlamaConfig, inputs: int) -> nn.Linear:
    """One that adds to the residual stream."""
    return nn.Linear(inputs, config.n_embd, bias=False, init=residual_initial(config))


def initial(config: LlamaConfig) -> nn.init.Initialiser:
    """The initial values of weights: N(0, init_std)."""
    return nn.init.Normal(0.0, config.init_std)


def residual_initial(config: LlamaConfig) -> nn.init.Initialiser:
    """Those that add to the residual stream: smaller by the root of how many of them add up."""
    return nn.init.Normal(0.0, config.init_std / sqrt(2 * config.n_layer))
