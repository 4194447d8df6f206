"""Sums over ranks by one fixed tree: the one place that decides the bits of every backend.

Floats go through the kernel of the device where they are, which adds neighbours, bottom up: (0+1) + (2+3),
(0+1) + 2. So a sum over groups of 2, 4, 8, ... ranks and then over the groups has the bits of one over all
ranks. Integers, and all that is no sum, go through NumPy, or CuPy, by the same tree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardrt import device

Array = Any

_PAIRWISE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


class Reduction(NamedTuple):
    """How parts become one array: the arguments of `combine` that say so."""

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
    """output = (output if accumulate) + scale * sum of parts; with "max", "min" and "prod" likewise.

    `kind`: "bfloat16" or "float16" where the parts are uint16, the bits of such values; `output` is float32.
    `output` may be one of `parts`. Every element depends only on its own elements of the parts, so an array
    may be combined in any pieces with the same result.
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
