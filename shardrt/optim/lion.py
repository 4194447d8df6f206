"""Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2)."""

from collections.abc import Iterable
from types import ModuleType

from shardrt.nn.parameter import Parameter
from shardrt.optim.optimizer import Optimizer, check_betas
from shardrt.optim.slices import Update


class Lion(Optimizer):
    """The sign of a mean of gradients with decoupled weight decay, in one pass over each flat shard.

    w = w * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * dw), then
    m = beta2 * m + (1 - beta2) * dw: one float32 array of the shard's length, half of AdamW's state. Lion's
    authors take a third to a tenth of AdamW's learning rate, and as many times its weight decay.

    Args:
        lr: learning rate per step.
        betas: two numbers in [0, 1).
        weight_decay: multiplied by lr and taken off the weights.
        in_backward: see Optimizer.

    Example:
        >>> from shardrt import nn, optim
        >>> optimizer = optim.Lion(nn.Linear(8, 1).parameters(), lr=1e-4, weight_decay=0.1)
    """

    def __init__(
        self,
        params: Iterable[Parameter | dict],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        in_backward: bool = False,
    ) -> None:
        settings = {"lr": lr, "weight_decay": weight_decay, "betas": betas}
        super().__init__(params, settings, state={"m": "exp_avg"}, in_backward=in_backward)

    def check(self, group: dict) -> None:
        check_betas("Lion", group)

    def numbers(self, group: dict, steps: int) -> tuple[float, ...]:
        return 1 - group["lr"] * group["weight_decay"], group["lr"], *group["betas"]

    def update(self, kernels: ModuleType, update: Update) -> None:
        kernels.lion.step(*(update.arrays[name] for name in ("shard", "gradient", "m")), update.ranges)
