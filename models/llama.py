"""Llama 3 (Grattafiori et al., The Llama 3 Herd of Models, 2024, after Touvron et al., LLaMA, 2023) and kin.

Reads top to bottom like the figure: embedding, blocks of attention and MLP with an RMS norm before each, a
last norm, and a head, which may be the embedding again. Positions are angles by which queries and keys are
turned. The config makes it one of its kin: with biases of queries, keys and values Qwen2.5 (Qwen Team,
Qwen2.5 Technical Report, 2024); with windows of attention Mistral (Jiang et al., Mistral 7B, 2023); with
norms of queries and keys Qwen3 (of each head; Qwen Team, Qwen3 Technical Report, 2025) and OLMoE (of all at
once; Muennighoff et al., OLMoE, 2024). With `experts` a block has several MLPs, and each token goes through
few of them: Mixtral (Jiang et al., Mixtral of Experts, 2024), Qwen3-MoE, OLMoE. Knows nothing of sharding.
"""

from collections.abc import Mapping
from functools import partial
from math import pi, sqrt
from typing import Any

import numpy as np

from shardrt import Tensor, device, nn
from shardrt import functional as F

from .attend import attend
from .cache import KVCache, LayerCache, extended, layer_of
from .head import head
from .llama_config import FULL, SIZES, SLIDING, LlamaConfig

__all__ = [
    "Angles",
    "Attention",
    "Batch",
    "Block",
    "FULL",
    "IGNORED",
    "Llama",
    "LlamaConfig",
    "MLP",
    "Passed",
    "SIZES",
    "SLIDING",
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


class Attention(nn.Module):
    """Causal self-attention; several heads of queries share one of keys and values.

    With config.qk_norm, queries and keys are normalised before they are turned: each head by itself, or all
    of them at once. window: how many tokens a token sees, itself and those before it; None: all.
    """

    context: Any = None  # where sequences lie on several ranks: parallel/context.py

    def __init__(self, config: LlamaConfig, window: int | None = None) -> None:
        super().__init__()
        self.config, self.window = config, window
        queries, keys = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.qkv = linear(config, config.n_embd, queries + 2 * keys, bias=config.qkv_bias)
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
        return self.output(attend(qkv, heads, kv_heads, window=self.window, **how))

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

    def __init__(self, config: LlamaConfig, window: int | None = None) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.attention = Attention(config, window)
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
        self.blocks = nn.ModuleList(Block(config, config.window_of(layer)) for layer in range(config.n_layer))
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


def linear(config: LlamaConfig, inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    """A linear layer; its bias starts at 0."""
    return nn.Linear(inputs, outputs, bias=bias, init=initial(config))


def residual_linear(config: LlamaConfig, inputs: int) -> nn.Linear:
    """One that adds to the residual stream."""
    return nn.Linear(inputs, config.n_embd, bias=False, init=residual_initial(config))


def initial(config: LlamaConfig) -> nn.init.Initialiser:
    """The initial values of weights: N(0, init_std)."""
    return nn.init.Normal(0.0, config.init_std)


def residual_initial(config: LlamaConfig) -> nn.init.Initialiser:
    """Those that add to the residual stream: smaller by the root of how many of them add up."""
    return nn.init.Normal(0.0, config.init_std / sqrt(2 * config.n_layer))
