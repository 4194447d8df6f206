"""Stochastic gradient descent with momentum (Sutskever et al., 2013, in PyTorch's form)."""

from collections.abc import Iterable
from types import ModuleType

from shardrt.nn.parameter import Parameter
from shardrt.optim.optimizer import Optimizer
from shardrt.optim.slices import Update


class SGD(Optimizer):
    """w -= lr * v with v = momentum * v + (1 - dampening) * (dw + weight_decay * w); as PyTorch's.

    Args:
        in_backward: see Optimizer.

    Raises:
        ValueError: for Nesterov momentum without momentum or with dampening.

    Example:
        >>> from shardrt import nn, optim
        >>> optimizer = optim.SGD(nn.Linear(8, 1).parameters(), lr=0.1, momentum=0.9)
    """

    def __init__(
        self,
        params: Iterable[Parameter | dict],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        in_backward: bool = False,
    ) -> None:
        if momentum < 0:
            raise ValueError(f"SGD: momentum must not be negative, got {momentum}")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError("SGD: nesterov needs momentum > 0 and dampening = 0")
        super().__init__(
            params,
            {"lr": lr, "weight_decay": weight_decay},
            state={"momentum": "momentum_buffer"} if momentum else {},
            constants={"momentum": momentum, "dampening": dampening, "nesterov": nesterov},
            in_backward=in_backward,
        )
        self.momentum = momentum
        self.dampening = dampening
        self.nesterov = nesterov

    def numbers(self, group: dict, steps: int) -> tuple[float, ...]:
        first = steps == 1  # the buffer holds nothing yet, and becomes the gradient
        kept, added = (0.0, 1.0) if first else (self.momentum, 1 - self.dampening)
        return group["lr"], group["weight_decay"], kept, added

    def update(self, kernels: ModuleType, update: Update) -> None:
        arrays = (update.arrays.get(name) for name in ("shard", "gradient", "momentum"))
        kernels.sgd.step(*arrays, update.ranges, self.momentum, self.nesterov)
