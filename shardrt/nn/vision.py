"""Layers of convolutional networks, on images (batch, channels, height, width). Defaults are PyTorch's."""

from math import sqrt
from typing import Any

import numpy as np

from shardrt import functional as F
from shardrt.comm import Communicator, DeviceMesh
from shardrt.nn import init as initial
from shardrt.nn.init import Initialiser
from shardrt.nn.layers import check_sizes
from shardrt.nn.public import Module, Parameter
from shardrt.tensor import Tensor

Pair = tuple[int, int]


class Conv2d(Module):
    """(batch, in_channels, height, width) -> (batch, out_channels, ...): see functional.conv2d.

    Args:
        init: the initial weight, the bias then at 0. Left out, both start evenly from +-1 / sqrt(fan_in), the
            numbers that an output sums, as in PyTorch.

    Raises:
        ValueError: for wrong sizes.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        init: Initialiser | None = None,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        check_sizes("Conv2d", in_channels=in_channels, out_channels=out_channels, groups=groups)
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"Conv2d: groups must divide both numbers of channels {in_channels} and {out_channels}, got "
                f"{groups}"
            )
        window = (kernel_size, kernel_size) if isinstance(kernel_size, int) else tuple(kernel_size)
        check_sizes("Conv2d", kernel_size=min(window))
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        shape = out_channels, in_channels // groups, *window
        bound = 1 / sqrt(shape[1] * window[0] * window[1])
        even = initial.Uniform(-bound, bound)
        self.weight = Parameter(shape, init or even, dtype=dtype)
        start = initial.Zeros() if init else even
        self.bias = Parameter((out_channels,), start, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        geometry = self.stride, self.padding, self.dilation, self.groups
        return F.conv2d(x, self.weight, self.bias, *geometry)


class ConvTranspose2d(Conv2d):
    """(batch, in_channels, height, width) -> (batch, out_channels, ...): see functional.conv_transpose2d.

    The weight has the shape and initial values of the opposite convolution, out_channels to in_channels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        output_padding: int | Pair = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | Pair = 1,
        *,
        init: Initialiser | None = None,
        dtype: Any = np.float32,
    ) -> None:
        back = out_channels, in_channels, kernel_size, stride, padding, dilation, groups, bias
        super().__init__(*back, init=init, dtype=dtype)
        self.output_padding = output_padding
        if self.bias is not None:
            self.bias = Parameter((out_channels,), self.bias.init, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        geometry = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return F.conv_transpose2d(x, self.weight, self.bias, *geometry)


class Conv1d(Module):
    """(batch, in_channels, length) -> (batch, out_channels, ...): see functional.conv1d. Else as Conv2d."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        init: Initialiser | None = None,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        check_sizes("Conv1d", in_channels=in_channels, out_channels=out_channels, groups=groups)
        check_sizes("Conv1d", kernel_size=kernel_size)
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"Conv1d: groups must divide both numbers of channels {in_channels} and {out_channels}, got "
                f"{groups}"
            )
        self.geometry = stride, padding, dilation, groups
        shape = out_channels, in_channels // groups, kernel_size
        bound = 1 / sqrt(shape[1] * kernel_size)
        even = initial.Uniform(-bound, bound)
        self.weight = Parameter(shape, init or even, dtype=dtype)
        start = initial.Zeros() if init else even
        self.bias = Parameter((out_channels,), start, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight, self.bias, *self.geometry)


class GroupNorm(Module):
    """Group norm of `channels` channels in `groups` groups: see functional.group_norm. weight 1, bias 0."""

    def __init__(self, groups: int, channels: int, eps: float = 1e-5, *, dtype: Any = np.float32) -> None:
        super().__init__()
        check_sizes("GroupNorm", groups=groups, channels=channels)
        if channels % groups:
            raise ValueError(f"GroupNorm: groups must divide the {channels} channels, got {groups}")
        self.groups, self.eps = groups, eps
        self.weight = Parameter((channels,), initial.Ones(), dtype=dtype)
        self.bias = Parameter((channels,), initial.Zeros(), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)


class MaxPool2d(Module):
    """See functional.max_pool2d."""

    def __init__(self, window: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> None:
        super().__init__()
        self.geometry = window, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, *self.geometry)


class AvgPool2d(Module):
    """See functional.avg_pool2d."""

    def __init__(self, window: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> None:
        super().__init__()
        self.geometry = window, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, *self.geometry)


class AdaptiveAvgPool2d(Module):
    """See functional.adaptive_avg_pool2d."""

    def __init__(self, size: int | Pair) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, self.size)


class BatchNorm2d(Module):
    """Batch norm of each of `channels` channels. weight starts at 1 (or as `init`), bias at 0.

    running_mean and running_var are buffers: those of this rank's batches, unless synchronise_batch_norm has
    been called on the model.

    Args:
        momentum: how far they move towards each batch's.
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        *,
        init: Initialiser | None = None,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        check_sizes("BatchNorm2d", channels=channels)
        self.eps, self.momentum = eps, momentum
        self.communicator: Communicator | None = None
        self.weight = Parameter((channels,), init or initial.Ones(), dtype=dtype)
        self.bias = Parameter((channels,), initial.Zeros(), dtype=dtype)
        self.register_buffer("running_mean", (channels,), 0.0, dtype=dtype)
        self.register_buffer("running_var", (channels,), 1.0, dtype=dtype)

    def __deepcopy__(self, memo: dict) -> "BatchNorm2d":
        memo[id(self.communicator)] = self.communicator  # the ranks are the same ones
        return super().__deepcopy__(memo)

    def forward(self, x: Tensor) -> Tensor:
        running = self.running_mean, self.running_var
        how = self.training, self.momentum, self.eps, self.communicator
        return F.batch_norm(x, *running, self.weight, self.bias, *how)


def synchronise_batch_norm(model: Module, mesh: DeviceMesh) -> Module:
    """Let every batch norm of `model` take its statistics from the batches of all ranks; gives `model` back.

    One collective per layer in each direction, in training only. Every rank must run the same layers in the
    same order. The running statistics are then bitwise identical on all ranks. Collective.
    """
    layers = [module for module in model.modules() if isinstance(module, BatchNorm2d)]
    communicator = mesh.communicator("batch_norm") if layers and mesh.size > 1 else None
    for layer in layers:
        layer.communicator = communicator
    return model
