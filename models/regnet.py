"""RegNetY (Radosavovic et al., Designing Network Design Spaces, 2020).

Reads top to bottom like the figure: a stem, stages of residual blocks, the first of each halving the
image, and a head on the mean of all pixels. Knows nothing of sharding.
"""

from dataclasses import dataclass
from math import log, sqrt

from shardrt import Tensor, nn
from shardrt import functional as F

from .inputs import check_images


@dataclass(frozen=True)
class RegNetConfig:
    """The shape of a RegNetY: blocks and channels by stage. Raises ValueError for sizes that don't fit."""

    depths: tuple[int, ...] = (2, 4, 11, 1)
    widths: tuple[int, ...] = (224, 448, 1232, 3024)
    group_width: int = 112  # channels of a group of the 3 x 3 convolutions
    strides: tuple[int, ...] = (2, 2, 2, 2)  # of each stage's first block
    stem_width: int = 32
    stem_stride: int = 2
    squeeze: float = 0.25  # channels in the middle of squeeze-and-excitation, of those that enter the block
    channels: int = 3
    classes: int = 1000

    def __post_init__(self) -> None:
        if not len(self.depths) == len(self.widths) == len(self.strides) >= 1:
            raise ValueError(
                f"depths, widths and strides must have one number per stage, got {self.depths}, "
                f"{self.widths} and {self.strides}"
            )
        numbers = (
            *self.depths,
            *self.widths,
            *self.strides,
            self.group_width,
            self.stem_width,
            self.stem_stride,
        )
        if min(*numbers, self.channels, self.classes) < 1 or not self.squeeze > 0:
            raise ValueError(f"all sizes must be at least 1 and squeeze positive, got {self}")
        for width in self.widths:
            if width % min(self.group_width, width):
                raise ValueError(
                    f"widths must be multiples of group_width {self.group_width}, got {self.widths}"
                )


def generated(depth: int, w_0: int, w_a: float, w_m: float, group_width: int) -> RegNetConfig:
    """The network that the paper's four numbers and a group width stand for (section 3.3).

    Block j should have w_0 + w_a j channels; the nearest w_0 w_m^k, rounded to 8, has them; blocks of equal
    width are a stage, whose width is rounded to whole groups.
    """
    powers = [round(log((w_0 + w_a * j) / w_0) / log(w_m)) for j in range(depth)]
    blocks = [round(w_0 * w_m**power / 8) * 8 for power in powers]
    widths = sorted(set(blocks))
    rounded = []
    for width in widths:
        group = min(group_width, width)
        whole = max(group, int(width + group / 2) // group * group)
        rounded.append(whole + group if whole < 0.9 * width else whole)
    depths = tuple(blocks.count(width) for width in widths)
    return RegNetConfig(depths, tuple(rounded), group_width, (2,) * len(widths))


SIZES = {
    "regnety-400mf": generated(16, 48, 27.89, 2.09, 8),
    "regnety-800mf": generated(14, 56, 38.84, 2.4, 16),
    "regnety-16gf": generated(18, 200, 106.23, 2.48, 112),
    "regnety-digits": RegNetConfig(
        depths=(1, 2), widths=(32, 64), group_width=16, strides=(1, 2), stem_stride=1, channels=1, classes=10
    ),
}


class ConvNorm(nn.Module):
    """A convolution that keeps the image's size, but for its stride, and a batch norm."""

    def __init__(self, inputs: int, outputs: int, window: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        start = nn.init.Normal(0.0, sqrt(2 / (window * window * outputs)))  # He et al., 2015, by the outputs
        geometry = {"stride": stride, "padding": window // 2, "groups": groups}
        self.conv = nn.Conv2d(inputs, outputs, window, bias=False, init=start, **geometry)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class SqueezeExcite(nn.Module):
    """Scales each channel by what the means of all channels say (Hu et al., 2018)."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(width, squeezed)
        self.excite = nn.Linear(squeezed, width)

    def forward(self, x: Tensor) -> Tensor:
        scale = F.sigmoid(self.excite(F.relu(self.squeeze(F.global_avg_pool2d(x)))))  # (batch, width)
        return x * scale.reshape(*scale.shape, 1, 1)


class Block(nn.Module):
    """The Y block: 1 x 1, 3 x 3 in groups, squeeze-and-excitation, 1 x 1; added to its input."""

    def __init__(self, config: RegNetConfig, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.a = ConvNorm(inputs, width, 1)
        self.b = ConvNorm(width, width, 3, stride, groups=width // min(config.group_width, width))
        self.se = SqueezeExcite(width, max(1, round(config.squeeze * inputs)))
        self.c = ConvNorm(width, width, 1)
        self.shortcut = ConvNorm(inputs, width, 1, stride) if stride > 1 or inputs != width else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x))
        y = F.relu(self.b(y))
        y = self.c(self.se(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class RegNet(nn.Module):
    """model(images) -> logits: (batch, channels, height, width) -> (batch, classes)."""

    def __init__(self, config: RegNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = ConvNorm(config.channels, config.stem_width, 3, config.stem_stride)
        self.blocks = nn.ModuleList()
        inputs = config.stem_width
        for depth, width, stride in zip(config.depths, config.widths, config.strides, strict=True):
            for i in range(depth):
                self.blocks.append(Block(config, inputs, width, stride if i == 0 else 1))
                inputs = width
        self.head = nn.Linear(inputs, config.classes, init=nn.init.Normal(0.0, 0.01))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stemmed(images)
        for block in self.blocks:
            x = block(x)
        return self.headed(x)

    def stemmed(self, images: Tensor) -> Tensor:
        """The input of the first block."""
        check_images(images, self.config.channels)
        return F.relu(self.stem(images))

    def headed(self, x: Tensor) -> Tensor:
        """The logits, from the output of the last block."""
        return self.head(F.global_avg_pool2d(x))

    def pieces(self) -> list[nn.Piece]:
        """The forward, for a pipeline."""
        blocks = [nn.Piece(b.name, lambda x, batch, block=b: block(x), (b,)) for b in self.blocks]
        return [
            nn.Piece("stem", lambda x, batch: self.stemmed(batch["images"]), (self.stem,)),
            *blocks,
            nn.Piece("head", lambda x, batch: self.headed(x), (self.head,)),
        ]
