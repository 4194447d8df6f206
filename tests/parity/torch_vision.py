"""models/vit.py and models/regnet.py in PyTorch: the same names and shapes of parameters."""

import torch
from torch import nn
from torch.nn import functional as F


class ViT(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.n_embd
        self.config = config
        self.patches = nn.Conv2d(config.channels, width, config.patch_size, config.patch_size)
        if config.pool == "class":
            self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, config.tokens, width))
        self.blocks = nn.ModuleList(ViTBlock(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(width, config.eps)
        self.head = nn.Linear(width, config.classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        if self.config.pool == "class":
            x = torch.cat([self.token.expand(len(x), 1, -1), x], 1)
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.config.pool == "class" else x.mean(1))


class ViTBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.n_embd
        self.heads = config.n_head
        self.norm1 = nn.LayerNorm(width, config.eps)
        self.attention = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width), "output": nn.Linear(width, width)}
        )
        self.norm2 = nn.LayerNorm(width, config.eps)
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(width, config.n_hidden), "down": nn.Linear(config.n_hidden, width)}
        )

    def forward(self, x):
        batch, time, width = x.shape
        qkv = self.attention["qkv"](self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(batch, time, width)
        x = x + self.attention["output"](y)
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.norm2(x))))


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
