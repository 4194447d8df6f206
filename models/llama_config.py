"""The shapes of a Llama and its kin: LlamaConfig, and the published ones by name."""

from dataclasses import dataclass

__all__ = ["FULL", "SIZES", "SLIDING", "LlamaConfig"]

# Kinds of attention, by the names of transformers' layer_types.
FULL = "full_attention"
SLIDING = "sliding_attention"


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
    qkv_bias: bool = False  # queries, keys and values are computed with a bias
    sliding_window: int = 0  # a token sees so many, itself and those before it; 0: all before it
    layer_types: tuple[str, ...] = ()  # of each layer SLIDING, which has that window, or FULL; (): all alike
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
        at_least_0 = "loss_chunk", "sliding_window", "clip_qkv", "experts", "capacity_factor", "balance_loss"
        for name in at_least_0:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.qk_norm not in ("none", "head", "all"):
            raise ValueError(f"qk_norm must be none, head or all, got {self.qk_norm!r}")
        if self.layer_types and len(self.layer_types) != self.n_layer:
            raise ValueError(
                f"layer_types must name each of the {self.n_layer} layers, got {len(self.layer_types)} names"
            )
        if odd := set(self.layer_types) - {FULL, SLIDING}:
            raise ValueError(f"layer_types must be {FULL} or {SLIDING}, got {sorted(map(str, odd))[0]!r}")
        if SLIDING in self.layer_types and not self.sliding_window:
            raise ValueError(f"layer_types: {SLIDING} needs a sliding_window of at least 1, got 0")
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

    def attention_kinds(self) -> tuple[str, ...]:
        """Of each layer, FULL or SLIDING."""
        return self.layer_types or (SLIDING if self.sliding_window else FULL,) * self.n_layer

    def window_of(self, layer: int) -> int | None:
        """How many tokens a token of this layer sees, itself and those before it; None: all."""
        return self.sliding_window if self.attention_kinds()[layer] == SLIDING else None

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
    "mistral-7b": LlamaConfig(  # v0.1, which has a window
        n_layer=32,
        n_head=32,
        n_kv_head=8,
        n_embd=4096,
        n_hidden=14336,
        block_size=32768,
        vocab_size=32000,
        tied=False,
        rope_theta=10000.0,
        sliding_window=4096,
    ),
    "qwen2.5-0.5b": LlamaConfig(
        n_layer=24,
        n_head=14,
        n_kv_head=2,
        n_embd=896,
        n_hidden=4864,
        block_size=32768,
        vocab_size=151936,
        norm_eps=1e-6,
        rope_theta=1e6,
        qkv_bias=True,
    ),
    "qwen2.5-7b": LlamaConfig(
        n_layer=28,
        n_head=28,
        n_kv_head=4,
        n_embd=3584,
        n_hidden=18944,
        block_size=131072,
        vocab_size=152064,
        tied=False,
        norm_eps=1e-6,
        rope_theta=1e6,
        qkv_bias=True,
    ),
    "qwen3-0.6b": LlamaConfig(
        n_layer=28,
        n_head=16,
        n_kv_head=8,
        n_embd=1024,
        head_size=128,
        n_hidden=3072,
        block_size=40960,
        vocab_size=151936,
        norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm="head",
    ),
    "qwen3-8b": LlamaConfig(
        n_layer=36,
        n_head=32,
        n_kv_head=8,
        n_embd=4096,
        n_hidden=12288,
        block_size=40960,
        vocab_size=151936,
        tied=False,
        norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm="head",
    ),
}
