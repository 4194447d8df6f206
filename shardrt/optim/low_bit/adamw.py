"""AdamW with moments in 8 bits (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022)."""

from types import ModuleType

from shardrt.optim.adamw import AdamW
from shardrt.optim.low_bit.optimizer import EightBit, arrays_of
from shardrt.optim.low_bit.scales import CODES
from shardrt.optim.slices import Update


class AdamW8bit(EightBit, AdamW):
    """AdamW whose two moments have 8 bits per element: 2.25 bytes per element that this rank holds, not 8.

    The moments of a block of 16 elements are codes of bitsandbytes' dynamic maps, with a scale in bfloat16.
    bitsandbytes has blocks of 256 or more; 16 are never cut by a shard, so every number of ranks computes
    bitwise identical weights from bitwise identical gradients. A second moment that is not 0 is never kept
    as 0, by which a step could be divided. Checkpoints have float32 moments: AdamW reads them and the other
    way round.

    Args:
        lr, betas, eps, weight_decay, in_backward: see AdamW.

    Raises:
        ValueError: for exp_avg_dtype.

    Example:
        >>> from shardrt import nn
        >>> from shardrt.optim.low_bit import AdamW8bit
        >>> optimizer = AdamW8bit(nn.Linear(8, 8).parameters(), lr=1e-3)
        >>> sum(array.nbytes for piece in optimizer.slices for array in piece.state.values())
        164
    """

    @property
    def rounds(self) -> bool:
        """A subclass with its own update may know nothing of copies in 16 bits."""
        return type(self).update is AdamW8bit.update

    def update(self, kernels: ModuleType, update: Update) -> None:
        if update.arrays["m"].dtype != CODES:
            super().update(kernels, update)
            return
        arrays = arrays_of(update.arrays, self.state_names)
        kernels.adamw8bit.step(*arrays, update.ranges, update.arrays.get("rounded"), update.kind)
