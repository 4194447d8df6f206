"""Sums over ranks in rank order: the one place that decides the bits of every host backend.

Floats go through the kernel of the CPU device (a fused pass, no temporary); integers through NumPy.
"""

from functools import cache, reduce
from importlib import import_module
from types import ModuleType

import numpy as np

_PAIRWISE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def combine(
    output: np.ndarray, parts: list[np.ndarray], scale: float = 1.0, accumulate: bool = False, op: str = "sum"
) -> None:
    """output = (output if accumulate) + scale * (parts[0] + parts[1] + ...); with "max" and "min" likewise.

    `output` may be one of `parts`. Every element depends only on its own elements of the parts, so an array
    may be combined in any pieces with the same result.
    """
    if output.size == 0:
        return
    if op == "sum" and output.dtype.kind == "f":
        _kernels().sum_into(output, parts, scale, accumulate)
    else:
        total = reduce(_PAIRWISE[op], parts)
        output[...] = output + total if accumulate else total


@cache
def _kernels() -> ModuleType:
    return import_module("shardrt.kernels.cpu.reduce")  # imports Numba: not before it is needed
