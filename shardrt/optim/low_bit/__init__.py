"""AdamW and Lion whose optimizer state has 8 or 16 bits per number."""

from shardrt.optim.low_bit.adamw import AdamW8bit
from shardrt.optim.low_bit.bfloat16 import AdamWBF16, LionBF16
from shardrt.optim.low_bit.lion import Lion8bit
from shardrt.optim.low_bit.optimizer import EightBit
from shardrt.optim.low_bit.scales import BYTES, with_scales

__all__ = ["AdamW8bit", "AdamWBF16", "BYTES", "EightBit", "Lion8bit", "LionBF16", "with_scales"]
