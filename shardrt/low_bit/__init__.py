"""AdamW and Lion whose optimizer state has 8 or 16 bits per number."""

from shardrt.low_bit.adamw import AdamW8bit
from shardrt.low_bit.bfloat16 import AdamWBF16, LionBF16
from shardrt.low_bit.lion import Lion8bit

__all__ = ["AdamW8bit", "AdamWBF16", "Lion8bit", "LionBF16"]
