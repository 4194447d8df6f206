"""AdamW over ranges of a flat shard: one launch that reads and writes everything once."""

import ml_dtypes
import numpy as np

from shardrt.kernels.cuda._launch import TYPES, Array, launch, tiles_for, type_name, vectors


def step(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    ranges: Array,
    rounded: Array | None = None,
    kind: str = "",
) -> None:
    """Update param, m and v, 1-D and equally long, in ranges of them: see the CPU's.

    ranges: in GPU memory, so that the numbers of a step need not be known when it is launched. grad, m and v
    may be of other types than param. rounded: of `kind`.
    """
    m = m.view(ml_dtypes.bfloat16) if m.dtype == np.uint16 else m
    types = {"GRADIENT": type_name(grad.dtype), "MOMENT": type_name(m.dtype), "STATE": type_name(v.dtype)}
    if kind:
        types["ROUNDED"] = TYPES[kind]
    args = (param, grad, m, v, rounded, ranges, len(ranges), vectors(param, grad, m, v, rounded))
    launch("adamw", "adamw", param.dtype, tiles_for(param.size, len(ranges)), args, **types)
