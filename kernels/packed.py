"""The form of numbers that are quantised in blocks: the scale of each block, then all codes.

    [scale] * blocks, [code] * count, padding to 16 bytes

8 bits: a float32 scale, and signed codes: code * scale. 4 bits: two codes to a byte, the first in the lower
half. Of the scale, the upper half is the block's least number and the lower half the step, both bfloat16:
least + code * step.
"""

SCALES = {8: "float32", 4: "uint32"}  # bits -> dtype


def check(bits: int, block: int) -> None:
    """Raise ValueError unless codes have 8 or 4 bits and blocks have whole vectors of 16 numbers."""
    if bits not in SCALES:
        raise ValueError(f"quantise: bits must be 8 or 4, got {bits!r}")
    if block < 32 or block % 32:
        raise ValueError(f"quantise: block must be a multiple of 32, got {block!r}")


def blocks_of(count: int, block: int) -> int:
    """Number of blocks of `count` numbers; the last may be shorter."""
    return -(-count // block)


def packed_bytes(count: int, bits: int, block: int) -> int:
    """Bytes of `count` quantised numbers, a multiple of 16."""
    return -(-(4 * blocks_of(count, block) + -(-count * bits // 8)) // 16) * 16
