"""AdamW and Lion whose optimizer state has 8 bits per number: names as in bitsandbytes."""

from shardrt.low_bit.adamw import AdamW8bit
from shardrt.low_bit.lion import Lion8bit

__all__ = ["AdamW8bit", "Lion8bit"]
