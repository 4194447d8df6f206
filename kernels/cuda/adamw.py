"""AdamW over ranges of a flat shard: one pass that reads and writes everything once.

A range is a launch; what is decayed and what is not should lie together.
"""

from typing import Any

import numpy as np

from shardrt.kernels.cuda._launch import TYPES, accumulator, blocks_for, launch, vectors

Array = Any


def step(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    starts: Array,
    stops: Array,
    lrs: Array,
    decays: Array,
    beta1: float,
    beta2: float,
    eps: float,
    step_count: int,
    grad_scale: float,
) -> None:
    """Update param, m and v, 1-D and equally long, in the ranges [starts, stops).

    Range k has learning rate lrs[k] and decoupled weight decay decays[k]. step_count, from 1, corrects the
    moments' bias; grad is multiplied by grad_scale as it is read. The ranges are NumPy's; grad, and m with v,
    may be of other types than param.
    """
    real = accumulator(param.dtype)
    arrays, aligned = (param, grad, m, v), vectors(param, grad, m, v)
    types = {"GRADIENT": TYPES[grad.dtype.name], "STATE": TYPES[m.dtype.name]}
    root = np.sqrt(1 - beta2**step_count)
    common = (1 / root, beta1, 1 - beta1, beta2, 1 - beta2, eps, grad_scale)
    for start, stop, lr, decay in zip(starts, stops, lrs, decays, strict=True):
        numbers = map(real, (1 - lr * decay, lr / (1 - beta1**step_count), *common))
        args = (*arrays, int(start), int(stop), *numbers, aligned)
        launch("adamw", "adamw", param.dtype, blocks_for(int(stop - start), 4), args, **types)


def bytes_moved(count: int, itemsize: int = 4) -> int:
    """Bytes of a step: four arrays read, three written."""
    return 7 * count * itemsize


def flops(count: int) -> int:
    """Operations of a step, about."""
    return 14 * count
