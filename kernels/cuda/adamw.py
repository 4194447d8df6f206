"""AdamW over ranges of a flat shard: one launch that reads and writes everything once."""

from typing import Any

import ml_dtypes
import numpy as np

from shardrt.kernels.cuda._launch import TYPES, launch, tiles_for, type_name, vectors

Array = Any


def step(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    ranges: Array,
    rounded: Array | None = None,
    kind: str = "",
) -> None:
    """Update param, m and v, 1-D and equally long, in ranges of them.

    ranges: float64 (count, 8), in order, without overlap: start, stop, what the weights are multiplied by,
    what the step is multiplied by, 1 / the root of the second moment's bias, beta1, beta2 and eps. In GPU
    memory, so that the numbers of a step need not be known when it is launched. grad, and m with v, may be of
    other types than param; m may be uint16: the bits of bfloat16. rounded: of `kind` and as long; there the
    ranges become what they are in param.
    """
    m = m.view(ml_dtypes.bfloat16) if m.dtype == np.uint16 else m
    types = {"GRADIENT": type_name(grad.dtype), "MOMENT": type_name(m.dtype), "STATE": type_name(v.dtype)}
    if kind:
        types["ROUNDED"] = TYPES[kind]
    args = (param, grad, m, v, rounded, ranges, len(ranges), vectors(param, grad, m, v, rounded))
    launch("adamw", "adamw", param.dtype, tiles_for(param.size, len(ranges)), args, **types)
