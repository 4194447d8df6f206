"""Modules without parameters: one call of functional each. Defaults are PyTorch's."""

from typing import Any

from shardrt import functional as F
from shardrt.nn.public import Module
from shardrt.tensor import Tensor


class Identity(Module):
    """Returns its input; arguments of its constructor are ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any) -> Any:
        return x


class Flatten(Module):
    """The axes from `first` to `last` as one: all but the batch if nothing is said."""

    def __init__(self, first: int = 1, last: int = -1) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        return F.flatten(x, self.first, self.last)


class GELU(Module):
    """The activation; approximate: "none" or "tanh"."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f"GELU: approximate must be 'none' or 'tanh', got {approximate!r}")
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, self.approximate)


class ReLU(Module):
    """See functional.relu. `inplace` changes nothing."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class SiLU(Module):
    """See functional.silu. `inplace` changes nothing."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class LeakyReLU(Module):
    """See functional.leaky_relu. `inplace` changes nothing."""

    def __init__(self, slope: float = 0.01, inplace: bool = False) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


class ELU(Module):
    """See functional.elu. `inplace` changes nothing."""

    def __init__(self, alpha: float = 1.0, inplace: bool = False) -> None:
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x, self.alpha)


class Tanh(Module):
    """See functional.tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return F.tanh(x)


class Sigmoid(Module):
    """See functional.sigmoid."""

    def forward(self, x: Tensor) -> Tensor:
        return F.sigmoid(x)


class Softplus(Module):
    """See functional.softplus."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x)


class Softmax(Module):
    """See functional.softmax; over the last axis if nothing is said."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x, self.axis)


class LogSoftmax(Module):
    """See functional.log_softmax; over the last axis if nothing is said."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(x, self.axis)


class MSELoss(Module):
    """See functional.mse_loss."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, x: Tensor, target: Any) -> Tensor:
        return F.mse_loss(x, target, reduction=self.reduction)


class CrossEntropyLoss(Module):
    """See functional.cross_entropy: classes are the last axis."""

    def __init__(self, ignore_index: int = -100, reduction: str = "mean") -> None:
        super().__init__()
        self.ignore_index, self.reduction = ignore_index, reduction

    def forward(self, logits: Tensor, targets: Any) -> Tensor:
        return F.cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction=self.reduction)
