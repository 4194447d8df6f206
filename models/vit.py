"""ViT (Dosovitskiy et al., An Image is Worth 16x16 Words, 2021).

Reads top to bottom like the figure: patches and their positions, blocks of attention and MLP with a norm
before each, a last norm, and a head on the class token or the mean of the patches. Knows nothing of sharding.
"""

from dataclasses import dataclass

from shardrt import Tensor, nn
from shardrt import functional as F

from .inputs import check_images

__all__ = ["Attention", "Block", "MLP", "SIZES", "ViT", "ViTConfig", "linear"]


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a ViT. Raises ValueError for sizes below 1 or that do not divide each other."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_hidden: int = 3072  # of the MLPs
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    classes: int = 1000
    pool: str = "class"  # the head's input: "class", a separate token, or "mean", of all patches
    dropout: float = 0.0
    eps: float = 1e-6  # of the norms
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in "n_layer n_head n_embd n_hidden image_size patch_size channels classes".split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, by in (("n_embd", "n_head"), ("image_size", "patch_size")):
            if getattr(self, name) % getattr(self, by):
                raise ValueError(
                    f"{name} must be a multiple of {by}, got {getattr(self, name)} and {getattr(self, by)}"
                )
        if self.pool not in ("class", "mean"):
            raise ValueError(f"pool must be 'class' or 'mean', got {self.pool!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        for name in ("eps", "init_std"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def tokens(self) -> int:
        """Patches, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + (self.pool == "class")


SIZES = {
    "vit-b16": ViTConfig(),
    "vit-s16": ViTConfig(n_head=6, n_embd=384, n_hidden=1536),
    "vit-l16": ViTConfig(n_layer=24, n_head=16, n_embd=1024, n_hidden=4096),
    "vit-digits": ViTConfig(
        n_layer=4,
        n_head=4,
        n_embd=64,
        n_hidden=128,
        image_size=8,
        patch_size=2,
        channels=1,
        classes=10,
        pool="mean",
        init_std=0.125,
    ),
}


class Attention(nn.Module):
    """Every patch looks at every patch, in all heads at once."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.qkv = linear(config, config.n_embd, 3 * config.n_embd)
        self.output = linear(config, config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        heads = qkv.shape[-1] // (3 * self.head_dim)  # all, or this rank's
        return self.output(F.self_attention(qkv, heads, is_causal=False))


class MLP(nn.Module):
    """Wider inside, with a GELU."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.up = linear(config, config.n_embd, config.n_hidden)
        self.down = linear(config, config.n_hidden, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Two residual steps: patches look at one another, then each by itself."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.n_embd, config.eps)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.n_embd, config.eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.norm2(x, self.dropout(self.attention(self.norm1(x))))  # the sum, and its norm
        return x + self.dropout(self.mlp(y))


class ViT(nn.Module):
    """model(images) -> logits: (batch, channels, image_size, image_size) -> (batch, classes)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        start = nn.init.Normal(0.0, config.init_std)
        width, patch = config.n_embd, config.patch_size
        self.patches = nn.Conv2d(config.channels, width, patch, stride=patch, init=start)
        self.token = nn.Parameter((1, 1, width), start) if config.pool == "class" else None
        self.positions = nn.Parameter((1, config.tokens, width), start)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(width, config.eps)
        self.head = nn.Linear(width, config.classes, init=start)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embedded(images)
        for block in self.blocks:
            x = block(x)
        return self.headed(x)

    def embedded(self, images: Tensor) -> Tensor:
        """The input of the first block: (batch, tokens, n_embd)."""
        config = self.config
        check_images(images, config.channels, config.image_size)
        x = self.patches(images)  # (batch, n_embd, rows, columns)
        x = x.reshape(*x.shape[:2], -1).transpose(1, 2)  # (batch, patches, n_embd)
        if self.token is not None:
            x = F.concatenate([F.expand(self.token, (x.shape[0], 1, config.n_embd)), x], axis=1)
        return self.dropout(x + self.positions)

    def headed(self, x: Tensor) -> Tensor:
        """The logits, from the output of the last block."""
        x = self.norm(x)
        return self.head(x.mean(1) if self.token is None else x[:, 0])

    def pieces(self) -> list[nn.Piece]:
        """The forward, for a pipeline."""
        start = (self.patches, self.positions, self.dropout)
        start = start if self.token is None else (*start, self.token)
        blocks = [nn.Piece(b.name, lambda x, batch, block=b: block(x), (b,)) for b in self.blocks]
        return [
            nn.Piece("embedding", lambda x, batch: self.embedded(batch["images"]), start),
            *blocks,
            nn.Piece("head", lambda x, batch: self.headed(x), (self.norm, self.head)),
        ]


def linear(config: ViTConfig, inputs: int, outputs: int) -> nn.Linear:
    """A linear layer that starts with N(0, init_std) and zero bias."""
    return nn.Linear(inputs, outputs, init=nn.init.Normal(0.0, config.init_std))
