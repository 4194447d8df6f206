"""Lion with its moment in 8 bits."""

from types import ModuleType

from shardrt.optim.lion import Lion
from shardrt.optim.low_bit.optimizer import EightBit, arrays_of
from shardrt.optim.low_bit.scales import CODES
from shardrt.optim.slices import Update


class Lion8bit(EightBit, Lion):
    """Lion whose moment has 8 bits per element, as AdamW8bit's first moment: 1.125 bytes per element, not 4.

    Args:
        lr, betas, weight_decay, in_backward: see Lion.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.optim.low_bit import Lion8bit
        >>> optimizer = Lion8bit(nn.Linear(8, 8).parameters(), lr=1e-4, weight_decay=0.1)
    """

    def update(self, kernels: ModuleType, update: Update) -> None:
        if update.arrays["m"].dtype != CODES:
            super().update(kernels, update)
            return
        kernels.lion8bit.step(*arrays_of(update.arrays, self.state_names), update.ranges)
