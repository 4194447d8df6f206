"""Random numbers as a function of (seed, stream, element): Philox4x32-10, the bits of the CPU's kernel.

`uniform` gives them always; `normal` but for the last bit of a logarithm now and then, which changes a
float32 once in about 10**8 numbers.
"""

import numpy as np

from shardrt.kernels.cuda._launch import Array, blocks_for, launch, vectors


def uniform(out: Array, seed: int, stream: int, offset: int) -> None:
    """Fill a flat array with elements [offset, offset + size) of the stream, uniform in [0, 1)."""
    _fill("uniform", out, (seed, stream, offset))


def normal(out: Array, seed: int, stream: int, offset: int, mean: float, std: float) -> None:
    """As `uniform`, normally distributed (Box and Muller, 1958)."""
    _fill("normal", out, (seed, stream, offset), np.float64(mean), np.float64(std))


def _fill(function: str, out: Array, words: tuple[int, int, int], *numbers: np.float64) -> None:
    args = (out, *map(np.uint64, words), *numbers, out.size, vectors(out))
    launch("philox", function, out.dtype, blocks_for(out.size, 4), args)
