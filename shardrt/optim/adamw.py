"""AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2)."""

from collections.abc import Iterable
from math import sqrt
from types import ModuleType

from shardrt import dtypes
from shardrt.nn.parameter import Parameter
from shardrt.optim.optimizer import Optimizer, check_betas
from shardrt.optim.slices import Update

STATE = {"m": "exp_avg", "v": "exp_avg_sq"}  # moments, and their names in PyTorch


class AdamW(Optimizer):
    """Adam with decoupled weight decay, in one pass over each flat shard; the same update as PyTorch's.

    The moments are float32 arrays of the shard's length: 8 bytes per element that this rank holds.

    Args:
        lr: learning rate per step.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: multiplied by lr and taken off the weights.
        in_backward: see Optimizer.
        exp_avg_dtype: "bfloat16" keeps the first moment of float32 parameters in 2 bytes, rounded to nearest.
            The second stays float32: a step changes it by a part 1 - betas[1], less than half a step of
            bfloat16.

    Example:
        >>> import numpy as np
        >>> from shardrt import nn, optim
        >>> layer = nn.Linear(8, 1)
        >>> optimizer = optim.AdamW(layer.parameters(), lr=1e-3)
        >>> layer(np.ones((4, 8), np.float32)).mean().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Iterable[Parameter | dict],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        in_backward: bool = False,
        exp_avg_dtype: str = dtypes.float32,
    ) -> None:
        if exp_avg_dtype not in (dtypes.float32, dtypes.bfloat16):
            raise ValueError(f"AdamW: exp_avg_dtype must be 'float32' or 'bfloat16', got {exp_avg_dtype!r}")
        low = ("m",) if exp_avg_dtype == dtypes.bfloat16 else ()
        settings = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, settings, state=STATE, low_state=low, in_backward=in_backward)

    @property
    def rounds(self) -> bool:
        """A subclass with its own update may know nothing of copies in 16 bits."""
        return type(self).update is AdamW.update

    def check(self, group: dict) -> None:
        check_betas("AdamW", group)

    def numbers(self, group: dict, steps: int) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        rate, correction = group["lr"] / (1 - beta1**steps), 1 / sqrt(1 - beta2**steps)
        return 1 - group["lr"] * group["weight_decay"], rate, correction, beta1, beta2, group["eps"]

    def update(self, kernels: ModuleType, update: Update) -> None:
        arrays = (update.arrays[name] for name in ("shard", "gradient", "m", "v"))
        kernels.adamw.step(*arrays, update.ranges, update.arrays.get("rounded"), update.kind)
