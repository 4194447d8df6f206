"""Lion over ranges of a flat shard: one launch that reads and writes everything once."""

from typing import Any

from shardrt.kernels.cuda._launch import launch, tiles_for, type_name, vectors

Array = Any


def step(param: Array, grad: Array, m: Array, ranges: Array) -> None:
    """Update param and m, 1-D and equally long, in ranges of them.

    ranges: float64 (count, 6), in order, without overlap: start, stop, what the weights are multiplied by,
    learning rate, beta1 (m's part of the direction) and beta2 (what is kept of m). The direction is the sign,
    0 of 0 and nan of nan. In GPU memory, so that the numbers of a step need not be known when it is launched.
    grad and m may be of other types than param.
    """
    types = {"GRADIENT": type_name(grad.dtype), "STATE": type_name(m.dtype)}
    args = (param, grad, m, ranges, len(ranges), vectors(param, grad, m))
    launch("lion", "lion", param.dtype, tiles_for(param.size, len(ranges)), args, **types)
