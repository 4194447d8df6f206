"""Stochastic gradient descent with momentum (Sutskever et al., 2013, in PyTorch's form)."""

from collections.abc import Iterable
from typing import Any

from shardrt import device
from shardrt.nn.parameter import Parameter
from shardrt.optim.optimizer import Optimizer, Slice

Array = Any


class SGD(Optimizer):
    """w -= lr * v with v = momentum * v + (1 - dampening) * (dw + weight_decay * w); as PyTorch's.

    Raises ValueError for Nesterov momentum without momentum or with dampening.
    """

    def __init__(
        self,
        params: Iterable[Parameter | dict],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if momentum < 0:
            raise ValueError(f"SGD: momentum must not be negative, got {momentum}")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError("SGD: nesterov needs momentum > 0 and dampening = 0")
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        self.momentum = momentum
        self.dampening = dampening
        self.nesterov = nesterov
        if momentum:
            here = device.current()
            for piece in self.slices:
                shard = piece.storage.shard
                piece.state = {"momentum": here.buffer(shard.size, shard.dtype)}

    def update(self, piece: Slice, gradient: Array, lrs: Array, decays: Array) -> None:
        device.current().kernels.sgd.step(
            piece.storage.shard,
            gradient,
            piece.state.get("momentum"),
            piece.starts,
            piece.stops,
            lrs,
            decays,
            self.momentum,
            self.dampening,
            self.nesterov,
            piece.steps == 1,
        )
