"""Sums over ranks by one fixed tree. This file decides the bits of every backend.

A kernel of the arrays' device sums floats, adjacent pairs first: (0+1) + (2+3), (0+1) + 2. So a sum inside
groups of 2, 4, 8, ... ranks and then over the groups is bitwise identical to a sum over all ranks.
NumPy or CuPy combine integers, and "max", "min" and "prod", by the same tree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardrt import device

Array = Any

_PAIRWISE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


class Reduction(NamedTuple):
    """How to combine parts to one array: arguments of `combine`."""

    scale: float = 1.0
    accumulate: bool = False
    op: str = "sum"
    kind: str = ""


def combine(
    output: Array,
    parts: list[Array],
    scale: float = 1.0,
    accumulate: bool = False,
    op: str = "sum",
    kind: str = "",
) -> None:
    """Compute output = (output if accumulate) + scale * sum of parts; with "max", "min" and "prod" likewise.

    `kind`: "bfloat16" or "float16" if uint16 parts hold the bits of this type; then `output` is float32.
    `output` may be one of `parts`. An element depends only on the same elements of the parts, so callers may
    combine an array in pieces of any size with the same result.
    """
    if output.size == 0:
        return
    if kind:
        device.of(output).kernels.reduce.sum_packed(output, parts, scale, accumulate, kind)
    elif op == "sum" and output.dtype.kind == "f":
        device.of(output).kernels.reduce.sum_into(output, parts, scale, accumulate)
    else:
        total = _tree(_PAIRWISE[op], parts)
        output[...] = output + total if accumulate else total


def _tree(pairwise: Callable[[Array, Array], Array], parts: list[Array]) -> Array:
    while len(parts) > 1:
        even = len(parts) // 2 * 2
        parts = [pairwise(*parts[i : i + 2]) for i in range(0, even, 2)] + parts[even:]
    return parts[0]
