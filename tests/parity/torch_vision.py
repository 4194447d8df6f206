"""models/vit.py and models/regnet.py in PyTorch: the same names and shapes of parameters."""

import torch
from torch import nn

from bench.peers import torch_models


class ViT(torch_models.ViT):
    """Its head sees the class token, or the mean of all patches."""

    def __init__(self, config):
        super().__init__(
            layers=config.n_layer,
            heads=config.n_head,
            width=config.n_embd,
            hidden=config.n_hidden,
            image=config.image_size,
            patch=config.patch_size,
            classes=config.classes,
        )
        self.mean = config.pool == "mean"
        if self.mean:
            del self.token
            self.positions = nn.Parameter(torch.zeros(1, config.tokens, config.n_embd))

    def begin(self, images):
        if not self.mean:
            return super().begin(images)
        return self.patches(images).flatten(2).transpose(1, 2) + self.positions

    def end(self, x):
        return self.head(self.norm(x).mean(1)) if self.mean else super().end(x)


class RegNet(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.stem = conv_norm(config.channels, config.stem_width, 3, config.stem_stride)
        self.blocks = nn.ModuleList()
        inputs = config.stem_width
        for depth, width, stride in zip(config.depths, config.widths, config.strides, strict=True):
            for i in range(depth):
                self.blocks.append(YBlock(config, inputs, width, stride if i == 0 else 1))
                inputs = width
        self.head = nn.Linear(inputs, config.classes)

    def forward(self, images):
        x = run(self.stem, images).relu()
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class YBlock(nn.Module):
    def __init__(self, config, inputs, width, stride):
        super().__init__()
        squeezed = round(config.squeeze * inputs)
        self.a = conv_norm(inputs, width, 1)
        self.b = conv_norm(width, width, 3, stride, width // min(config.group_width, width))
        self.se = nn.ModuleDict({"squeeze": nn.Linear(width, squeezed), "excite": nn.Linear(squeezed, width)})
        self.c = conv_norm(width, width, 1)
        if stride > 1 or inputs != width:
            self.shortcut = conv_norm(inputs, width, 1, stride)

    def forward(self, x):
        y = run(self.b, run(self.a, x).relu()).relu()
        scale = self.se["excite"](self.se["squeeze"](y.mean((2, 3))).relu()).sigmoid()
        y = run(self.c, y * scale[:, :, None, None])
        return (y + (run(self.shortcut, x) if hasattr(self, "shortcut") else x)).relu()


def conv_norm(inputs, outputs, window, stride=1, groups=1):
    conv = nn.Conv2d(inputs, outputs, window, stride, window // 2, groups=groups, bias=False)
    return nn.ModuleDict({"conv": conv, "norm": nn.BatchNorm2d(outputs)})


def run(pair, x):
    return pair["norm"](pair["conv"](x))
